"""Which algorithms a library can be told to use, how it is told, and which schedules of ours they are.

Nothing here loads a library.

Sources: Open MPI 5.0 (``ompi/mca/coll/tuned`` for the names, ``ompi/mca/coll/base`` for what each does; "known" below
is said only of those that send the same messages, in the same order on each rank, as a schedule of the catalogue),
gloo (``gloo/*.cc``; torch's process group calls them without choosing), NCCL's documentation of NCCL_ALGO and
NCCL_PROTO.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from commbench.cases import Case, is_own
from commbench.registry import unknown_name
from commbench.schedules.known import Known
from commbench.schedules.own import MOST_GIVEN_PIECES

LIBRARY = "library"

OPEN_MPI: dict[str, tuple[str, tuple[str, ...]]] = {
    "all_reduce": (
        "allreduce",
        ("basic_linear", "nonoverlapping", "recursive_doubling", "ring", "segmented_ring", "rabenseifner"),
    ),
    "all_gather": (
        "allgather", ("linear", "bruck", "recursive_doubling", "ring", "neighbor", "two_proc", "sparbit"),
    ),
    "reduce_scatter": (
        "reduce_scatter_block", ("basic_linear", "recursive_doubling", "recursive_halving", "butterfly"),
    ),
    "all_to_all": ("alltoall", ("linear", "pairwise", "modified_bruck", "linear_sync", "two_proc")),
    "broadcast": (
        "bcast",
        ("basic_linear", "chain", "pipeline", "split_binary_tree", "binary_tree", "binomial", "knomial",
         "scatter_allgather", "scatter_allgather_ring"),
    ),
    "reduce": (
        "reduce", ("linear", "chain", "pipeline", "binary", "binomial", "in-order_binary", "rabenseifner"),
    ),
    "gather": ("gather", ("basic_linear", "binomial", "linear_sync")),
    "scatter": ("scatter", ("basic_linear", "binomial", "linear_nb")),
    "barrier": ("barrier", ("linear", "double_ring", "recursive_doubling", "bruck", "two_proc", "tree")),
}  # fmt: skip
"""Per collective what ``coll_tuned`` calls it, and its algorithms as Open MPI spells them."""

GROUPED = "grouped"
"""What nccl_raw does by sends and receives in a group where NCCL, from 2.28 on, has a call for it."""
_GROUPABLE = ("all_to_all", "gather", "scatter")

TUNED_PRIORITY = 100  # Open MPI takes no component for more than this, and the last of equals

_NCCL_SPELLING = {
    "ring": "Ring", "tree": "Tree", "nvls": "NVLS", "nvls_tree": "NVLSTree", "collnet_direct": "CollNetDirect",
    "collnet_chain": "CollNetChain", "pat": "PAT", "ll": "LL", "ll128": "LL128", "simple": "Simple",
}  # fmt: skip
_NCCL_PROTOCOLS = ("ll", "ll128", "simple")
_NCCL_FUNCTIONS = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast", "reduce": "Reduce",
}  # fmt: skip
_NCCL_ALGORITHMS = {
    "all_reduce": ("ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain"),
    "all_gather": ("ring", "nvls", "collnet_direct", "pat"),
    "reduce_scatter": ("ring", "nvls", "collnet_direct", "pat"),
    "broadcast": ("ring",),
    "reduce": ("ring",),
}


def is_forced(algorithm: str) -> bool:
    """Whether a case's algorithm is one that the library must be told to use."""
    return algorithm != LIBRARY and not is_own(algorithm)


def names(backend: str, collective: str) -> tuple[str, ...]:
    """The algorithms that a backend can be told to use for a collective. NCCL's may name a protocol: ``ring:ll``."""
    if backend == "mpi":
        return OPEN_MPI.get(collective, ("", ()))[1]
    if backend in NCCL_BACKENDS and collective in _NCCL_ALGORITHMS:
        of = ("", *_NCCL_ALGORITHMS[collective])
        return (*of[1:], *(f"{name}:{protocol}" for name in of for protocol in _NCCL_PROTOCOLS))
    if backend == "nccl_raw" and collective in _GROUPABLE:
        return (GROUPED,)
    return ()


