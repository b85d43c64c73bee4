"""The hosts that are meant: those that the user names, else those that a batch system gave to this job: Slurm, PBS or LSF."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import Host, hostfile, nodelist
from hvdtrain.launch.hostfile import Hosts


def hosts(environ: Mapping[str, str], named: str | None, path: str | None, *, strict: bool = False) -> Hosts | None:
    """The hosts ``named`` with -H, or those of the hostfile ``path``; else those of the batch job; None outside of one."""
    if named is not None and path is not None:
        raise UsageError("both -H and a hostfile are given", "give one of them")
    if path is not None:
        return hostfile.read(path, strict=strict)
    return hostfile.parse_option(named, strict=strict) if named is not None else from_environment(environ)


def from_environment(environ: Mapping[str, str]) -> Hosts | None:
    """The allocation that the variables of a batch system describe, or None outside of one.

    Raises:
        UsageError: the variables contradict each other or name a file that is not there.
    """
    if environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST"):
        return _slurm(environ)
    # No warnings: where a name that comes once is one slot, nobody forgot to write it.
    if environ.get("PBS_NODEFILE"):
        listed = hostfile.read(environ["PBS_NODEFILE"], source=f"PBS node file {environ['PBS_NODEFILE']}")
        return Hosts(listed.hosts, listed.source)
    return _lsf(environ)


def _lsf(environ: Mapping[str, str]) -> Hosts | None:
    if environ.get("LSB_DJOB_HOSTFILE"):
        path = environ["LSB_DJOB_HOSTFILE"]
        listed = hostfile.read(path, source=f"LSF node file {path}")
    elif environ.get("LSB_MCPU_HOSTS"):
        listed = hostfile.parse(environ["LSB_MCPU_HOSTS"], source="LSB_MCPU_HOSTS")
    elif environ.get("LSB_HOSTS"):
        listed = hostfile.parse("\n".join(environ["LSB_HOSTS"].split()), source="LSB_HOSTS")
    else:
        return None
    # On a CSM cluster (where jsrun is) the first is the launch node, which runs the job's script and no ranks.
    launch_node = bool(environ.get("CSM_ALLOCATION_ID")) and len(listed.hosts) > 1 and listed.hosts[0].slots == 1
    return Hosts(listed.hosts[1:] if launch_node else listed.hosts, listed.source)


def _slurm(environ: Mapping[str, str]) -> Hosts:
    names_in = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    hosts = hostfile.parse_option(environ[names_in], source=names_in).hosts
    tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE")
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
    if environ.get("SLURM_STEP_ID") and per_node.isdigit():  # in a step, the former is that of the step
        tasks = f"{per_node}(x{len(hosts)})"
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
