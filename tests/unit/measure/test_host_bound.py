"""When a number tells of the host more than of the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commbench.cases import Case, Layout
from commbench.measure.loop import Measured
from commbench.measure.point import Setting, measured_point
from commbench.measure.ranks import combine
from commbench.stats.summary import summarise_times

STAMPS = np.array([[[0, 10_000]] * 20, [[0, 9_000]] * 20], dtype=np.int64)  # of two ranks, 20 iterations
FOUND = Measured(
    summary=summarise_times(np.full(20, 10e-6)), iterations=combine(STAMPS, ((0, 1),), common_clock=False),
    kept=np.ones(20, dtype=bool), stamps=STAMPS, batch=1, late_starts=False, wrong=0, verified=20, stop="iterations",
    start="stream", numbers=np.arange(20),
)  # fmt: skip
SETTING = Setting(
    run_id="r", launch=0, label="", seed=0, layout=Layout(hosts=("a", "a")), backend_settings={}, links=None,
    oversubscribed=False, tainted="several ranks on one GPU: no timing",
)  # fmt: skip
CASE = Case(collective="all_reduce", backend="nccl", bytes=8, requested_bytes=8, ranks=2, nodes=1)


def point(**found: Any) -> Any:
    return measured_point(
        CASE, replace(FOUND, **found), SETTING, started_utc="", note=None, steal_s=None, pass_index=0,
        nccl_estimate_s=None, model=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "bound", "host_s"),
    [
        # A device keeps the time: whether it waited decides, however long the host's calls take.
        ({"starved": 0.0, "host_s": 50e-6, "overhead_s": 1e-6}, False, 50e-6),
        ({"starved": 0.1, "host_s": 5e-6, "overhead_s": 1e-6}, False, 5e-6),
        ({"starved": 0.11, "host_s": 5e-6, "overhead_s": 1e-6}, True, 5e-6),
        ({"starved": 1.0, "host_s": 50e-6, "overhead_s": 1e-6}, True, 50e-6),
        # A host keeps the time: what its loop adds may be 5 % of 10 us.
        ({"overhead_s": 0.49e-6}, False, 0.49e-6),
        ({"overhead_s": 0.51e-6}, True, 0.51e-6),
        ({}, None, None),
    ],
)
def test_what_was_host_bound_is_marked(found: dict[str, Any], bound: bool | None, host_s: float | None) -> None:
    made = point(**found)
    assert (made.host_bound, made.host_s) == (bound, host_s)


def test_the_longest_device_counts_and_the_shortest_is_kept() -> None:
    made = point(starved=0.0, host_s=1e-6)
    assert (made.time_s, made.time_shortest_s) == (pytest.approx(10e-6), pytest.approx(9e-6))
    assert (made.start, made.slowest_rank, made.skew_s) == ("stream", 0, None)
    assert made.tainted == "several ranks on one GPU: no timing"
