"""The rank context: which process of which job this is, and on which node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import HvdtrainError, UsageError

#: A launcher's variables, in the order of trust: rank, size, local rank, local size, node rank, number of nodes.
#: Open MPI and PMI do not tell the nodes; the communicator fills them in from the host names (``with_hosts``).
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "horovod": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
    ),
    "open mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
        "",
    ),
    # PMIx tells the rest to its library alone
    "pmix": ("PMIX_RANK", "", "", "", "", ""),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""),
    # SLURM_STEP_NUM_TASKS belongs to an srun step; a batch script has SLURM_NTASKS, but is not a rank of anything.
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    "jsrun": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        "",
        "",
    ),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", ""),
}

#: The families that these names are of: what launchers tell a rank about itself, where it finds its peers and over what, and
#: how Open MPI's is to write. Without Slurm's (srun and mpirun find their job by them) and torchrun's (RANK may be anybody's).
_IDENTITY = re.compile(
    r"HOROVOD_(RANK|SIZE|HOSTNAME|LOCAL_\w+|CROSS_\w+|GLOO_RENDEZVOUS_\w+|CONTROLLER|CPU_OPERATIONS|ELASTIC)"
    r"|OMPI_((COMM_)?WORLD_\w+|UNIVERSE_SIZE|APP_CTX_NUM_PROCS|NUM_APP_CTX|FIRST_RANKS|FILE_LOCATION|ARGV|COMMAND|TOOL_NAME)"
    r"|OMPI_MCA_(ess|ess_base_\w+|initial_wdir|num_procs)"
    r"|OMPI_MCA_orte_(ess_\w+|app_num|bound_at_launch|launch|num_nodes|\w+_uri|\w+_session_dir|precondition_transports)"
    r"|OMPI_MCA_orte_(xml|tag|timestamp)_\w+"
    r"|PRTE_LAUNCHED|PMI_\w+|PMIX_(?!MCA_)\w+|MPI_LOCAL\w+|JSM_NAMESPACE_\w+"
    r"|HYDI_\w+|HYDRA_BSTRAP_\w+|HYDRA_LAUNCH_TYPE|I_MPI_(HYDRA_UUID|INFO_\w+|PIN_INFO|PIN_MAPPING)",
    re.ASCII,
)


def is_identity(name: str) -> bool:
    """Whether a variable of this name says which rank of which job a process is.

    A shell inside a job has them too; ranks started from there must not take them for theirs.
    """
    return _IDENTITY.fullmatch(name) is not None


@dataclass(frozen=True)
class World:
    """Which rank this process is. Made once, passed on, never looked up again."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    #: who said so: "single process" or the launcher
    source: str = "single process"
    #: whether ranks may be lost and join while the job goes on (Horovod's elastic mode)
    elastic: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size and 0 <= self.node_rank < self.num_nodes):
            raise HvdtrainError(
                f"the environment of {self.source} contradicts itself: rank {self.rank} of {self.size}, "
                f"local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.num_nodes}",
                "start the job through one launcher, from a shell that is not itself inside a job",
            )

    @property
    def is_primary(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the launcher's variables: Horovod, Open MPI, PMI, Slurm, jsrun, torchrun; none of them means a single process.

        The first launcher whose rank and size are set wins. Slurm's and PMI's variables also exist where Slurm merely
        started another launcher's daemons, so only Horovod and Open MPI are compared with each other, and the variables
        of a launcher that does not win are not looked at.

        Raises:
            HvdtrainError: a variable is no number, a rank is set without a size, or Horovod and Open MPI contradict each
                other.
        """
        env = os.environ if environ is None else environ
        trusted = [world for name in ("horovod", "open mpi") if (world := _read(name, env)) is not None]
        if len({(world.rank, world.size) for world in trusted}) > 1:
            first, second = trusted
            raise HvdtrainError(
                f"two launchers contradict each other: {first.source} says rank {first.rank} of {first.size}, "
                f"{second.source} says rank {second.rank} of {second.size}",
                "unset the variables of the one that did not start this process (HOROVOD_RANK ... or OMPI_COMM_WORLD_RANK ...)",
            )
        if trusted:
            return trusted[0]
        found = next((world for name in LAUNCHERS if (world := _read(name, env)) is not None), None)
        if found is None:
            _refuse_rank_without_size(env)
        return found or cls()

    def with_hosts(self, hosts: Sequence[str]) -> World:
        """The same world with its nodes counted from the host of each rank, ``hosts[rank]``, in order of first rank."""
        if len(hosts) != self.size:
            raise ValueError(f"{len(hosts)} hosts for {self.size} ranks")
        here = hosts[self.rank]
        nodes = list(dict.fromkeys(hosts))
        return replace(
            self,
            local_rank=sum(host == here for host in hosts[: self.rank]),
            local_size=sum(host == here for host in hosts),
            node_rank=nodes.index(here),
            num_nodes=len(nodes),
        )


def _refuse_rank_without_size(env: Mapping[str, str]) -> None:
    """Better than that each of N ranks trains alone. Slurm's and torch's ranks prove nothing: batch scripts have one."""
    for name in (names[0] for source, names in LAUNCHERS.items() if source not in ("slurm", "torchrun")):
        if env.get(name):
            raise HvdtrainError(
                f"{name} says that this is rank {env[name]} of a job, but no variable says how many ranks there are",
                f"start the job with hvdtrain run, horovodrun, mpirun or srun; or unset {name} for a single process",
            )


def _read(source: str, env: Mapping[str, str]) -> World | None:
    names = LAUNCHERS[source]
    if not (env.get(names[0]) and env.get(names[1])):
        return None

    def number(name: str, default: int) -> int:
        text = env.get(name, "") if name else ""
        if not text:
            return default
        try:
            return int(text)
        except ValueError:
            raise UsageError(
                f"{name} must be a whole number, got {text!r}", f"unset {name} or set it as {source} does"
            ) from None

    rank, size = number(names[0], 0), number(names[1], 1)
    local_rank = number(names[2], 0)
    node_rank = number(names[4], 0)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=number(names[3], local_rank + 1),
        node_rank=node_rank,
        num_nodes=number(names[5], node_rank + 1),
        source=source,
        elastic=source == "horovod" and env.get("HOROVOD_ELASTIC") == "1",
    )
