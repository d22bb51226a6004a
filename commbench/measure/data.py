"""What every rank sends, and the exact check, element by element, of what every collective gives back.

All data are read from a tile (``tiles.py``), each block from a place that depends on the case, the iteration, the rank
and the block. The answer of a reduction is read from the tile of answers in the same way, so filling and checking
are a copy and a comparison at memory speed, whatever the number of ranks, without temporaries of a buffer's size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from commbench.cases import Dtype
from commbench.collectives import Collective
from commbench.measure.encoding import Words, word_type
from commbench.measure.tiles import MARGIN_ELEMENTS, Tile, mix, moved_tile, reduced_tile

STRETCH_ELEMENTS = 2**16  # what is copied or compared at a time


class Data(Protocol):
    """What measuring asks of a case's data on one rank; ``Pattern`` has more."""

    output_elements: int

    def fill(self, out: npt.NDArray[Any], iteration: int) -> None: ...

    def poison(self, out: npt.NDArray[Any]) -> None: ...

    def wrong(self, output: npt.NDArray[Any], iteration: int) -> int: ...


class Pattern:
    """The data of one case on one rank.

    ``rank`` and ``root`` count within the group of ``ranks``; a block is as in ``Collective``. Buffers are handed in as
    contiguous arrays of any type, bytes or elements. Raises ValueError for an op that the type does not have.
    """

    def __init__(
        self, *, collective: Collective, dtype: Dtype, op: str | None, ranks: int, rank: int, root: int,
        block_elements: int, seed: int,
    ) -> None:  # fmt: skip
        if not (0 <= rank < ranks and 0 <= root < ranks):
            raise ValueError(f"rank {rank} and root {root} must lie within the {ranks} ranks")
        parts = collective.output(rank, ranks, root)
        blocks = collective.input_blocks(rank, ranks, root)
        self.input_elements = blocks * block_elements
        self.output_elements = len(parts) * block_elements
        self._rank = rank
        self._block = block_elements
        self._type = word_type(dtype)
        self._tile = tile = reduced_tile(dtype, op, ranks, seed) if collective.reduces else moved_tile(dtype, seed)
        # Answers are stored where rank 0's part is read.
        sources = [0 if collective.reduces else part.sources[0] for part in parts]
        self._from = _starts(tile, [rank] * blocks, list(range(blocks)))
        self._to = _starts(tile, sources, [part.block for part in parts])
        case = f"{collective.name} {dtype.name} {op} {ranks} {root} {block_elements}"
        self._begin = mix(seed, zlib.crc32(case.encode())) % tile.period

    def fill(self, out: npt.NDArray[Any], iteration: int) -> None:
        """Write this rank's ``input_elements`` for the iteration."""
        words = self._words(out, self.input_elements)
        for at, piece in self._stretches(self._tile.inputs, self._from, iteration):
            words[at : at + len(piece)] = piece

    def poison(self, out: npt.NDArray[Any]) -> None:
        """Fill a buffer of any length with a word that no right output contains. In place: before ``fill``."""
        self._words(out)[:] = self._tile.poison

    def wrong(self, output: npt.NDArray[Any], iteration: int) -> int:
        """How many of the ``output_elements`` differ from the exact answer of the iteration."""
        words = self._words(output, self.output_elements)
        slack = self._type.type(self._tile.slack)
        found = 0
        for at, piece in self._stretches(self._tile.outputs, self._to, iteration):
            got = words[at : at + len(piece)]
            found += int(np.count_nonzero(got - piece > slack if slack else got != piece))
        return found

    def in_place_slices(self) -> tuple[int, slice, slice]:
        """Elements of the one buffer of the in-place form, and where in it the input and the output lie.

        The smaller of the two lies at this rank's block of the larger, as in nccl-tests.
        """
        sizes = (self.input_elements, self.output_elements)
        small, large = sorted(sizes)
        own = self._rank * self._block if 0 < small < large else 0
        begins = [own if size == small else 0 for size in sizes]
        source, target = (slice(at, at + size) for at, size in zip(begins, sizes, strict=True))
        return large, source, target

    def _words(self, buffer: npt.NDArray[Any], elements: int | None = None) -> Words:
        if not buffer.flags.c_contiguous:
            raise ValueError("the data of a collective lie in one contiguous buffer")
        words = buffer.reshape(-1).view(self._type)
        if elements is not None and len(words) != elements:
            raise ValueError(f"expected a buffer of {elements} elements of {self._type.itemsize} B, not {len(words)}")
        return words

    def _stretches(self, words: Words, starts: npt.NDArray[np.int64], iteration: int) -> Iterator[tuple[int, Words]]:
        """Position in the buffer, and the tile's words from there on, until every block is done."""
        begin = (self._begin + iteration * self._tile.iteration_stride) % self._tile.period
        places = (starts + begin) % self._tile.period
        if self._block == 0:
            return
        if self._block <= MARGIN_ELEMENTS:
            yield from _short_blocks(words, places, self._block)
            return
        for index, place in enumerate(places.tolist()):
            done = 0
            while done < self._block:
                length = min(self._block - done, len(words) - place, STRETCH_ELEMENTS)
                yield index * self._block + done, words[place : place + length]
                done += length
                place = (place + length) % self._tile.period


def _short_blocks(words: Words, places: npt.NDArray[np.int64], block: int) -> Iterator[tuple[int, Words]]:
    """As many whole blocks at a time as a stretch holds: a loop over a thousand tiny blocks would take milliseconds."""
    if len(places) == 1:
        yield 0, words[places[0] : places[0] + block]
        return
    windows = np.lib.stride_tricks.sliding_window_view(words, block)
    count = max(1, STRETCH_ELEMENTS // block)
    for first in range(0, len(places), count):
        yield first * block, windows[places[first : first + count]].reshape(-1)


def _starts(tile: Tile, ranks: list[int], blocks: list[int]) -> npt.NDArray[np.int64]:
    """Where in the tile each block of each rank begins, before the iteration moves it."""
    sums = [rank * tile.rank_stride + block * tile.block_stride for rank, block in zip(ranks, blocks, strict=True)]
    return np.array([start % tile.period for start in sums], dtype=np.int64)
