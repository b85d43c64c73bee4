"""Which launcher is taken, and why."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import Elastic, Host, Job, detect
from hvdtrain.launch.detect import Found, choose
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.srun import knows_overlap, parse_pmi_list

OMPI = Mpi("openmpi", (4, 1, 8), "/env/bin/mpirun", "/env")
MPICH = Mpi("mpich", (5, 0, 2), "/env/bin/mpirun", "/env")
HERE = Job(("x",), (Host("localhost", 2),), 2)
AWAY = Job(("x",), (Host("node1", 1), Host("node2", 1)), 2)
GLOO_HERE = Job(("x",), (Host("localhost", 2),), 2, controller="gloo")
GLOO_AWAY = Job(("x",), (Host("node1", 1), Host("node2", 1)), 2, controller="gloo")
GLOO_BY_NAME = Job(("x",), (Host("Me", 2),), 2, controller="gloo", here=frozenset({"me"}))
ELASTIC = Job(("x",), (Host("node1", 2),), 2, controller="gloo", elastic=Elastic(1, 4, "/d.sh"))

ALL = Found(mpi=OMPI, horovodrun="/env/bin/horovodrun")
SLURM = Found(mpi=OMPI, horovodrun="/env/bin/horovodrun", srun="/usr/bin/srun", pmi="pmix", system="slurm")
LSF = Found(mpi=OMPI, jsrun="/usr/bin/jsrun", system="lsf")

CHOICES = {
    "open mpi": (ALL, AWAY, "mpirun", "Open MPI 4.1.8 is here, and starts faster than horovodrun"),
    "mpich": (Found(mpi=MPICH), HERE, "mpirun", "MPICH 5.0.2 is here, and starts faster than horovodrun"),
    "gloo here": (ALL, GLOO_HERE, "local", "Gloo on this machine alone needs no launcher"),
    "gloo here by its own name": (ALL, GLOO_BY_NAME, "local", "Gloo on this machine alone needs no launcher"),
    "gloo away": (ALL, GLOO_AWAY, "horovodrun", "Gloo on several hosts"),
    "elastic": (ALL, ELASTIC, "horovodrun", "only Horovod's own launcher is elastic"),
    "slurm": (SLURM, AWAY, "srun", "inside a Slurm job, with pmix"),
    "slurm without pmi": (Found(mpi=OMPI, srun="/usr/bin/srun", system="slurm"), AWAY, "mpirun", "Open MPI 4.1.8 is here"),
    "slurm, by other names": (replace(SLURM, allocated=("Node1.x.org", "node2", "node3")), AWAY, "srun", "inside a Slurm job"),
    "slurm, other hosts": (replace(SLURM, allocated=("node1", "node7")), AWAY, "mpirun", "Open MPI 4.1.8 is here"),
    "lsf": (LSF, AWAY, "jsrun", "inside an LSF job"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_and_its_reason(name: str) -> None:
    found, job, launcher, reason = CHOICES[name]
    choice = choose("auto", found, job)
    assert choice.launcher.name == launcher
    assert choice.reason.startswith(reason)


MISSING = {
    "nothing for mpi": (Found(), "auto", AWAY, "no launcher for MPI: no mpirun beside this Python or on PATH"),
    "an mpi that is not known": (Found(problem="mpirun is odd"), "auto", AWAY, "no launcher for MPI: mpirun is odd"),
    "no horovodrun": (Found(mpi=OMPI), "horovodrun", AWAY, "horovodrun cannot be used: Horovod is not installed here"),
    "no horovodrun for gloo": (Found(), "auto", GLOO_AWAY, "horovodrun cannot be used: Horovod is not installed here"),
    "no mpirun": (Found(), "mpirun", AWAY, "mpirun cannot be used: no mpirun"),
    "no srun": (ALL, "srun", AWAY, "srun cannot be used: srun is not on PATH"),
    "no jsrun": (ALL, "jsrun", AWAY, "jsrun cannot be used: jsrun is not on PATH"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_launcher_that_is_not_there_is_named(name: str) -> None:
    found, asked, job, message = MISSING[name]
    with pytest.raises(HvdtrainError) as caught:
        choose(asked, found, job)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["horovodrun", "mpirun", "local"])
def test_the_users_word_counts(name: str) -> None:
    choice = choose(name, ALL, GLOO_HERE)
    assert (choice.launcher.name, choice.reason) == (name, "asked for with --launcher")


def test_hosts_of_no_batch_job_are_reached_as_if_there_were_none() -> None:
    """As in a shell that has outlived its job: else Open MPI looks for the hosts in what the variables say."""
    for allocated, outside in ((("node7",), True), (("node1", "node2"), False)):
        found = replace(SLURM, allocated=allocated)
        choice = choose("mpirun", found, AWAY)
        assert detect.uses_ssh(choice, found, AWAY) is outside
        assert ("-mca plm rsh -mca ras ^slurm," in " ".join(choice.launcher.command(AWAY).argv)) is outside


@pytest.mark.parametrize("variable", ["HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC", "OMPI_MCA_plm_rsh_agent"])
def test_a_way_to_other_hosts_of_the_users_own_is_left_alone(variable: str) -> None:
    """As in Kubernetes: no ssh, so no question over ssh and no program of ours in its place."""
    plain = Found(mpi=MPICH, ssh="/usr/bin/ssh")
    agent = Found(mpi=MPICH, ssh="/usr/bin/ssh", environ={variable: "/etc/mpi/kubexec.sh"})
    for found, ours in ((plain, True), (agent, False)):
        choice = choose("mpirun", found, AWAY)
        assert detect.uses_ssh(choice, found, AWAY) is ours
        assert ("-launcher-exec" in choice.launcher.command(AWAY).argv) is ours


PMI = {
    "MPI plugin types are...\n\tnone\n\tpmi2\n\tcray_shasta\n\tpmix\nspecific pmix plugin versions available: pmix_v4": (
        "pmix",
        "pmi2",
    ),
    "srun: MPI types are...\nsrun: none\nsrun: pmi2": ("", "pmi2"),
    "": ("", ""),
}


@pytest.mark.parametrize("text", PMI)
def test_the_pmi_plugin_suits_the_mpi(text: str) -> None:
    assert (parse_pmi_list(text, "openmpi"), parse_pmi_list(text, "mpich")) == PMI[text]


def test_slurm_has_overlapping_steps_from_20_11_on() -> None:
    assert [knows_overlap(f"slurm{name}") for name in (" 20.11.0", "-wlm 22.05.8", " 23.02.1", " 20.02.7", " 19.05.5", "")] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_the_program_beside_this_python_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("env", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.0.7'\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    environ = {"PATH": f"{tmp_path}/other:/bin"}
    assert detect.find("mpirun", environ) == str(tmp_path / "env" / "mpirun")
    found = detect.look(environ)
    assert found.mpi == Mpi("openmpi", (4, 0, 7), str(tmp_path / "env" / "mpirun"), str(tmp_path))
    assert os.uname().nodename.lower() in detect.own_names()
    (tmp_path / "env" / "mpirun").write_text("#!/bin/sh\necho 'mpirun from another planet'\n")
    assert "another planet" in detect.look(environ).problem


def test_an_srun_that_fails_is_a_reason_and_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("no program at all\n")
    (tmp_path / "srun").chmod(0o755)
    found = detect.look({"PATH": f"{tmp_path}:/bin", "SLURM_JOB_ID": "7"})
    with pytest.raises(HvdtrainError, match=r"srun cannot be used: '.*/srun --mpi=list' failed: .*Exec format error"):
        choose("srun", found, AWAY)
