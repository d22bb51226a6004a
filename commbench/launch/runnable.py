"""Whether what was asked for can be run here, known before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from commbench.backends import BACKENDS
from commbench.backends.forcing import is_forced, nccl_environment, open_mpi_settings
from commbench.cases import Sweep
from commbench.launch.start import find_mpirun
from commbench.launch.variants import Variant
from commbench.measure.prepare import host_memory

RANK_BYTES = 150_000_000  # what a rank takes at least once torch is loaded


class NotRunnable(ValueError):
    """What was asked for cannot be run here: one line that says why and what to do."""


def check_runnable(sweep: Sweep, *, local_ranks: int | None, variants: Sequence[Variant] = ()) -> None:
    """Raises NotRunnable where a backend cannot run here, or cannot be started without a launcher.

    ``local_ranks``: how many this host must hold, None where a launcher holds them.
    """
    if local_ranks is not None and local_ranks * RANK_BYTES > host_memory():
        raise NotRunnable(
            f"{local_ranks} ranks need about {local_ranks * RANK_BYTES / 1e9:.0f} GB on this host and "
            f"{host_memory() / 1e9:.0f} GB is available: ask for fewer with --ranks"
        )
    if local_ranks is None:
        forced_alone(sweep)
    _check_settings(sweep, variants)
    for name in sweep.backends:
        reason = BACKENDS[name].why_unavailable()
        if reason:
            raise NotRunnable(reason)
        if local_ranks is not None and BACKENDS[name].starter == "mpirun" and find_mpirun() is None:
            raise NotRunnable(
                f"backend {name!r} needs mpirun to start its ranks and there is none beside {sys.executable} or on PATH: "
                "pip install 'commbench[mpi]', start commbench under the cluster's mpirun or srun, or ask for "
                "--backend gloo"
            )


def forced_alone(sweep: Sweep) -> str | None:
    """The algorithm that ranks which a launcher has started once are told to use, or None.

    Raises NotRunnable where it is not the only one of the sweep: they cannot be started again for the others.
    """
    forced = [name for name in sweep.algorithms if is_forced(name)]
    if forced and len(sweep.algorithms) > 1:
        raise NotRunnable(
            f"algorithm {forced[0]!r} needs ranks of its own, and the launcher starts them once: run once per forced "
            "algorithm, and once for the others"
        )
    return forced[0] if forced else None


def _check_settings(sweep: Sweep, variants: Sequence[Variant]) -> None:
    """A forced algorithm is told by variables, over whatever a variant has set them to."""
    forced = next((name for name in sweep.algorithms if is_forced(name)), None)
    if forced is None:
        return
    ours = {*nccl_environment({"all_reduce": "ring:ll"}, per_function=False)}
    ours |= {f"OMPI_MCA_{name}" for name in open_mpi_settings(dict.fromkeys(sweep.collectives, forced))}
    for variant in variants:
        clash = next((name for name in variant.settings if name in ours), None)
        if clash is not None:
            raise NotRunnable(f"variant {variant.name!r} sets {clash}, and so does --algorithm {forced}: leave one out")
