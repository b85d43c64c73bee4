"""The hosts that a batch system gave to this job: Slurm, PBS or LSF."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import Host, hostfile, nodelist
from hvdtrain.launch.hostfile import Hosts


def from_environment(environ: Mapping[str, str]) -> Hosts | None:
    """The allocation that the variables of a batch system describe, or None outside of one.

    Raises:
        UsageError: the variables contradict each other or name a file that is not there.
    """
    if environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST"):
        return _slurm(environ)
    for name, system in (("PBS_NODEFILE", "PBS"), ("LSB_DJOB_HOSTFILE", "LSF")):
        if environ.get(name):
            listed = hostfile.read(environ[name], source=f"{system} node file {environ[name]}")
            # A name that comes once is one slot: in these files nobody forgot to write it.
            return Hosts(listed.hosts, listed.source)
    if environ.get("LSB_MCPU_HOSTS"):
        return hostfile.parse(environ["LSB_MCPU_HOSTS"], source="LSB_MCPU_HOSTS")
    if environ.get("LSB_HOSTS"):
        listed = hostfile.parse("\n".join(environ["LSB_HOSTS"].split()), source="LSB_HOSTS")
        return Hosts(listed.hosts, listed.source)
    return None


def _slurm(environ: Mapping[str, str]) -> Hosts:
    names_in = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    hosts = hostfile.parse_option(environ[names_in], source=names_in).hosts
    tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks:
        return Hosts(hosts, names_in, (f"{names_in} without SLURM_TASKS_PER_NODE: one rank a node; ask for --ntasks-per-node",))
    try:
        counts = nodelist.tasks_per_node(tasks)
    except UsageError as error:
        raise UsageError(f"SLURM_TASKS_PER_NODE: {error.message}", "name the hosts: -H node1:4,node2:4") from None
    if len(counts) != len(hosts):
        raise UsageError(
            f"{names_in} names {len(hosts)} nodes, SLURM_TASKS_PER_NODE ({shown(tasks, 40)}) counts {len(counts)}",
            "name the hosts: -H node1:4,node2:4",
        )
    return Hosts(tuple(Host(host.name, count) for host, count in zip(hosts, counts, strict=True)), "the Slurm allocation")
