"""What ranks get unless the user has set it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.launch import Command, defaults
from hvdtrain.launch.defaults import HostFacts, JobFacts, Setting, chooses_algorithms, laid_over, of_host, of_job, unset


def names(settings: tuple[Setting, ...]) -> set[str]:
    return {each.name for each in settings}


ALWAYS = {"PYTHONUNBUFFERED", "TF_CPP_MIN_LOG_LEVEL"}
RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules", "OMPI_MCA_coll_tuned_dynamic_rules_filename"}


def test_each_default_of_a_job_comes_where_it_makes_sense() -> None:
    assert names(of_job(JobFacts())) == ALWAYS
    assert names(of_job(JobFacts(is_recipe=True))) == ALWAYS | {"HOROVOD_FUSION_THRESHOLD"}
    assert names(of_job(JobFacts(open_mpi=True))) == ALWAYS | RING
    assert names(of_job(JobFacts(open_mpi=True, chooses_algorithms=True))) == ALWAYS
    assert all(each.reason for each in of_job(JobFacts(is_recipe=True, open_mpi=True)))


def test_an_old_c_library_gets_a_threshold_that_it_takes() -> None:
    values = [{each.name: each.value for each in of_host(HostFacts(2, glibc=version))} for version in ((2, 28), (2, 36), ())]
    assert [each.get("MALLOC_MMAP_THRESHOLD_") for each in values] == [str(32 << 20), str(4 << 30), None]
    assert "MALLOC_TRIM_THRESHOLD_" not in values[2]


def test_what_the_user_has_set_stays() -> None:
    settings = (Setting("A", "1", "why"), Setting("B", "2", "why"))
    assert unset(settings, {"A": ""}, {}) == settings[1:]
    assert unset(settings, {}, {"B": "x"}) == settings[:1]


@pytest.mark.parametrize(
    ("environ", "arguments", "files", "expected"),
    [
        ({"OMPI_MCA_coll": "^hcoll"}, (), (), True),
        ({}, ("-mca", "coll_tuned_use_dynamic_rules", "1"), (), True),
        ({}, (), ("# coll\n coll_hcoll_enable = 0\n",), True),
        ({"OMPI_MCA_btl": "tcp"}, ("-mca", "pml", "ucx"), ("# coll = x\nbtl = tcp\n",), False),
    ],
)
def test_whoever_chooses_open_mpis_collectives_keeps_that(
    environ: dict[str, str], arguments: tuple[str, ...], files: tuple[str, ...], expected: bool
) -> None:
    assert chooses_algorithms(environ, arguments, files) is expected


def test_tuned_values_lie_over_the_defaults_with_their_own_reason() -> None:
    settings = (Setting("A", "1", "why"), Setting("B", "2", "why"))
    assert laid_over(settings, {"B": "3", "C": "4"}, "tuned") == (
        settings[0],
        Setting("B", "3", "tuned"),
        Setting("C", "4", "tuned"),
    )


def test_notes_are_comments_of_a_command_that_still_runs() -> None:
    command = Command(("echo", "fine"), notes=("A=1: two\nlines", "B=2: it's $(false)"))
    text = command.script({})
    assert text.splitlines()[:2] == ["# A=1: two lines", "# B=2: it's $(false)"]
    assert subprocess.run(["/bin/sh", "-ec", text], capture_output=True, text=True, check=True).stdout == "fine\n"


def test_the_dry_run_tells_each_default_with_its_reason_and_none_that_the_user_sets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = ["run", "-np", "2", "--launcher", "mpirun", "--env", "TF_CPP_MIN_LOG_LEVEL=0", "--dry-run", "--", "true"]
    assert main(words) == 0
    *notes, line = capsys.readouterr().out.splitlines()
    assert all(note.startswith("# ") for note in notes)
    told = dict(re.findall(r"^# ([A-Z_]+)=(\S*): ", "\n".join(notes), re.MULTILINE))
    (relayed,) = (number for number, note in enumerate(notes) if note.startswith("# not in the command: the relay"))
    assert "--env NAME=VALUE" in notes[relayed]
    assert {note.partition("=")[0] for note in notes[relayed + 1 :]} >= {
        "# TF_NUM_INTRAOP_THREADS",
        "# OMPI_MCA_mpi_yield_when_idle",
    }
    assert told["TF_NUM_INTRAOP_THREADS"] == "3"
    assert not {"OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL", "HOROVOD_FUSION_THRESHOLD"} & told.keys()
    assert "TF_CPP_MIN_LOG_LEVEL=0" in shlex.split(line)


def test_the_rules_for_allreduce_are_what_open_mpi_reads() -> None:
    """Numbers: one collective, allreduce, then for each size of communicator its rules, both ascending."""
    text = Path(defaults.RULES_FILE).read_text(encoding="ascii")
    numbers = [int(word) for line in text.splitlines() for word in line.partition("#")[0].split()]
    collectives, collective, sizes, *rest = numbers
    assert (collectives, collective) == (1, 2)
    found = {}
    for _ in range(sizes):
        ranks, count, *rest = rest
        rules, rest = rest[: 4 * count], rest[4 * count :]
        found[ranks] = [tuple(rules[at : at + 4]) for at in range(0, 4 * count, 4)]
    assert rest == []
    assert list(found) == sorted(found)
    assert all(rules[0] == (0, 0, 0, 0) and rules == sorted(rules) for rules in found.values())
    assert {rule[1:] for rules in found.values() for rule in rules[1:]} == {(5, 0, 131072)}


@pytest.mark.ranks
def test_ranks_get_the_defaults_and_the_users_own_instead(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = "OMPI_MCA_coll_tuned_use_dynamic_rules MALLOC_TRIM_THRESHOLD_ TF_NUM_INTRAOP_THREADS OMP_NUM_THREADS"
    script = f"for name in {wanted}; do printenv $name | tr '\\n' ' '; done; echo"
    words = ["run", "-np", "2", "--launcher", "mpirun", "--env", "TF_NUM_INTRAOP_THREADS=5", "--env", "OMP_NUM_THREADS=1"]
    assert main([*words, "--no-prefix", "--", "sh", "-c", script]) == 0
    assert capfd.readouterr().out.splitlines() == [f"1 {8 << 30} 5 1 "] * 2
