"""This rank's clock, the wait for an agreed start, who else reads the same clock, and what a common one is.

``time.perf_counter_ns`` is CLOCK_MONOTONIC on Linux: one clock for all processes of a host. CLOCK_MONOTONIC_RAW, which
no time service touches, is not used: nothing can sleep until a time of that clock.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

now_ns = time.perf_counter_ns
# How far two ranks' readings of one host's clock can be apart: a pass through the spin loop, measured 0.1-0.2 us.
SAME_HOST_ERROR_S = 2e-7
WRONG = "COMMBENCH_WRONG_CLOCK"  # for tests: makes clocks wrong, see docs/measuring.md
_WRONG_OFFSET_S, _WRONG_PPM = 10.0, 50.0  # at most, where only a seed is given


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def wait_until(start_ns: int, spin: bool) -> None:
    """Return at ``start_ns`` or at once if it has passed. Ranks without a core of their own sleep: a spinning one
    would hold the core that its peer needs to get ready."""
    if not spin:
        left = start_ns - now_ns()
        if left > 0:
            time.sleep(left / 1e9)
        return
    while now_ns() < start_ns:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalClock:
    """How this rank's clock reads at a time of CLOCK_MONOTONIC: the same, but where it was made wrong for a test.

    Loops, compiled ones too, know CLOCK_MONOTONIC alone; what enters and leaves them passes through here. Both ways are
    exact to a nanosecond.
    """

    offset_ns: int = 0
    drift: float = 0.0

    @property
    def right(self) -> bool:
        return self.offset_ns == 0 and self.drift == 0.0

    def reader(self) -> Callable[[], int]:
        """What reads this clock, as quickly as it can be read."""
        if self.right:
            return now_ns
        offset_ns, drift = self.offset_ns, self.drift

        def read() -> int:
            true_ns = now_ns()
            return true_ns + offset_ns + round(drift * true_ns)

        return read

    def read(self, true_ns: ArrayLike) -> NDArray[np.int64]:
        true = np.asarray(true_ns, dtype=np.int64)
        return np.asarray(true + self.offset_ns + np.rint(self.drift * true).astype(np.int64))

    def true(self, read_ns: ArrayLike) -> NDArray[np.int64]:
        ahead = np.asarray(read_ns, dtype=np.int64) - self.offset_ns
        return np.asarray(ahead - np.rint(self.drift / (1 + self.drift) * ahead).astype(np.int64))

    def to_dict(self) -> dict[str, Any]:
        return {"offset_s": self.offset_ns * 1e-9, "ppm": self.drift * 1e6}


def local_clock(rank: int, environ: Mapping[str, str] = os.environ) -> LocalClock:
    """This rank's clock, wrong where ``COMMBENCH_WRONG_CLOCK`` says so: ``rank:offset_s:ppm`` for some ranks, separated
    by commas, or one whole number, a seed from which every rank gets an offset (up to 10 s either way) and a drift (up
    to 50 ppm). Raises ValueError in one line."""
    text = environ.get(WRONG, "").strip()
    if not text:
        return LocalClock()
    try:
        if ":" not in text:
            chance = random.Random(f"{int(text)}/{rank}")
            offset_s, ppm = chance.uniform(-_WRONG_OFFSET_S, _WRONG_OFFSET_S), chance.uniform(-_WRONG_PPM, _WRONG_PPM)
            return _wrong(offset_s, ppm)
        of = {int(who): _wrong(float(offset_s), float(ppm)) for who, offset_s, ppm in map(_three, text.split(","))}
    except ValueError:
        raise ValueError(f"{WRONG}={text!r} is neither a seed nor rank:offset_s:ppm, separated by commas") from None
    return of.get(rank, LocalClock())


def _three(text: str) -> tuple[str, str, str]:
    who, offset_s, ppm = text.split(":")
    return who, offset_s, ppm


def _wrong(offset_s: float, ppm: float) -> LocalClock:
    return LocalClock(offset_ns=round(offset_s * 1e9), drift=ppm / 1e6)


def identity(rank: int, host: str, local: LocalClock, root: Path = Path("/")) -> str:
    """The same for two ranks that read one clock: same host, same start of its kernel, same time namespace."""
    parts = [host]
    for name in ("proc/sys/kernel/random/boot_id", "proc/self/timens_offsets"):
        try:
            parts.append(" ".join((root / name).read_text().split()))
        except OSError:  # kernels before 5.6 have no time namespaces
            parts.append("")
    return "|".join(parts if local.right else [*parts, f"wrong on rank {rank}"])


class CommonClock(Protocol):
    """What measuring knows of time on several ranks. Readings are ns as 64-bit integers; ``mine``: CLOCK_MONOTONIC, as
    loops read it on this rank; common: what is the same on all ranks.
    """

    several: bool  # whether there is more than one clock

    def now_ns(self) -> int:
        """Common."""

    def to_mine(self, common_ns: ArrayLike) -> NDArray[np.int64]: ...

    def to_common(self, mine_ns: ArrayLike) -> NDArray[np.int64]: ...

    def error_s(self, members: Sequence[int]) -> float:
        """How far the common clock may be apart on two of these ranks now. At rank 0."""

    def due(self) -> bool:
        """Whether clocks ought to be fitted again. At rank 0."""

    def refit(self, iteration: int = 0) -> None:
        """Fit them again: a call of all ranks, before they come to this iteration."""


class OneClock:
    """Of ranks that all read the same."""

    several = False

    def now_ns(self) -> int:
        return now_ns()

    def to_mine(self, common_ns: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(common_ns, dtype=np.int64)

    def to_common(self, mine_ns: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(mine_ns, dtype=np.int64)

    def error_s(self, members: Sequence[int]) -> float:
        return SAME_HOST_ERROR_S

    def due(self) -> bool:
        return False

    def refit(self, iteration: int = 0) -> None: ...