NCCL_BACKENDS = ("nccl", "nccl_raw")
"""Those whose library is NCCL, told and asked in the same ways."""

BACKENDS_THAT_CAN = ("mpi", *NCCL_BACKENDS)


def can_force(backend: str, collective: str, algorithm: str) -> bool:
    return algorithm in names(backend, collective)


def why_not(backend: str, collective: str, algorithm: str) -> str | None:
    """Why a backend cannot be told to do a collective by this algorithm, whatever is installed; None where it can."""
    if can_force(backend, collective, algorithm):
        return None
    if names(backend, collective):
        return f"{backend} has no {algorithm!r} for {collective}"
    if backend in BACKENDS_THAT_CAN:
        return f"{backend} cannot be told by which algorithm to do {collective}"
    return f"{backend} cannot be told which algorithm to use"


def check_forced(algorithm: str, backends: Collection[str], collectives: Collection[str], others: Iterable[str]) -> str:
    """The name, if one of the backends has it for one of the collectives.

    Raises ValueError with one line that names the backend that has it, or else with a near name; ``others`` are the
    names that are known besides.
    """

    def having(some: Iterable[str], all_of: Iterable[str]) -> list[tuple[str, str]]:
        return [(b, c) for b in some for c in all_of if can_force(b, c, algorithm)]

    if having(backends, collectives):
        return algorithm
    elsewhere = having(BACKENDS_THAT_CAN, collectives)
    if elsewhere:
        *most, last = dict.fromkeys(backend for backend, _ in elsewhere)
        where = " and ".join(filter(None, (", ".join(most), last)))
        raise ValueError(
            f"algorithm {algorithm!r} can be forced on {where} only, not on {' or '.join(backends)}: "
            f"add --backend {elsewhere[0][0]}, or write own:NAME for an algorithm of commbench's own"
        )
    on_others = dict.fromkeys(c for _, c in having(backends, (*OPEN_MPI,)))
    if on_others:
        raise ValueError(f"algorithm {algorithm!r} is one of {', '.join(on_others)}, not of {', '.join(collectives)}")
    known = {name for b in backends for c in collectives for name in names(b, c)}
    raise ValueError(unknown_name("algorithm", algorithm, {*known, *others}))


# -- how a library is told -----------------------------------------------------------------------------


def open_mpi_settings(forced: Mapping[str, str]) -> dict[str, str]:
    """The control variables that make coll_tuned do each of these collectives by its algorithm, and their values.

    They count for communicators that are made afterwards. Han, xhc, hcoll and their like come before coll_tuned unless
    it has the greatest priority.
    """
    told = {"priority": str(TUNED_PRIORITY), "use_dynamic_rules": "true"}
    told |= {f"{OPEN_MPI[collective][0]}_algorithm": algorithm for collective, algorithm in forced.items()}
    return {f"coll_tuned_{name}": value for name, value in told.items()}


def nccl_environment(forced: Mapping[str, str], per_function: bool) -> dict[str, str]:
    """What must be in the environment before NCCL makes a communicator; ``forced`` has one algorithm for all.

    ``per_function``: whether this NCCL takes lists per function (from 2.24 on), so that a barrier's all_reduce is not
    told to use what only an all_gather has.
    """
    name, protocol = split_nccl(next(iter(forced.values())))
    found = {"NCCL_ALGO": name, "NCCL_PROTO": protocol}
    told = {variable: _NCCL_SPELLING[value] for variable, value in found.items() if value}
    if not per_function:
        return told
    functions = [_NCCL_FUNCTIONS[collective].lower() for collective in forced]
    return {variable: ";".join(f"{name}:{value}" for name in functions) for variable, value in told.items()}


def split_nccl(algorithm: str) -> tuple[str | None, str | None]:
    """The algorithm and the protocol of ``ring:ll``, ``ring`` or ``:ll``; None for what is not said."""
    name, _, protocol = algorithm.partition(":")
    return name or None, protocol or None


def nccl_name(spelled: str) -> str:
    """What we call an algorithm or protocol of NCCL's."""
    return next((name for name, known in _NCCL_SPELLING.items() if known == spelled), spelled.lower())


