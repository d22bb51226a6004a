"""Which rank am I, of how many: read from the environment that the launcher made.

Every launcher has a *family* of variables. One whole family is chosen, never a mixture: variables of another
launcher may be stale (mpirun passes on a RANK exported in the shell) or mean something else (SLURM_NTASKS is the
allocation's, not the step's). A family that is there only in part is an error, not a default.
``FAMILIES`` is the whole knowledge; docs/launchers.md says it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from commbench.launch.hostlist import expand_counts
from commbench.registry import unknown_name

NO_LAUNCHER = "none"
Environ = Mapping[str, str]


class LaunchError(ValueError):
    """The launcher's variables contradict themselves or are incomplete: one line that says what to do."""


class WorldError(RuntimeError):
    """The ranks that arrived are not the world that was asked for; ``code`` is the exit code."""

    def __init__(self, message: str, code: int = 3) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among all. ``rank`` of ``world`` and ``local_rank`` of ``local_world`` on its host.

    ``local_world`` is None where the launcher does not tell. ``facts`` are the launcher's further variables that
    the rendezvous and the manifest need, under their own names.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int | None
    launcher: str
    facts: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The variables of one launcher. It is present when any of ``signs`` is set, unless ``absent`` says otherwise.

    ``also`` are variables that must be there beyond the four; ``facts`` are kept when there.
    """

    name: str
    start: str
    signs: tuple[str, ...]
    rank: str
    world: str
    local_rank: str
    local_world: str | None
    local_world_required: bool = True
    also: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    absent: Callable[[Environ], bool] = lambda environ: False
    read_local_world: Callable[[Environ, str], int] | None = None

    def present(self, environ: Environ) -> bool:
        return any(sign in environ for sign in self.signs) and not self.absent(environ)


def _outside_slurm_step(environ: Environ) -> bool:
    """Whether SLURM_STEP_ID names no step that srun started for us.

    The extern and the interactive step have reserved ids at the top of 32 bits (slurm.h; salloc's shell has
    4294967290), which some tools print as words; the batch script has none. A one-task step with a terminal is a
    shell (``srun --pty bash``), not a launch.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if step in ("batch", "extern", "interactive") or (step.isascii() and step.isdigit() and int(step) >= 0xFFFFFFF0):
        return True
    return "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"


def _tasks_on_this_node(environ: Environ, name: str) -> int:
    counts = expand_counts(environ[name])
    node = _integer(environ, "SLURM_NODEID", "slurm")
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node} is outside {name}={environ[name]}")
    return counts[node]


