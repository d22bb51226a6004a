"""Which schedule a case is carried out by, where that is known: commbench's own algorithms, forced and fixed ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from commbench.backends.forcing import model_of
from commbench.cases import Case, is_own
from commbench.measure.point import Model
from commbench.models.prediction import MOST_SIMULATED
from commbench.schedules.own import own_schedule
from commbench.schedules.schedule import Schedule


def model(case: Case, settings: Mapping[str, str]) -> Model | None:
    """For the hosts of a group the schedule, and the hosts of its ranks; None where it is not known.

    ``settings`` are the backend's. A library's operation on more ranks than are simulated has none.
    """
    if is_own(case.algorithm):

        def own(hosts: tuple[int, ...]) -> tuple[Schedule, tuple[int, ...]]:
            return own_schedule(case.collective, case.algorithm, case.bytes, hosts, case.root), hosts

        return own
    known = model_of(case.backend, case, settings) if case.ranks <= MOST_SIMULATED else None
    return None if known is None else partial(known.played, root=case.root)
