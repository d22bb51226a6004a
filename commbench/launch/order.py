"""In which order launches and cases come, so that drift favours none of them.

All sets of processes are launched once a repetition. Order and seeds follow from numbers alone: a run can be repeated.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from commbench.cases import Case
from commbench.launch.sets import ProcessSet
from commbench.units import parse_fraction

# Order statistics have no 95 % interval of the median of fewer.
LEAST = 6
MOST = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """How many launches each set of processes gets. ``precision``: until every case's interval over launches is within
    this share of its median, ``least`` to ``most`` of them; None: ``most``, which is then ``least`` too."""

    least: int = 1
    most: int = 1
    precision: float | None = None

    @classmethod
    def fixed(cls, count: int) -> Launches:
        return cls(least=count, most=count)

    @property
    def several(self) -> bool:
        return self.most > 1

    def __str__(self) -> str:
        return str(self.most) if self.precision is None else f"auto:{self.precision:.6g}:{self.most}"


ONCE = Launches()


def parse_auto(text: str) -> Launches:
    """``auto:5%``, or ``auto:5%:30`` for at most 30 launches. Raises ValueError with one line."""
    fields = text.split(":")
    if fields[0] != "auto" or len(fields) not in (2, 3):
        raise ValueError(
            f"{text!r} is neither a number nor auto:PRECISION, such as auto:5%, or auto:5%:30 for at most 30"
        )
    most = fields[2] if len(fields) == 3 else str(MOST)
    if not most.isdigit() or int(most) < LEAST:
        raise ValueError(f"{most!r} launches are too few for an interval: at most {LEAST} or more, as in auto:5%:30")
    return Launches(least=LEAST, most=int(most), precision=parse_fraction(fields[1]))


def sets_in_order(count: int, repetition: int) -> tuple[int, ...]:
    """The numbers 0 to ``count`` − 1 in the order in which a repetition launches them; the first is the natural order.

    Every odd repetition is the one before it backwards (A B, B A), so that over each such pair the mean position of all
    is the same, and a linear drift cancels out. From pair to pair the order goes on to the next row of a Williams design
    (E. J. Williams, Aust. J. Sci. Res. A 2, 1949): in ``count`` pairs each stands equally often at every position, and
    equally often right after each of the others.
    """
    low, high = 0, count
    zigzag = []  # 0, n - 1, 1, n - 2, ...: all differences between neighbours occur
    while low < high:
        zigzag.append(low)
        low += 1
        if low < high:
            high -= 1
            zigzag.append(high)
    place = {symbol: position for position, symbol in enumerate(zigzag)}
    row = tuple(place[(symbol + repetition // 2) % count] for symbol in zigzag)
    return row[::-1] if repetition % 2 else row


def launch_seed(seed: int, launch: int) -> int:
    """The seed of one launch's order, from the run's seed and the launch's number: 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{launch}".encode()).digest()[:4], "big") >> 1


def shuffled(of: ProcessSet, seed: int) -> ProcessSet:
    """The same set with its backends and the cases of each in an order that ``seed`` fixes.

    One backend is live at a time, so that a backend's cases stay together.
    """
    chance = random.Random(seed)
    backends = chance.sample(of.backends, len(of.backends))
    cases: list[Case] = []
    for name in backends:
        mine = [case for case in of.cases if case.backend == name]
        cases += chance.sample(mine, len(mine))
    return replace(of, backends=tuple(backends), cases=tuple(cases))
