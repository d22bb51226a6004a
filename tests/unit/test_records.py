"""The point: what goes to disk as one line, and what comes back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.records import COLUMNS, Point, finite

# The design's columns; a reader may rely on every one.
PROMISED = """run_id launch started_utc label collective backend algorithm protocol group ranks nodes ranks_per_node dtype reduce_op
placement bytes requested_bytes timing execution cache status reason wrong verified samples discarded stop time_s
time_lo_s time_hi_s time_min_s time_p05_s time_p25_s time_p75_s time_p95_s time_p99_s time_max_s time_mean_s algbw_Bps
busbw_Bps slowest_rank slowest_host skew_s ring_s tree_s bound_s ring_busbw_Bps tree_busbw_Bps efficiency nearest_model
wire_bytes tainted host_bound schema case_id seed root world group_index backend_settings calibration_id predictions
nearest_error interval_of interval_level time_first_s oversubscribed steal_s"""


def point(**changes: Any) -> Point:
    values: dict[str, Any] = {
        "collective": "all_reduce", "backend": "gloo", "ranks": 2, "nodes": 1, "dtype": "float32", "reduce_op": "sum",
        "placement": "out", "bytes": 8, "requested_bytes": 8, "timing": "isolated",
    }  # fmt: skip
    return Point(**(values | changes))


def test_no_promised_column_is_missing() -> None:
    assert set(PROMISED.split()) <= set(COLUMNS)


def test_a_point_comes_back_as_it_was() -> None:
    one = point(
        time_s=1.5e-6, predictions={"ring": 2e-6}, backend_settings={"interface": "lo"}, label='a "b"\nc', wrong=0
    )
    line = one.to_json()
    assert "\n" not in line
    assert Point.from_dict(json.loads(line)) == one


def test_columns_of_a_later_version_are_let_go() -> None:
    assert Point.from_dict({**json.loads(point().to_json()), "from_the_future": 1}) == point()


def test_what_json_has_no_number_for_becomes_null() -> None:
    one = point(time_s=math.nan, efficiency=math.inf, predictions={"ring": -math.inf, "tree": 1.0})
    stored = json.loads(one.to_json())
    assert (stored["time_s"], stored["efficiency"], stored["predictions"]) == (None, None, {"ring": None, "tree": 1.0})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_finite_makes_anything_strict_json(value: Any) -> None:
    json.dumps(finite(value), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [((1.0, math.nan), [1.0, None]), ({1: math.inf}, {"1": None}), ("nan", "nan"), (np.float64("nan"), None)],
)
def test_finite_values(value: Any, expected: Any) -> None:
    assert finite(value) == expected
