"""Where a rank's blocks live: what it holds at first, what it must hold at last, and in which buffer to keep each."""

from __future__ import annotations

from typing import NamedTuple

from commbench.collectives import COLLECTIVES, Part
from commbench.schedules.schedule import NONE, Block, Schedule


class Place(NamedTuple):
    """Piece ``piece`` of block ``block`` of a buffer: ``input``, ``output`` or ``scratch``."""

    buffer: str
    block: int
    piece: int


def initial_blocks(schedule: Schedule, rank: int) -> dict[Block, Place]:
    """The blocks a rank holds before it starts, and where in its input each is."""
    spec, n = COLLECTIVES[schedule.collective], schedule.ranks
    count = spec.input_blocks(rank, n, schedule.root)
    return {
        Block(NONE if spec.reduces else rank, block if count > 1 else NONE, piece): Place("input", block, piece)
        for block in range(count)
        for piece in range(schedule.cut)
    }


def final_blocks(schedule: Schedule, rank: int) -> dict[Block, tuple[Place, Part]]:
    """The blocks a rank must hold at the end, where in its output each goes, and what it is made of."""
    spec, n = COLLECTIVES[schedule.collective], schedule.ranks
    found = {}
    for index, part in enumerate(spec.output(rank, n, schedule.root)):
        source = part.sources[0]
        origin = NONE if spec.reduces else source
        destination = part.block if spec.input_blocks(source, n, schedule.root) > 1 else NONE
        for piece in range(schedule.cut):
            found[Block(origin, destination, piece)] = (Place("output", index, piece), part)
    return found


def places(schedule: Schedule, rank: int) -> dict[Block, Place]:
    """A place for every block that a rank holds, needs or passes on.

    A block of the output lives there, one of the input that is never written stays there, and any other has its place
    in a scratch buffer, whose blocks are as long as the collective's. An initial block whose place is not in the input
    (see :func:`initial_blocks`) must be copied to it before the first step.
    """
    found = {block: place for block, (place, _) in final_blocks(schedule, rank).items()}
    initial = initial_blocks(schedule, rank)
    transfers = [t for program in schedule.programs[rank] for step in program for t in step]
    written = {block for t in transfers if not t.outgoing for block in t.blocks}
    scratch: dict[tuple[int, int], int] = {}
    for block in (*initial, *(block for t in transfers for block in t.blocks)):
        if block in found:
            continue
        if block in initial and block not in written:
            found[block] = initial[block]
        else:
            number = scratch.setdefault((block.origin, block.destination), len(scratch))
            found[block] = Place("scratch", number, block.piece)
    return found


def element_range(place: Place, cut: int, block_elements: int) -> tuple[int, int]:
    """First and one past the last element of a place in its buffer, blocks of ``block_elements`` in ``cut`` pieces.

    Pieces differ by one element where they do not divide the block, and are empty where there are more of them than
    elements.
    """
    start = place.block * block_elements
    return start + place.piece * block_elements // cut, start + (place.piece + 1) * block_elements // cut
