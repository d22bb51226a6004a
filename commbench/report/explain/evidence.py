"""What a curve is judged by: its times and predictions, the links behind them, and what was seen on the hosts.

Times in seconds, sizes in bytes, rates as seconds a byte where ``models.links`` has them so. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from commbench.cases import Case
from commbench.models.links import Links

Level = Literal["high", "medium", "low"]
HIGH: Final = "high"
MEDIUM: Final = "medium"
LOW: Final = "low"

RESOLUTION_S = 5e-6  # Python calls and clocks: what calibration cannot tell apart
FACTOR = 1.5  # slower by less is within what models, links and machines vary by
SMALL_BYTES = 64 << 10  # below, a prediction is right within a factor of two only (docs/models.md)
SMALL_FACTOR = 3.0  # so there it takes FACTOR beyond that
IN_A_ROW = 2  # sizes; one alone may be an accident
LEAST_SAMPLES = 6  # below, the median has no interval at 95 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """One size of a curve. ``hosts[rank]`` is the host of a rank of the group.

    ``lower``: what the median takes at least, surely. ``predictions``: of every algorithm; ``known_s``: of the one that
    was carried out, where that is known. ``over_launches``: the slowest over the fastest launch's or pass's median.
    """

    case: Case
    launch: int
    hosts: tuple[int, ...]
    seconds: float
    lower: float
    p25: float | None = None
    p75: float | None = None
    samples: int = 0
    predictions: Mapping[str, float] = field(default_factory=dict)
    known_s: float | None = None
    wire_bytes: float | None = None
    oversubscribed: bool = False
    host_bound: bool = False
    over_launches: float | None = None

    @property
    def size(self) -> int:
        return self.case.bytes

    @property
    def fastest_s(self) -> float | None:
        """The model of what was carried out, else the fastest that there is."""
        return self.known_s or min(self.predictions.values(), default=None)

    @property
    def slowest_s(self) -> float | None:
        return self.known_s or max(self.predictions.values(), default=None)

    def times(self, model_s: float | None) -> float:
        """How many times a model's time it surely takes; 0 where there is no model, or less than can be told."""
        return max(0.0, self.lower - RESOLUTION_S) / model_s if model_s else 0.0

    @property
    def limit(self) -> float:
        """How many times a model's time is no accident."""
        return SMALL_FACTOR if self.size < SMALL_BYTES else FACTOR

    @property
    def spread(self) -> float:
        """The third quartile over the first; 1 where there are too few samples to say."""
        return self.p75 / self.p25 if self.p25 and self.p75 and self.samples >= 10 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """An active InfiniBand or RoCE port; bits a second."""

    name: str
    rate_bps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """One host during a launch. Shares are of all its processors' time, None where it is not known.

    ``others``: what processes took that are not ours; ``busy``: what was not idle; ``stolen``: by a hypervisor.
    """

    name: str
    processors: int | None = None
    others: float | None = None
    busy: float | None = None
    stolen: float | None = None
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One backend in one launch. ``ranks[rank]`` is the name of a world rank's host; ``names[host]`` and ``facts`` are
    in the order of the hosts' numbers.

    ``rates_after``: the hosts' rates after the sweep, None where they were not measured, empty where as usual.
    ``settings``: environment variables that steer libraries, and what the backend said it had set.
    """

    launch: int
    version: str
    links: Links
    rates_after: tuple[tuple[float, float], ...] | None
    ranks: tuple[str, ...]
    names: tuple[str, ...]
    facts: tuple[HostFacts, ...]
    settings: Mapping[str, str]
    read_back: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One case at several sizes, ascending, and the launches that measured it.

    ``expected(spot, links)`` is the time that the known algorithm, else the fastest, would take on other links.
    """

    spots: tuple[Spot, ...]
    setups: tuple[Setup, ...]
    expected: Callable[[Spot, Links], float]

    @property
    def case(self) -> Case:
        """Of its first size: all but the size holds for every one."""
        return self.spots[0].case

    @property
    def hosts(self) -> tuple[int, ...]:
        return self.spots[0].hosts

    @property
    def several_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    @property
    def shares_hosts(self) -> bool:
        """Whether some of its ranks are on one host."""
        return len(set(self.hosts)) < len(self.hosts)

    def setup_of(self, spot: Spot) -> Setup | None:
        return next((setup for setup in self.setups if setup.launch == spot.launch), None)

    def in_a_row(self, holds: Callable[[Spot], bool], least: int = IN_A_ROW) -> tuple[Spot, ...]:
        """The longest stretch of sizes for which something holds, the later of equals.

        Empty below ``least`` of them, or below all that there are.
        """
        best: list[Spot] = []
        current: list[Spot] = []
        for spot in self.spots:
            current = [*current, spot] if holds(spot) else []
            if len(current) >= len(best):
                best = current
        return tuple(best) if best and len(best) >= min(least, len(self.spots)) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A cause that fits a curve. ``factor``: how many times longer it made operations, at the size where most.

    ``kind``: the name of the judge; ``cause``: for a person. ``judged_by``: the numbers, each a phrase. ``of_run``: it concerns the whole run, though few curves may show it.
    """

    kind: str
    cause: str
    level: Level
    factor: float
    sizes: tuple[int, ...]
    judged_by: tuple[str, ...]
    of_run: bool = True


Judge = Callable[[Curve], "Finding | None"]


def sizes_of(spots: Sequence[Spot]) -> tuple[int, ...]:
    return tuple(spot.size for spot in spots)
