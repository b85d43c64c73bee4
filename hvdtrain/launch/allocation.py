"""The hosts that a batch system gave to this job: Slurm, PBS or LSF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, hostfile, nodelist
from hvdtrain.launch.hostfile import Hosts


def from_environment(environ: Mapping[str, str], read: Callable[[str], str] | None = None) -> Hosts | None:
    """The allocation that the variables of a batch system describe, or None outside of one.

    Args:
        read: reads a node file; given by tests.

    Raises:
        UsageError: the variables contradict each other or name a file that is not there.
    """
    if environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST"):
        return _slurm(environ)
    for name, system in (("PBS_NODEFILE", "PBS"), ("LSB_DJOB_HOSTFILE", "LSF")):
        if environ.get(name):
            return _node_file(environ[name], f"{system} node file {environ[name]}", read or _read)
    if environ.get("LSB_MCPU_HOSTS"):
        return hostfile.parse(environ["LSB_MCPU_HOSTS"], source="LSB_MCPU_HOSTS")
    if environ.get("LSB_HOSTS"):
        return hostfile.parse("\n".join(environ["LSB_HOSTS"].split()), source="LSB_HOSTS")
    return None


def _slurm(environ: Mapping[str, str]) -> Hosts:
    names_in = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    hosts = hostfile.parse_option(environ[names_in], source=names_in).hosts
    tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks:
        return Hosts(hosts, names_in, (f"{names_in} without SLURM_TASKS_PER_NODE: one rank a node; ask for --ntasks-per-node",))
    try:
        counts = nodelist.tasks_per_node(tasks)
    except nodelist.NodelistError as error:
        raise UsageError(f"SLURM_TASKS_PER_NODE: {error}", "name the hosts: -H node1:4,node2:4") from None
    if len(counts) != len(hosts):
        raise UsageError(
            f"{names_in} names {len(hosts)} nodes, SLURM_TASKS_PER_NODE ({tasks}) counts {len(counts)}",
            "name the hosts: -H node1:4,node2:4",
        )
    return Hosts(tuple(Host(host.name, count) for host, count in zip(hosts, counts, strict=True)), "the Slurm allocation")


def _node_file(path: str, source: str, read: Callable[[str], str]) -> Hosts:
    try:
        text = read(path)
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UsageError(f"{source} cannot be read: {why}", "name the hosts: -H node1:4,node2:4") from None
    listed = hostfile.parse(text, source=source)
    # A name that comes once is one slot: in these files nobody forgot to write it.
    return Hosts(listed.hosts, source)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
