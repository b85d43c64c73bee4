"""A small Slurm on emulated hosts (Debian: slurmctld slurmd slurm-client munge libpmix-dev)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hosts import Cluster, emulated

NEEDS = ("slurmctld", "slurmd", "srun", "salloc", "munged", "mungekey")
_CONF = """ClusterName=lab
SlurmctldHost=node1
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=pmix
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=4 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[tuple[Cluster, str]]:
    """Two hosts with a running Slurm, and the path of its configuration for SLURM_CONF."""
    missing = [program for program in NEEDS if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"Slurm needs {' '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge libpmix-dev)")
    with emulated(2) as cluster:
        conf = str(folder / "slurm.conf")
        Path(conf).write_text(_CONF.format(folder=folder))
        for name in ("state", "spool.node1", "spool.node2", "tmp.node1", "tmp.node2"):
            (folder / name).mkdir()
        munge = [
            f"--{name}={folder}/munged.{end}" for name, end in (("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
        ]
        subprocess.run(["mungekey", "-c", "-k", folder / "munge.key"], check=True)
        started = [
            ("node1", ["munged", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock", *munge, "--force"]),
            ("node1", ["slurmctld"]),
            ("node1", ["slurmd", "-N", "node1"]),
            ("node2", ["slurmd", "-N", "node2"]),
        ]
        for node, command in started:
            done = cluster.run(node, "env", f"SLURM_CONF={conf}", *command, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
        deadline = time.monotonic() + 30
        while "idle" not in (
            state := cluster.run("node1", "env", f"SLURM_CONF={conf}", "sinfo", "-h", "-o", "%D %t", cwd=folder).stdout
        ):
            assert time.monotonic() < deadline, state
            time.sleep(0.2)
        yield cluster, conf