FAMILIES: tuple[Family, ...] = (
    Family(
        name="torchrun", start="torchrun", signs=("TORCHELASTIC_RUN_ID",),
        rank="RANK", world="WORLD_SIZE", local_rank="LOCAL_RANK", local_world="LOCAL_WORLD_SIZE",
        also=("MASTER_ADDR", "MASTER_PORT"),
        facts=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK"),
    ),
    Family(
        name="openmpi", start="Open MPI's mpirun", signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK", world="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK", local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
        facts=("PMIX_NAMESPACE",),
    ),
    Family(
        name="mvapich2", start="MVAPICH2's mpirun_rsh", signs=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK", world="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK", local_world="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Family(
        name="pals", start="PALS mpiexec", signs=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        rank="PALS_RANKID", world="PMI_SIZE", local_rank="PALS_LOCAL_RANKID",
        local_world="PALS_LOCAL_SIZE", local_world_required=False,
        facts=("PALS_APID", "PALS_NODEID", "PBS_JOBID"),
    ),
    # PMI_RANK is no sign of Hydra: Flux, PALS and srun --mpi=pmi2 set it too. MPI_LOCALRANKID is Hydra's own.
    Family(
        name="hydra", start="MPICH's or Intel MPI's mpiexec", signs=("HYDI_CONTROL_FD", "MPI_LOCALRANKID"),
        rank="PMI_RANK", world="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world="MPI_LOCALNRANKS",
    ),
    Family(
        name="flux", start="flux run", signs=("FLUX_TASK_RANK",),
        rank="FLUX_TASK_RANK", world="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID", local_world=None,
        facts=("FLUX_JOB_ID", "FLUX_JOB_NNODES"),
    ),
    Family(
        name="jsm", start="jsrun", signs=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank="JSM_NAMESPACE_RANK", world="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK", local_world="JSM_NAMESPACE_LOCAL_SIZE",
        facts=("LSB_JOBID", "LSB_MCPU_HOSTS"),
    ),
    Family(
        name="slurm", start="srun", signs=("SLURM_STEP_ID",), absent=_outside_slurm_step,
        rank="SLURM_PROCID", world="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID",
        local_world="SLURM_STEP_TASKS_PER_NODE", read_local_world=_tasks_on_this_node,
        also=("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_STEP_NODELIST"),
        facts=("SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURMD_NODENAME", "SLURM_STEP_RESV_PORTS"),
    ),
)  # fmt: skip

_ENV = "env"
_QUADRUPLE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS: tuple[str, ...] = (*(family.name for family in FAMILIES), _ENV, NO_LAUNCHER)


def detect(environ: Environ, launcher: str | None = None) -> Place | None:
    """The place that the launcher gave this process; None where there is no launcher (a single command).

    ``launcher`` is one of ``LAUNCHERS`` and overrides what the environment suggests; ``none`` ignores it all.
    Raises LaunchError for an unknown name, and for a family that is incomplete or impossible.
    """
    if launcher is not None and launcher not in LAUNCHERS:
        raise LaunchError(unknown_name("launcher", launcher, LAUNCHERS))
    if launcher == NO_LAUNCHER:
        return None
    for family in FAMILIES:
        if launcher == family.name or (launcher is None and family.present(environ)):
            return _read(family, environ)
    if launcher == _ENV or any(name in environ for name in ("RANK", "WORLD_SIZE")):
        return _read_env(environ)
    return None


def _read(family: Family, environ: Environ) -> Place:
    required = [family.rank, family.world, family.local_rank, *family.also]
    if family.local_world and family.local_world_required:
        required.append(family.local_world)
    missing = [name for name in required if name not in environ]
    if family.absent(environ):
        raise LaunchError(f"launcher {family.name} was asked for, but this is no step of it: start with {family.start}")
    if missing:
        found = [name for name in (*family.signs, *required) if name in environ]
        seen = f"{found[0]} is set but " if found else ""
        undo = f", or unset {found[0]} or say --launcher {NO_LAUNCHER} if it is stale" if found else ""
        raise LaunchError(f"{family.name}: {seen}{', '.join(missing)} missing: start with {family.start}{undo}")
    return _place(
        environ,
        name=family.name,
        members=(family.rank, family.world, family.local_rank),
        local_world=_local_world(family, environ),
        facts=(*family.also, *family.facts),
    )


def _local_world(family: Family, environ: Environ) -> int | None:
    name = family.local_world
    if name is None or name not in environ:
        return None
    if family.read_local_world is None:
        return _integer(environ, name, family.name)
    try:
        return family.read_local_world(environ, name)
    except LaunchError:
        raise
    except ValueError as error:
        raise LaunchError(f"{family.name}: {name}: {error}: start again with {family.start}") from None


def _read_env(environ: Environ) -> Place:
    missing = [name for name in _QUADRUPLE if name not in environ]
    if missing:
        found = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
        undo = f"unset {' '.join(found)} or " if found else ""
        seen = f"{' and '.join(found)} set without" if found else "missing"
        raise LaunchError(f"env: {seen} {', '.join(missing)}: {undo}start with torchrun")
    warnings = ["rank taken from RANK and WORLD_SIZE in the environment, which no known launcher set"]
    if "LOCAL_RANK" not in environ:
        warnings.append(
            "LOCAL_RANK is not set, so this is taken as one rank a host; in a Kubernetes pod RANK counts pods:"
            " start commbench with torchrun inside the pod to use all of it"
        )
    return _place(
        environ,
        name=_ENV,
        members=("RANK", "WORLD_SIZE", "LOCAL_RANK" if "LOCAL_RANK" in environ else None),
        local_world=_integer(environ, "LOCAL_WORLD_SIZE", _ENV) if "LOCAL_WORLD_SIZE" in environ else None,
        facts=("MASTER_ADDR", "MASTER_PORT"),
        warnings=tuple(warnings),
    )


def _place(
    environ: Environ,
    *,
    name: str,
    members: tuple[str, str, str | None],
    local_world: int | None,
    facts: tuple[str, ...],
    warnings: tuple[str, ...] = (),
) -> Place:
    """The checked place: 0 <= rank < world and 0 <= local rank < local world <= world."""
    rank_name, world_name, local_name = members
    rank, world = (_integer(environ, member, name) for member in (rank_name, world_name))
    local_rank = _integer(environ, local_name, name) if local_name else 0
    if rank >= world:
        raise LaunchError(
            f"{name}: {rank_name}={rank} is not below {world_name}={world}: one of them is stale, unset it"
        )
    if local_rank >= (local_world or world):
        limit = f"the {local_world} ranks of this host" if local_world else f"{world_name}={world}"
        raise LaunchError(f"{name}: {local_name}={local_rank} is not below {limit}: one of them is stale, unset it")
    if local_world is not None and not 0 < local_world <= world:
        raise LaunchError(f"{name}: {local_world} ranks on this host but {world_name}={world}: unset what is stale")
    return Place(
        rank=rank, world=world, local_rank=local_rank, local_world=local_world, launcher=name,
        facts={fact: environ[fact] for fact in facts if fact in environ}, warnings=warnings,
    )  # fmt: skip


def _integer(environ: Environ, name: str, family: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{family}: {name}={text[:40]!r} is not a whole number: unset it or start with the launcher")
    return int(text)
