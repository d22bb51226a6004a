"""What each collective moves: one entry a collective.

Every entry states the message-size convention (nccl-tests', see docs/units.md), the bus factor,
and which inputs make up each rank's output. The data check, the schedules' simulation, the backends'
buffers and the tables all read it here; nothing else knows a collective by name except the backends'
maps to their library's calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ALIGNMENT_BYTES = 16  # nccl-tests trims each rank's share to 16 B (its commit 29f4114)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stretch of an output: blocks of equal length taken from the ranks in ``sources``.

    ``sources`` has one rank where data is moved and all contributors where it is reduced;
    ``block`` is the block of the source's input that lands here (0 when the input is one block).
    """

    sources: tuple[int, ...]
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over ranks 0..n-1 of a group.

    ``input_blocks(rank, n, root)`` and ``output(rank, n, root)`` count in blocks. A block is the whole
    message where ``split`` is false, and message / n where it is true. ``bytes`` in a case is the whole message.
    Where it is ``routed``, data decide who sends what to whom: there are no blocks, and a case has a workload.
    ``dtype`` is the one element type that it is done in, None where a case chooses.
    """

    name: str
    bus_factor: Callable[[int], float]
    split: bool
    input_blocks: Callable[[int, int, int], int]
    output: Callable[[int, int, int], tuple[Part, ...]]
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True
    sized: bool = True
    routed: bool = False
    dtype: str | None = None

    def block_elements(self, message_elements: int, ranks: int) -> int:
        """Elements of one block of a message of ``message_elements``."""
        return message_elements // ranks if self.split else message_elements

    def message_bytes(self, requested: int, itemsize: int, ranks: int) -> int:
        """The size really moved for a requested one, rounded down as nccl-tests does.

        Where the message is split, each rank's share is trimmed to 16 B, unless that would leave nothing:
        then it is trimmed to whole elements (nccl-tests would print a row of zeros). 0 means that not
        even one element a rank fits.
        """
        if not self.sized:
            return 0
        if not self.split:
            return requested // itemsize * itemsize
        share = requested // itemsize // ranks * itemsize
        return (share - share % ALIGNMENT_BYTES or share) * ranks


def _one(_rank: int, _n: int, _root: int) -> int:
    return 1


def _all(_rank: int, n: int, _root: int) -> int:
    return n


def _at_root(blocks: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    return lambda rank, n, root: blocks(rank, n, root) if rank == root else 0


def _ranks(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def _ring_factor(n: int) -> float:
    return (n - 1) / n


_ENTRIES = (
    Collective(
        name="all_reduce",
        bus_factor=lambda n: 2 * (n - 1) / n,
        split=False,
        reduces=True,
        input_blocks=_one,
        output=lambda rank, n, root: (Part(sources=_ranks(n), block=0),),
    ),
    Collective(
        name="all_gather",
        bus_factor=_ring_factor,
        split=True,
        input_blocks=_one,
        output=lambda rank, n, root: tuple(Part(sources=(peer,), block=0) for peer in range(n)),
    ),
    Collective(
        name="reduce_scatter",
        bus_factor=_ring_factor,
        split=True,
        reduces=True,
        input_blocks=_all,
        output=lambda rank, n, root: (Part(sources=_ranks(n), block=rank),),
    ),
    Collective(
        name="all_to_all",
        bus_factor=_ring_factor,
        split=True,
        in_place=False,
        input_blocks=_all,
        output=lambda rank, n, root: tuple(Part(sources=(peer,), block=rank) for peer in range(n)),
    ),
    Collective(
        name="broadcast",
        bus_factor=lambda n: 1.0,
        split=False,
        rooted=True,
        input_blocks=_at_root(_one),
        output=lambda rank, n, root: (Part(sources=(root,), block=0),),
    ),
    Collective(
        name="reduce",
        bus_factor=lambda n: 1.0,
        split=False,
        reduces=True,
        rooted=True,
        input_blocks=_one,
        output=lambda rank, n, root: (Part(sources=_ranks(n), block=0),) if rank == root else (),
    ),
    Collective(
        name="gather",
        bus_factor=_ring_factor,
        split=True,
        rooted=True,
        input_blocks=_one,
        output=lambda rank, n, root: tuple(Part(sources=(p,), block=0) for p in range(n)) if rank == root else (),
    ),
    Collective(
        name="scatter",
        bus_factor=_ring_factor,
        split=True,
        rooted=True,
        input_blocks=_at_root(_all),
        output=lambda rank, n, root: (Part(sources=(root,), block=rank),),
    ),
    # Each rank sends to the next and receives from the one before, as nccl-tests' sendrecv does.
    Collective(
        name="send_recv",
        bus_factor=lambda n: 1.0,
        split=False,
        in_place=False,
        input_blocks=_one,
        output=lambda rank, n, root: (Part(sources=((rank - 1) % n,), block=0),),
    ),
    Collective(
        name="barrier",
        bus_factor=lambda n: 0.0,
        split=False,
        in_place=False,
        sized=False,
        input_blocks=lambda rank, n, root: 0,
        output=lambda rank, n, root: (),
    ),
)

# Data decide who sends what to whom: their cases have a workload (commbench/workloads.py) in place of a message.
_ROUTED_ENTRIES = tuple(
    Collective(
        name=name,
        bus_factor=lambda n: 1.0,
        split=False,
        in_place=False,
        routed=True,
        dtype=dtype,
        input_blocks=lambda rank, n, root: 0,
        output=lambda rank, n, root: (),
    )
    # Experts' results are added in full: all libraries combine in 16 bits what they dispatched in 8.
    for name, dtype in (("moe_dispatch", None), ("moe_combine", "bfloat16"))
)

COLLECTIVES: dict[str, Collective] = {entry.name: entry for entry in _ENTRIES}
ROUTED: dict[str, Collective] = {entry.name: entry for entry in _ROUTED_ENTRIES}
EVERY: dict[str, Collective] = COLLECTIVES | ROUTED
