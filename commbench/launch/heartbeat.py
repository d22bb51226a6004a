"""Where a rank is right now: a few bytes of memory that it writes and others read.

A rank stores its position before it enters an operation and after it leaves; no message is sent, so nothing
disturbs what is timed. When commbench started the ranks itself, the pages are files that the starting process
reads at will (``python -m commbench.launch.heartbeat DIR`` prints them); elsewhere a rank answers with its own
page when it is asked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PAGE = struct.Struct("=iiiqi")  # rank, pid, case index, iteration, phase
_ITERATION_AT = 12
PHASES = ("starting", "calibrating", "synchronising", "preparing", "inside", "checking", "deciding", "done")


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A rank's position: case index (-1 before the first), iteration within the case, and phase."""

    rank: int
    pid: int
    case: int
    iteration: int
    phase: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Heartbeat:
    """A rank's own page; in ``directory`` (a file ``rank-N``) or, without one, in memory."""

    def __init__(self, rank: int, directory: str | None = None) -> None:
        self._rank = rank
        self._pid = os.getpid()
        self._page: Any = bytearray(_PAGE.size)
        if directory:
            descriptor = os.open(Path(directory) / f"rank-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(descriptor, _PAGE.size)
            self._page = mmap.mmap(descriptor, _PAGE.size)
            os.close(descriptor)
        self._case = -1
        self.set("starting")

    def set(self, phase: str, iteration: int = 0, case: int | None = None) -> None:
        """Store the position; about a third of a microsecond, outside every timed window."""
        if case is not None:
            self._case = case
        _PAGE.pack_into(self._page, 0, self._rank, self._pid, self._case, iteration, PHASES.index(phase))

    @property
    def iteration_address(self) -> int:
        """Where the iteration is kept, 8 bytes in the machine's order, for code that is not Python's."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._page)) + _ITERATION_AT

    def read(self) -> Beat:
        return _unpack(self._page)


def read_beats(directory: str) -> dict[int, Beat]:
    """The pages in ``directory`` by rank; a rank that has not come so far is missing."""
    beats = {}
    for file in sorted(Path(directory).glob("rank-*")):
        page = file.read_bytes()
        if len(page) == _PAGE.size:
            beat = _unpack(page)
            beats[beat.rank] = beat
    return beats


def _unpack(page: Any) -> Beat:
    rank, pid, case, iteration, phase = _PAGE.unpack_from(page, 0)
    return Beat(rank=rank, pid=pid, case=case, iteration=iteration, phase=PHASES[phase])


if __name__ == "__main__":
    for beat in read_beats(sys.argv[1]).values():
        print(f"rank {beat.rank} pid {beat.pid} case {beat.case} {beat.phase} {beat.iteration}")
