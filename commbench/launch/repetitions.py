"""How often all sets of processes are launched, and when: a number, or until intervals over launches are narrow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from commbench.launch.order import Launches
from commbench.stats.launches import Auto, half_width
from commbench.stats.summary import LEVEL


class Repetitions:
    """Counts repetitions; ``expected`` is how many there will be, as far as is known.

    ``spread_s``: the time over which those that are expected are spread evenly, from the first one's start.
    """

    def __init__(self, launches: Launches, *, spread_s: float | None = None) -> None:
        self.launches = launches
        self.done = 0
        self.expected = launches.most
        self.precise: bool | None = None
        self._spread_s = spread_s
        self._started_s: list[float] = []
        self._auto: Auto | None = None
        if launches.precision is not None:
            self._auto = Auto(precision=launches.precision, level=LEVEL, least=launches.least, most=launches.most)

    def start(self, now_s: float) -> None:
        """A repetition begins."""
        self._started_s.append(now_s)

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next one, so that what is left comes evenly over the time that is left."""
        if self._spread_s is None or not self._started_s:
            return 0.0
        first, last = self._started_s[0], self._started_s[-1]
        left = self.expected - len(self._started_s) + 1
        return max(0.0, last + (first + self._spread_s - last) / max(1, left) - now_s)

    def finish(self, points: Iterable[dict[str, Any]], say: Callable[[str], None]) -> bool:
        """A repetition has ended; whether another must follow. ``points`` are all of the run's so far."""
        self.done += 1
        if self._auto is None or self.done < self.launches.least:
            return self.done < self.expected
        medians = medians_of_launches(points)
        if not medians:
            return False
        within = f"every case's interval over launches within {self._auto.precision:.3g} of its median"
        self.precise = all(half_width(values) <= self._auto.precision for values in medians.values())
        if self.done >= self.launches.most or self._auto.enough(medians):
            say(f"{self.done} launches: {within}" if self.precise else f"{self.done} launches did not bring {within}")
            return False
        needed = [self._auto.needed(values) for values in medians.values()]
        foreseen = None if None in needed else max(self.done + 1, *(number for number in needed if number is not None))
        if self.done == self.launches.least:
            self._tell(foreseen, within, say)
        self.expected = min(self.launches.most, foreseen or self.launches.most)
        return True

    def _tell(self, foreseen: int | None, within: str, say: Callable[[str], None]) -> None:
        most = self.launches.most
        if foreseen is None:
            say(f"{self.done} launches made; how many will bring {within} cannot be foreseen; at most {most} are made")
        else:
            limit = f"; at most {most} are made" if foreseen > most else ""
            say(f"{self.done} launches made; about {foreseen} are needed to bring {within}{limit}")


def medians_of_launches(points: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """By variant and case each launch's median time; a soak's passes count as their launch's median."""
    found: dict[str, dict[int, list[float]]] = {}
    for point in points:
        if point["status"] == "ok" and point["time_s"] is not None:
            key = f"{point['variant']}/{point['case_id']}"
            found.setdefault(key, {}).setdefault(point["launch"], []).append(point["time_s"])
    return {key: [statistics.median(times) for times in by.values()] for key, by in found.items()}
