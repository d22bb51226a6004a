"""What a case should take on other links than those that were calibrated: with a fault taken away, or put in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain

from commbench.backends.forcing import LIBRARY, model_of
from commbench.cases import Case, is_own
from commbench.models import Links, predict, predict_schedule
from commbench.models.prediction import MOST_SIMULATED
from commbench.report.explain.evidence import Spot
from commbench.schedules import leaving
from commbench.schedules.catalogue import ALGORITHMS, build, buildable
from commbench.schedules.own import own_schedule
from commbench.schedules.schedule import Schedule, ScheduleError

Played = tuple[Schedule, tuple[int, ...]]
"""A schedule, and the hosts of its ranks."""


def known_schedule(case: Case, hosts: tuple[int, ...], read_back: tuple[tuple[str, str], ...] = ()) -> Played | None:
    """What is carried out, where that is known: an own algorithm, or a library's that is one of ours."""
    if len(hosts) > MOST_SIMULATED:
        return None
    try:
        if is_own(case.algorithm):
            return own_schedule(case.collective, case.algorithm, case.bytes, hosts, case.root), hosts
        known = model_of(case.backend, case, dict(read_back))
        return known.played(hosts, case.root) if known else None
    except (ScheduleError, ValueError):
        return None  # stored by a version that knew more


def known_name(case: Case, read_back: Mapping[str, str]) -> str:
    """What a case whose algorithm is known is carried out by: its own name, or what a library has no choice about."""
    known = None if is_own(case.algorithm) else model_of(case.backend, case, read_back)
    if known is None or case.algorithm != LIBRARY:
        return case.algorithm
    return known.algorithm if known.collective == case.collective else f"{known.algorithm} {known.collective}"


def expected(spot: Spot, links: Links, read_back: tuple[tuple[str, str], ...] = ()) -> float:
    """Seconds of the known algorithm, else of the fastest one; infinite for a link that is not calibrated."""
    return _expected(spot.case, spot.hosts, links, read_back)


@lru_cache(maxsize=4096)
def _expected(case: Case, hosts: tuple[int, ...], links: Links, read_back: tuple[tuple[str, str], ...]) -> float:
    try:
        played = known_schedule(case, hosts, read_back)
        if played is not None:
            schedule, places = played
            return predict_schedule(schedule, case.bytes, places, links, case.timing)
        found = predict(
            case.collective, case.bytes, hosts, links, timing=case.timing, root=case.root, itemsize=case.itemsize
        )
    except ValueError:
        return math.inf
    return min(found.times.values(), default=found.bound_s)


@lru_cache(maxsize=1024)
def shares_leaving(case: Case, hosts: tuple[int, ...], known: bool) -> tuple[float, float] | None:
    """What leaves the hosts, in messages: all of them together, and the one that sends most.

    Of the ``known`` algorithm, else of the leanest that there is. None where there is none, or too many ranks to say.
    """
    if len(hosts) > MOST_SIMULATED:
        return None
    played = known_schedule(case, hosts) if known else None
    if played is not None:
        options = [leaving(*played)]
    else:
        names = [name for name in ALGORITHMS[case.collective] if not buildable(case.collective, name, hosts)]
        options = [leaving(build(case.collective, name, len(hosts), case.root, 1, hosts), hosts) for name in names]
    sums = [(float(sum(found.values())), float(max(found.values()))) for found in options]
    return (min(total for total, _ in sums), min(most for _, most in sums)) if sums else None


def algorithms_of(spots: tuple[Spot, ...]) -> list[str]:
    """Every algorithm that is predicted for one of the sizes."""
    return list(dict.fromkeys(chain.from_iterable(spot.predictions for spot in spots)))