def nccl_function(collective: str) -> str | None:
    return _NCCL_FUNCTIONS.get(collective)


class Chosen(NamedTuple):
    """What a library says that it took for an operation, in commbench's names; None: it does not say."""

    algorithm: str | None = None
    protocol: str | None = None
    channels: int | None = None


def read_back(asked: str, chosen: Collection[Chosen]) -> tuple[Chosen, str | None]:
    """What was used, as far as it was one thing, and a note where the library took something else than was asked for.

    ``chosen``: everything that it says it took.
    """
    forced = is_forced(asked)
    if not chosen:
        return Chosen(), f"asked for {asked}; NCCL's log does not say what it took" if forced else None
    used = Chosen(*(_only(values) for values in zip(*chosen, strict=True)))
    want = split_nccl(asked) if forced else (None, None)
    others = [one for one in chosen if any(w not in (None, got) for w, got in zip(want, one[:2], strict=True))]
    took = ", ".join(dict.fromkeys(f"{one.algorithm}:{one.protocol}" for one in others))
    return used, f"asked for {asked}, NCCL took {took}" if took else None


def _only(values: Iterable[Any]) -> Any:
    """What all agree on, or None."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


# -- what it is then known to do -----------------------------------------------------------------------


def model_of(backend: str, case: Case, settings: Mapping[str, str]) -> Known | None:
    """The schedule that a library's operation is known to be; None where it is not known, or is none of ours.

    ``settings`` are those read back from the library: a segment size makes pieces.
    """
    if is_own(case.algorithm):
        return None
    if case.collective == "send_recv" and case.algorithm == LIBRARY:
        return Known(collective="send_recv", algorithm="ring")
    if backend == "gloo" and case.algorithm == LIBRARY:
        return _gloo(case)
    if backend == "mpi" and is_forced(case.algorithm):
        return _open_mpi(case, settings)
    return None


def _gloo(case: Case) -> Known | None:
    """torch's gloo: it has one algorithm each. Not ours are gather, scatter and reduce, all_to_all, which posts all its
    messages at once, and broadcast, which sends to all children of a binomial tree at once: its first child must wait.
    """
    n = case.ranks
    if case.collective in ("all_reduce", "reduce_scatter"):  # the latter is done by an all_reduce
        # Each rank's part goes round in two segments or more, one after the other, to the rank before.
        return _known("all_reduce", "ring", order=_backwards(n, 0)) if case.elements >= 2 * n else None
    if case.collective == "all_gather":
        return _known("all_gather", "ring")
    if case.collective == "broadcast":
        return _known("broadcast", "binomial_tree") if n == 2 else None
    return _known("barrier", "dissemination") if case.collective == "barrier" else None


def _open_mpi(case: Case, settings: Mapping[str, str]) -> Known | None:
    n, name, collective = case.ranks, case.algorithm, case.collective
    two, even, whole_power = n == 2, n % 2 == 0, n & (n - 1) == 0
    if collective == "all_reduce":
        return _open_mpi_all_reduce(case, settings)
    if collective in ("broadcast", "reduce") and name in ("pipeline", "binomial"):
        return _open_mpi_tree(case, settings)
    exact: dict[tuple[str, str], tuple[str, bool]] = {
        ("all_gather", "bruck"): ("bruck", True),
        ("all_gather", "recursive_doubling"): ("recursive_doubling" if whole_power else "bruck", True),
        ("all_gather", "ring"): ("ring", True),
        ("all_gather", "neighbor"): ("ring", not even),
        ("all_gather", "two_proc"): ("ring", two),
        ("reduce_scatter", "recursive_halving"): ("halving_doubling", True),
        ("all_to_all", "pairwise"): ("pairwise", True),
        ("all_to_all", "two_proc"): ("pairwise", two),
        ("all_to_all", "modified_bruck"): ("bruck", True),
        ("gather", "binomial"): ("binomial_tree", True),
        ("scatter", "binomial"): ("binomial_tree", True),
        ("barrier", "bruck"): ("dissemination", True),
        ("barrier", "two_proc"): ("dissemination", two),
    }
    algorithm, same = exact.get((collective, name), ("", False))
    return _known(collective, algorithm) if same else None


def _open_mpi_all_reduce(case: Case, settings: Mapping[str, str]) -> Known | None:
    n, name = case.ranks, case.algorithm
    if name == "segmented_ring" and case.elements >= n * _segment(case, settings):
        return None
    if name in ("ring", "segmented_ring"):
        return _known("all_reduce", "ring" if case.elements >= n else "recursive_doubling")
    if name == "recursive_doubling":
        return _known("all_reduce", "recursive_doubling")
    if name == "rabenseifner" and n & (n - 1) == 0 and case.elements >= n:
        # The first exchange, of half the message, is between neighbours; ours is between the two halves of the ranks.
        return _known("all_reduce", "halving_doubling", order=_bits_reversed(n))
    return None


def _open_mpi_tree(case: Case, settings: Mapping[str, str]) -> Known | None:
    n, root, segment = case.ranks, case.root, _segment(case, settings)
    if case.algorithm == "pipeline":
        if case.elements % segment or case.elements // segment > MOST_GIVEN_PIECES:
            return None  # in unequal pieces, or more than are worth simulating
        order = _backwards(n, root) if case.collective == "reduce" else ()
        return _known(case.collective, "ring", order=order, pieces=case.elements // segment)
    # A broadcast sends to all children at once, so that the first of them, which has most to do, must wait.
    if case.elements > segment or (case.collective == "broadcast" and n > 2):
        return None
    return _known(case.collective, "binomial_tree")


def _known(collective: str, algorithm: str, *, pieces: int = 1, order: tuple[int, ...] = ()) -> Known:
    return Known(collective=collective, algorithm=algorithm, pieces=pieces, order=order)


def _segment(case: Case, settings: Mapping[str, str]) -> int:
    """Elements of a segment: Open MPI's rule (COLL_BASE_COMPUTED_SEGCOUNT). 0 bytes mean no segments."""
    size = _segment_bytes(case, settings)
    if not case.itemsize <= size < case.bytes:
        return max(1, case.elements)
    elements, rest = divmod(size, case.itemsize)
    return elements + (rest > case.itemsize // 2)


def _segment_bytes(case: Case, settings: Mapping[str, str]) -> int:
    return int(settings.get(f"coll_tuned_{OPEN_MPI[case.collective][0]}_algorithm_segmentsize", "0"))


def _backwards(ranks: int, root: int) -> tuple[int, ...]:
    return tuple((root - r) % ranks for r in range(ranks))


def _bits_reversed(ranks: int) -> tuple[int, ...]:
    """``ranks`` is a power of two."""
    bits = ranks.bit_length() - 1
    return tuple(int(f"{r:0{bits}b}"[::-1], 2) for r in range(ranks))


def note_of(backend: str, case: Case, settings: Mapping[str, str]) -> str | None:
    """What the library is known to do otherwise than the name says, for this case."""
    if backend != "mpi" or not is_forced(case.algorithm):
        return None
    n, name, collective = case.ranks, case.algorithm, case.collective
    other = None
    if collective == "all_reduce" and name in ("ring", "segmented_ring"):
        if case.elements < n:
            other = "with fewer elements than ranks Open MPI takes recursive_doubling"
        elif name == "segmented_ring" and case.elements < n * _segment(case, settings):
            other = "the segment is no smaller than a rank's part: Open MPI takes ring"
    elif collective == "all_gather" and name == "recursive_doubling" and n & (n - 1):
        other = f"for {n} ranks, no power of two, Open MPI takes bruck"
    elif collective == "all_gather" and name == "neighbor" and n % 2:
        other = f"for {n} ranks, an odd number, Open MPI takes ring"
    elif collective == "broadcast" and name.startswith("scatter_allgather") and case.elements < n:
        other = "with fewer elements than ranks Open MPI takes basic_linear"
    elif collective == "reduce_scatter" and name == "basic_linear":
        other = "Open MPI does it by a reduce and a scatter"
    elif (
        collective == "broadcast"
        and name == "split_binary_tree"
        and (case.elements < 2 or _segment_bytes(case, settings) > case.elements // 2 * case.itemsize)
    ):
        other = "half of it is no larger than a segment: Open MPI takes a chain"
    return other
