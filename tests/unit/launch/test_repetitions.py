"""How often and when: a number of launches, or until they agree, spread over a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.launch.order import Launches, parse_auto
from commbench.launch.repetitions import Repetitions, medians_of_launches


def point(launch: int, time_s: float | None, **fields: Any) -> dict[str, Any]:
    return {"variant": "", "case_id": "a", "launch": launch, "status": "ok", "time_s": time_s, **fields}


def carry_out(launches: Launches, times: list[float]) -> tuple[Repetitions, list[str]]:
    """Launch after launch, one time each, until there are enough."""
    said: list[str] = []
    repetitions = Repetitions(launches)
    points: list[dict[str, Any]] = []
    more = True
    while more:
        points.append(point(len(points), times[len(points)]))
        more = repetitions.finish(points, said.append)
    return repetitions, said


@given(st.integers(1, 20))
def test_a_number_of_launches_is_that_number(count: int) -> None:
    repetitions, said = carry_out(Launches.fixed(count), [1.0] * count)
    assert (repetitions.done, repetitions.expected, repetitions.precise, said) == (count, count, None, [])


def test_launches_that_agree_are_soon_enough() -> None:
    # Six have an interval; it must have been narrow before the last launch as well.
    repetitions, said = carry_out(parse_auto("auto:5%"), [1.0, 1.01, 0.99, 1.005, 0.995, 1.0, 1.002])
    assert (repetitions.done, repetitions.precise) == (7, True)
    assert said == [
        "6 launches made; about 7 are needed to bring every case's interval over launches within 0.05 of its median",
        "7 launches: every case's interval over launches within 0.05 of its median",
    ]


def test_launches_that_never_agree_end_at_the_most_and_it_is_said() -> None:
    # Halves at 1 and at 3: the interval of the median is as wide as all of them, however many there are.
    repetitions, said = carry_out(parse_auto("auto:5%:12"), [1.0, 3.0] * 6)
    assert (repetitions.done, repetitions.precise) == (12, False)
    assert len(said) == 2
    assert said[0].startswith("6 launches made; ")
    assert said[1] == ("12 launches did not bring every case's interval over launches within 0.05 of its median")


def test_noise_in_between_is_told_about_and_reached() -> None:
    chance = random.Random(1)
    times = [chance.gauss(1.0, 0.06) for _ in range(60)]
    repetitions, said = carry_out(parse_auto("auto:5%:60"), times)
    assert repetitions.precise
    assert 6 < repetitions.done < 60
    assert said[0].startswith("6 launches made; about ")
    assert said[-1].startswith(f"{repetitions.done} launches: every case's interval")


def test_nothing_timed_needs_no_more_launches() -> None:
    repetitions = Repetitions(parse_auto("auto:5%"))
    skipped = [point(launch, None, status="skipped") for launch in range(6)]
    more = [repetitions.finish(skipped, lambda line: None) for _ in range(6)]
    assert more == [True] * 5 + [False]
    assert repetitions.precise is None


def test_a_launch_counts_once_and_variants_are_apart() -> None:
    points = [
        point(0, 1.0), point(0, 3.0), point(0, 2.0), point(1, 5.0), point(1, 9.0, variant="tcp"),
        point(2, 7.0, case_id="b"), point(3, 1.0, status="wrong"), point(4, None),
    ]  # fmt: skip
    assert medians_of_launches(points) == {"/a": [2.0, 5.0], "tcp/a": [9.0], "/b": [7.0]}


# -- over a time ---------------------------------------------------------------------------------------


@given(st.integers(2, 20), st.floats(1.0, 1e4), st.floats(0.0, 1e6))
def test_launches_that_are_quick_come_evenly(count: int, spread: float, began: float) -> None:
    repetitions = Repetitions(Launches.fixed(count), spread_s=spread)
    now, starts = began, []
    for _ in range(count):
        now += repetitions.pause_s(now)
        starts.append(now - began)
        repetitions.start(now)
        repetitions.finish([], lambda line: None)
        now += spread / count / 3
    assert starts == pytest.approx([index * spread / count for index in range(count)], rel=1e-6, abs=1e-5)


def test_a_launch_that_takes_long_is_followed_at_once_and_the_rest_close_up() -> None:
    repetitions = Repetitions(Launches.fixed(5), spread_s=100.0)
    assert repetitions.pause_s(50.0) == 0.0
    repetitions.start(50.0)
    assert repetitions.pause_s(60.0) == pytest.approx(10.0)
    assert repetitions.pause_s(90.0) == 0.0  # 40 s instead of 20
    repetitions.start(90.0)
    # Sixty seconds are left for this one and the three after it.
    assert repetitions.pause_s(92.0) == pytest.approx(13.0)
    assert Repetitions(Launches.fixed(5)).pause_s(50.0) == 0.0
