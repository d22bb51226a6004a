"""The measuring loop, with ranks as threads and a library that really moves the data, or does not."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from commbench.measure.clock import CommonClock, OneClock, now_ns
from commbench.measure.data import Pattern
from commbench.measure.loop import Measured, Settings, _Head, measure
from commbench.measure.operation import Operation
from commbench.measure.stopping import MIN_ROUNDS, StoppingRule
from commbench.stats.summary import relative_half_width

ELEMENTS = 60
RULE = StoppingRule(precision=1e-9, limit_s=5.0, limit_name="max_time", iterations=40)


@dataclass(kw_only=True)
class Seen:
    """What came of a case, and every operation that ran within a timed window: (rank, set) in order, by round."""

    found: Measured
    others: list[Any]
    calls: dict[int, list[tuple[int, int]]]
    expected: list[tuple[float, str]]

    def inside(self, rank: int) -> int:
        return len(self.calls[rank])


@dataclass
class Bench:
    """Runs ``measure`` on every rank of a world whose groups each have a library of their own."""

    as_ranks: Callable[..., list[Any]]
    library: Any
    calls: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def run(
        self, name: str = "all_reduce", *, world: int = 2, groups: tuple[tuple[int, ...], ...] | None = None,
        sets: int = 4, streamed: bool = False, rule: StoppingRule = RULE, pattern: type[Pattern] = Pattern,
        options: Callable[[int], dict[str, Any]] = lambda group: {}, barrier: bool = False,
        clock: Callable[[int], CommonClock] | None = lambda rank: OneClock(),
        counters: dict[int, Callable[[], int]] | None = None,
    ) -> Seen:  # fmt: skip
        groups = groups or (tuple(range(world)),)
        libraries = [self.library(name, members, ELEMENTS, **options(at)) for at, members in enumerate(groups)]
        self.calls = calls = {rank: [] for rank in range(world)}
        expected: list[tuple[float, str]] = []
        doors = threading.Barrier(world, timeout=20)

        def act(control: Any) -> Measured | None:
            rank = control.rank
            mine = next((one for one in libraries if rank in one.members), None)
            operations, data = [], None
            if mine is not None:
                data = mine.pattern(rank, pattern)
                operations = [
                    _noted(mine.operation(rank, data, index), index, control, calls[rank]) for index in range(sets)
                ]
            settings = Settings(
                streamed=streamed, rule=rule, deadline_s=30.0, clock=clock(rank) if clock else None, spin=False,
                barrier=_door(doors) if barrier else None, count_sent=counters is not None,
                sent_bytes=(counters or {}).get(rank),
            )  # fmt: skip
            found = measure(operations, data, control, settings, groups, "the case")
            expected.extend(control.expected if rank == 0 else [])
            return found

        found, *others = self.as_ranks(world, act)
        return Seen(found=found, others=others, calls=calls, expected=expected)


def _noted(operation: Operation, index: int, control: Any, calls: list[tuple[int, int]]) -> Operation:
    def run() -> None:
        phase, first = control.where
        if phase == "inside":
            calls.append((first, index))
        operation.run()

    return replace(operation, run=run, enqueue=run)


def _door(doors: threading.Barrier) -> Operation:
    nothing = np.empty(0, dtype=np.uint8)
    return Operation(run=doors.wait, enqueue=doors.wait, input=nothing, output=nothing)


# An operation that takes far longer than its check, whatever else this machine does.
SLOW: dict[str, Any] = {"after": lambda place, index, out: time.sleep(3e-3)}


@pytest.fixture
def bench(as_ranks: Callable[..., list[Any]], library: Any) -> Bench:
    return Bench(as_ranks, library)


# -- counts and times ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_fixed_number_of_isolated_iterations(bench: Bench, name: str) -> None:
    seen = bench.run(name, world=3, sets=4, options=lambda group: SLOW)
    found = seen.found
    assert seen.others == [None, None]
    assert found.stop == "iterations"
    assert found.stamps.shape == (3, 40, 2)
    assert [seen.inside(rank) for rank in range(3)] == [40, 40, 40]
    assert len(found.iterations.time) == len(found.kept) == 40
    assert found.summary.count == found.kept.sum() >= 20
    assert (found.wrong, found.verified, found.batch, found.start) == (0, 40, 1, "clock")
    assert {doing for _, doing in seen.expected} == {"warming up the case", "measuring the case"}


def test_an_isolated_time_is_from_the_last_start_to_the_last_end(bench: Bench) -> None:
    found = bench.run(sets=8).found
    starts, ends = found.stamps[:, :, 0], found.stamps[:, :, 1]
    times = (ends.max(axis=0) - starts.max(axis=0)) / 1e9
    np.testing.assert_allclose(found.iterations.time, times)
    np.testing.assert_allclose(found.summary.median, np.median(times[found.kept]))
    assert (starts[:, 1:] >= ends[:, :-1]).all()  # one iteration at a time


def test_iterations_start_together(bench: Bench) -> None:
    """A rank that is slow to finish does not make the next iteration late: the room between starts grows."""
    slow = {"after": lambda place, index, out: time.sleep(1e-3 * place)}
    found = bench.run(sets=4, options=lambda group: slow, rule=replace(RULE, iterations=100)).found
    skew = np.abs(found.stamps[0, :, 0] - found.stamps[1, :, 0])
    assert np.median(skew[50:]) < 0.5e6


def test_a_streamed_time_is_the_longest_rank_by_the_batch(bench: Bench) -> None:
    slow = {"after": lambda place, index, out: time.sleep(2e-4 * place)}
    seen = bench.run(streamed=True, options=lambda group: slow)
    found = seen.found
    # 40 operations in batches of a tenth.
    assert (found.batch, found.stop) == (4, "iterations")
    assert found.stamps.shape == (2, 10, 2)
    assert (seen.inside(0), seen.inside(1)) == (40, 40)
    durations = (found.stamps[:, :, 1] - found.stamps[:, :, 0]) / 1e9
    np.testing.assert_allclose(found.iterations.time, durations.max(axis=0))
    np.testing.assert_allclose(found.summary.median, np.median(durations.max(axis=0)) / 4)
    assert found.summary.median >= 2e-4
    assert found.kept.all()
    assert found.iterations.skew.tolist() == [0.0] * 10


@pytest.mark.parametrize(("iterations", "batch", "rounds"), [(1, 2, 1), (25, 2, 13), (7, 2, 4), (60, 6, 10)])
def test_streamed_batches_make_up_the_number(bench: Bench, iterations: int, batch: int, rounds: int) -> None:
    seen = bench.run(streamed=True, rule=replace(RULE, iterations=iterations))
    assert (seen.found.batch, seen.found.stamps.shape[1]) == (batch, rounds)
    assert seen.inside(0) == batch * rounds >= iterations


def test_without_a_common_clock_the_barrier_starts_and_durations_count(bench: Bench) -> None:
    found = bench.run(barrier=True, clock=None).found
    assert found.start == "barrier"
    durations = (found.stamps[:, :, 1] - found.stamps[:, :, 0]) / 1e9
    np.testing.assert_allclose(found.iterations.time, durations.max(axis=0))
    assert found.kept.all()


# -- clocks that differ ------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FarClock(OneClock):
    """All ranks read one clock that is far from the common one; ``error`` is what it says of itself."""

    several = True
    ahead_ns: int = 10**16
    error: float = 1e-6
    ages: list[bool] = field(default_factory=list)
    refits: list[int] = field(default_factory=list)

    def now_ns(self) -> int:
        return super().now_ns() + self.ahead_ns

    def to_mine(self, common_ns: Any) -> Any:
        return np.asarray(common_ns) - self.ahead_ns

    def to_common(self, mine_ns: Any) -> Any:
        return np.asarray(mine_ns) + self.ahead_ns

    def error_s(self, members: Any) -> float:
        return self.error * len(members)

    def due(self) -> bool:
        return self.ages.pop(0) if self.ages else False

    def refit(self, iteration: int = 0) -> None:
        self.refits.append(iteration)


def test_starts_and_stamps_are_the_common_clocks(bench: Bench) -> None:
    before = now_ns()
    found = bench.run(
        world=3, groups=((0, 2),), clock=lambda rank: FarClock(), barrier=True, options=lambda g: SLOW
    ).found
    after = now_ns()
    assert found.start == "clock"
    assert found.note is None
    mine = found.stamps[[0, 2]] - 10**16
    assert before < mine.min() <= mine.max() < after
    assert not found.stamps[1].any()  # a rank that takes no part has zeros, not times
    np.testing.assert_allclose(found.iterations.time, (mine[:, :, 1].max(axis=0) - mine[:, :, 0].max(axis=0)) / 1e9)
    np.testing.assert_allclose(found.iterations.skew, np.ptp(mine[:, :, 0], axis=0) / 1e9)
    assert found.clock_error_s == 2e-6  # of its group of two


def test_a_clock_that_is_not_sure_enough_gives_way_to_the_barrier(bench: Bench) -> None:
    """3 ms an operation: 1 ms may not be unknown. The first round, which has shown that, does not count."""
    clocks = [FarClock(error=5e-4) for _ in range(2)]
    seen = bench.run(sets=4, clock=clocks.__getitem__, barrier=True, options=lambda group: SLOW)
    found = seen.found
    assert (found.start, found.clock_error_s) == ("barrier", 1e-3)
    assert found.note is not None
    assert "started behind a barrier: clocks may be 1.00 ms apart, more than a tenth of the " in found.note
    assert found.stamps.shape == (2, 40, 2)
    assert 41 <= seen.inside(0) <= 44
    durations = (found.stamps[:, :, 1] - found.stamps[:, :, 0]) / 1e9
    np.testing.assert_allclose(found.iterations.time, durations.max(axis=0))
    assert found.kept.all()
    assert (found.wrong, found.stop) == (0, "iterations")


def test_streamed_batches_start_by_the_clock_however_unsure(bench: Bench) -> None:
    found = bench.run(streamed=True, clock=lambda rank: FarClock(error=1.0), barrier=True).found
    assert (found.start, found.note, found.clock_error_s) == ("clock", None, 2.0)
    assert (found.stamps > 10**16).all()


def test_clocks_are_fitted_again_when_they_are_due_and_on_all_ranks(bench: Bench) -> None:
    clocks = [FarClock(ages=[False, True, False, True] if rank == 0 else []) for rank in range(2)]
    found = bench.run(sets=4, clock=clocks.__getitem__, options=lambda group: SLOW).found
    assert found.stop == "iterations"
    assert clocks[0].refits == clocks[1].refits
    assert len(clocks[0].refits) == 2
    assert 0 < clocks[0].refits[0] < clocks[0].refits[1] < 40  # before the second and the fourth round


# -- when to stop ----------------------------------------------------------------------------------


def test_the_precision_that_is_claimed_is_that_of_the_result(bench: Bench) -> None:
    rule = StoppingRule(precision=0.3, limit_s=20.0, limit_name="max_time")
    slow = {"after": lambda place, index, out: time.sleep(5e-4)}
    found = bench.run(rule=rule, options=lambda group: slow).found
    assert found.stop == "precision"
    assert relative_half_width(found.summary) <= 0.3
    assert found.stamps.shape[1] >= MIN_ROUNDS


@pytest.mark.parametrize("streamed", [False, True])
def test_the_limit_ends_a_case_that_does_not_settle(bench: Bench, streamed: bool) -> None:
    rule = StoppingRule(precision=1e-9, limit_s=1.0, limit_name="budget")
    began = time.monotonic()
    found = bench.run(rule=rule, streamed=streamed).found
    assert found.stop == "budget"
    assert 1.0 <= time.monotonic() - began < 20
    assert found.summary.count >= 5


def test_no_time_left_still_gives_a_measurement(bench: Bench) -> None:
    slow = {"after": lambda place, index, out: time.sleep(0.03)}
    rule = StoppingRule(precision=0.02, limit_s=0.0, limit_name="budget")
    for streamed in (False, True):
        found = bench.run(rule=rule, streamed=streamed, options=lambda group: slow).found
        assert found.stop == "budget"
        assert found.summary.count >= 1
        assert found.verified >= 1


def head(rule: StoppingRule, sets: int = 10, clock: CommonClock | None = None) -> _Head:
    """Rank 0's side of an isolated case on two ranks, fed with stamps."""
    settings = Settings(streamed=False, rule=rule, deadline_s=30.0, spin=True, clock=clock or OneClock())
    return _Head(settings=settings, groups=((0, 1),), sets=sets, repeatable=True, estimate_s=1e-4, checkable=False)


def learn(one: _Head, times_us: list[float], skews_us: list[float], ahead_ns: int = 1000) -> None:
    """A round: rank 0 starts at 0 and rank 1 ``skew`` later, which both leave ``time`` after that."""
    pairs = list(zip(times_us, skews_us, strict=True))
    ends = [1000 * (time + skew) for time, skew in pairs]
    first = np.array([(0, end) for end in ends], dtype=np.int64)
    second = np.array([(1000 * skew, end) for (_, skew), end in zip(pairs, ends, strict=True)], dtype=np.int64)
    value = {"wrong": 0, "timed_s": 1e-3, "check_s": 0.0, "host_s": None, "ahead_ns": ahead_ns}
    one.learn(
        {"first": 0, "count": len(pairs), "sets": len(pairs), "check": []},
        [(value, first.tobytes()), (value, second.tobytes())],
    )


def batch(one: _Head, took_us: float) -> dict[str, Any]:
    """One batch of a streamed case, planned and gathered; returns its plan."""
    plan = one.plan()
    stamps = np.array([[0, took_us * 1000]], dtype=np.int64)
    value = {"wrong": 0, "timed_s": took_us * 1e-6, "check_s": 0.0, "host_s": None, "starved": None, "ahead_ns": 1000}
    one.learn(plan, [(value, stamps.tobytes())] * 2)
    return plan


def streamed_head(rule: StoppingRule, *, repeatable: bool = True) -> _Head:
    settings = Settings(streamed=True, rule=rule, deadline_s=1.0, clock=OneClock(), spin=False)
    return _Head(settings=settings, groups=((0, 1),), sets=10, repeatable=repeatable, estimate_s=1e-3, checkable=False)


def test_batches_that_turn_out_short_are_made_longer_before_any_counts() -> None:
    # 2 ms are wanted, and an operation was thought to take one. 2 take 0.1 ms: 40 should do; they take 1.7 ms, which will.
    one = streamed_head(StoppingRule(precision=0.02, limit_s=5.0, limit_name="max_time"))
    assert [batch(one, took_us)["count"] for took_us in (100, 1700, 1700)] == [2, 40, 40]
    found = one.result("max_time", None, 0.0)
    assert (found.batch, found.summary.count, found.summary.median) == (40, 2, pytest.approx(42.5e-6))
    # Once one counts, all have its size.
    assert [batch(one, 100)["count"], one.plan()["count"]] == [40, 40]


def test_batches_are_made_longer_no_further_than_sets_and_patience_go() -> None:
    rule = StoppingRule(precision=0.02, limit_s=5.0, limit_name="max_time")
    one = streamed_head(rule, repeatable=False)
    assert [batch(one, took_us)["count"] for took_us in (100, 300, 300)] == [2, 10, 10]
    assert one.result("max_time", None, 0.0).summary.count == 2
    # Each longer batch is quicker still: eight times it is believed.
    two = streamed_head(rule)
    counts = [batch(two, 1000)["count"] for _ in range(10)]
    assert counts == [2, 4, 8, 16, 32, 64, 128, 256, 512, 512]


def test_a_fixed_number_of_operations_keeps_its_batches() -> None:
    one = streamed_head(StoppingRule(precision=0.02, limit_s=5.0, limit_name="max_time", iterations=40))
    assert [batch(one, 10)["count"] for _ in range(3)] == [4, 4, 4]


def test_iterations_that_do_not_count_do_not_make_it_precise() -> None:
    one = head(StoppingRule(precision=0.02, limit_s=1e9, limit_name="budget"))
    for number in range(2 * MIN_ROUNDS):
        # Seven late starts of 145 us each, three good ones that drift: five of the ten count.
        learn(one, [100.0 + 10 * (number // 2)] * 3 + [145.0] * 7, [0.0] * 3 + [90.0] * 7)
        assert one.plan()["stop"] is None
    assert relative_half_width(one.result("budget", None, 1e-7).summary) > 0.02
    steady = head(StoppingRule(precision=0.02, limit_s=1e9, limit_name="budget"))
    for _ in range(MIN_ROUNDS):
        assert steady.plan()["stop"] is None
        learn(steady, [145.0] * 10, [0.0] * 10)
    assert steady.plan()["stop"] == "precision"


def test_what_the_clock_may_be_off_by_is_no_late_start() -> None:
    one = head(replace(RULE, iterations=1000), clock=FarClock(error=1.5e-6))
    learn(one, [10.0] * 4, [2.9, 3.1, 0.5, 2.0])  # a tenth of the time is 1 us, the clock of two ranks may be 3 us off
    found = one.result("budget", None, 1e-7)
    assert found.kept.tolist() == [True, False, True, True]
    assert not found.late_starts


def test_a_start_that_was_heard_of_too_late_is_set_further_ahead() -> None:
    one = head(RULE)
    leads = [one.plan()["lead_ns"]]
    for ahead_ns in [-5_000] * 10 + [5_000] * 80:
        learn(one, [100.0] * 4, [0.0] * 4, ahead_ns)
        leads.append(one.plan()["lead_ns"])
    assert leads[0] == 400_000  # 0.3 ms, and 50 us for each of two ranks that spin
    assert leads[:4] == [400_000, 800_000, 1_600_000, 3_200_000]
    assert max(leads) == leads[10] == 20_000_000
    assert leads[-1] == 400_000


def test_late_starts_make_room_until_it_does_not_help() -> None:
    one = head(RULE)
    room = [one.plan()["spacing_ns"]]
    for _ in range(20):
        learn(one, [100.0] * 4, [50.0] * 4)
        room.append(one.plan()["spacing_ns"])
    assert room[3] > room[2] > room[1] > room[0]
    assert room[-1] == room[-2] == pytest.approx(20 * 150e3 + 1e4, rel=1e-6)
    for _ in range(60):
        learn(one, [100.0] * 4, [0.0] * 4)
    assert one.plan()["spacing_ns"] == pytest.approx(1.5 * 100e3 + 1e4, rel=1e-6)


# -- wrong data ------------------------------------------------------------------------------------


def test_one_flipped_element_of_one_iteration_is_one_wrong_element(bench: Bench) -> None:
    def flip(place: int, index: int, out: np.ndarray) -> None:
        if place == 1 and len(bench.calls[1]) == 25:
            out[17] += 1

    found = bench.run(options=lambda group: {"after": flip}).found
    assert (found.wrong, found.stop) == (1, "wrong")
    assert 25 <= found.stamps.shape[1] <= 28  # the round of four in which it happened is the last


@pytest.mark.parametrize(("streamed", "checked"), [(False, 4), (True, 1)])
def test_a_library_that_does_nothing(bench: Bench, streamed: bool, checked: int) -> None:
    found = bench.run(streamed=streamed, options=lambda group: {"does": False}).found
    # Every element of every output that was checked, on both ranks.
    assert (found.stop, found.verified) == ("wrong", checked)
    assert found.wrong == 2 * ELEMENTS * checked


@pytest.mark.parametrize("streamed", [False, True])
def test_swapped_blocks(bench: Bench, streamed: bool) -> None:
    def swap(place: int, index: int, out: np.ndarray) -> None:
        if place == 0:
            out[: ELEMENTS // 2], out[ELEMENTS // 2 :] = out[ELEMENTS // 2 :].copy(), out[: ELEMENTS // 2].copy()

    found = bench.run("all_gather", streamed=streamed, options=lambda group: {"after": swap}).found
    assert found.stop == "wrong"
    assert found.wrong > 0.9 * ELEMENTS * found.verified


def test_yesterdays_output_does_not_pass_for_todays(bench: Bench) -> None:
    """Right in the first round, nothing after it: the buffers then still hold right answers of another iteration."""
    done = [0, 0]
    stale: list[bool] = []

    def forget(place: int, index: int, out: np.ndarray) -> None:
        kept = answers.setdefault((place, index), out.copy())
        done[place] += 1
        if done[place] > 100:
            out[:] = kept
            stale.append(True)

    answers: dict[tuple[int, int], np.ndarray] = {}
    found = bench.run(options=lambda group: {"after": forget}, rule=replace(RULE, iterations=3000)).found
    assert stale
    assert found.stop == "wrong"
    assert found.wrong > ELEMENTS


class SlowCheck(Pattern):
    """A check that takes far longer than the operation."""

    looked: list[int]

    def wrong(self, output: Any, iteration: int) -> int:
        time.sleep(5e-3)
        type(self).looked.append(iteration)
        return super().wrong(output, iteration)


def test_checks_are_sampled_where_they_cost_more_than_timing(bench: Bench) -> None:
    SlowCheck.looked = []
    found = bench.run(sets=8, pattern=SlowCheck, rule=replace(RULE, iterations=160)).found
    assert (found.stop, found.wrong) == ("iterations", 0)
    assert 1 <= found.verified < 160
    assert len(SlowCheck.looked) == 2 * found.verified
    assert len({iteration % 8 for iteration in SlowCheck.looked[16:]}) > 1  # no set is left out for ever


def test_a_flaw_is_found_though_checks_are_sampled(bench: Bench) -> None:
    SlowCheck.looked = []

    def err(place: int, index: int, out: np.ndarray) -> None:
        if index == 5:  # always in the same one of eight sets
            out[0] += 1

    found = bench.run(
        sets=8,
        streamed=True,
        pattern=SlowCheck,
        options=lambda group: {"after": err},
        rule=replace(RULE, iterations=800),
    ).found
    assert found.stop == "wrong"


# -- buffers ---------------------------------------------------------------------------------------


def test_an_operation_that_overwrites_its_input_uses_a_set_once_in_a_batch(bench: Bench) -> None:
    seen = bench.run(
        sets=4, streamed=True, options=lambda group: {"in_place": True}, rule=replace(RULE, iterations=120)
    )
    # A tenth of 120 would be 12 a batch: there are four sets.
    assert (seen.found.batch, seen.found.wrong) == (4, 0)
    batches: dict[int, list[int]] = defaultdict(list)
    for first, index in seen.calls[0]:
        batches[first].append(index)
    assert len(batches) == 30
    assert all(sorted(used) == [0, 1, 2, 3] for used in batches.values())


def test_in_place_isolated_iterations_have_fresh_inputs(bench: Bench) -> None:
    found = bench.run(sets=3, options=lambda group: {"in_place": True, **SLOW}).found
    assert (found.stop, found.wrong, found.verified) == ("iterations", 0, 40)


class CountedFill(SlowCheck):
    fills: list[int]

    def fill(self, out: Any, iteration: int) -> None:
        type(self).fills.append(iteration)
        super().fill(out, iteration)


@pytest.mark.parametrize("in_place", [False, True])
def test_inputs_that_were_overwritten_are_filled_again_though_not_checked(bench: Bench, in_place: bool) -> None:
    CountedFill.looked, CountedFill.fills = [], []
    found = bench.run(
        sets=8, pattern=CountedFill, options=lambda group: {"in_place": in_place}, rule=replace(RULE, iterations=80)
    ).found
    assert found.verified < 80
    fills = len(CountedFill.fills) - 2 * 8  # the warm-up's
    assert fills == 2 * 80 if in_place else 2 * found.verified <= fills < 2 * 80


def test_a_set_is_used_once_in_a_round(bench: Bench) -> None:
    seen = bench.run(sets=4)
    firsts = [first for first, _ in seen.calls[0]]
    assert len(set(firsts)) == len(firsts) == 40  # the heartbeat names every iteration


# -- groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_groups_run_at_once_and_the_slowest_is_reported(bench: Bench, streamed: bool) -> None:
    def options(group: int) -> dict[str, Any]:
        return {"after": lambda place, index, out: time.sleep(4e-3 if group == 1 else 1e-3)}

    found = bench.run(world=4, groups=((0, 1), (3, 2)), options=options, streamed=streamed).found
    assert found.wrong == 0
    starts, ends = found.stamps[:, :, 0], found.stamps[:, :, 1]
    times = [
        (ends[ranks] - starts[ranks]).max(axis=0) if streamed else ends[ranks].max(axis=0) - starts[ranks].max(axis=0)
        for ranks in ([0, 1], [2, 3])
    ]
    np.testing.assert_allclose(found.iterations.time, np.maximum(*times) / 1e9)
    assert found.iterations.group.tolist() == (times[1] > times[0]).astype(int).tolist()
    assert found.iterations.group.mean() > 0.5
    assert found.summary.median >= 4e-3
    for group, rank in zip(found.iterations.group, found.iterations.last_rank, strict=True):
        assert rank in ((0, 1), (2, 3))[group]
    assert (found.stamps[:, :, 1] > 0).all()
    # At once: the groups' windows overlap.
    assert (found.stamps[0, :, 1] > found.stamps[3, :, 0]).mean() > 0.5


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_ranks_outside_all_groups_keep_step(bench: Bench, streamed: bool, barrier: bool) -> None:
    """Rank 0 decides for a group that it is not in: the data are checked all the same."""
    seen = bench.run(
        "all_gather", world=4, groups=((1, 3),), streamed=streamed, barrier=barrier,
        clock=None if barrier else lambda rank: OneClock(), options=lambda group: SLOW,
    )  # fmt: skip
    found = seen.found
    assert found.stop == "iterations"
    assert [seen.inside(rank) for rank in range(4)] == [0, 40, 0, 40]
    assert found.wrong == 0
    assert found.verified == 40 if not streamed else found.verified >= 1
    assert set(found.iterations.last_rank.tolist()) <= {1, 3}
    assert not found.stamps[[0, 2]].any()
    wrong = bench.run("all_gather", world=3, groups=((1, 2),), options=lambda group: {"does": False}).found
    assert wrong.stop == "wrong"


# -- what hosts send -------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_what_all_hosts_sent_for_an_operation(bench: Bench, streamed: bool) -> None:
    """Ranks 0 and 1 stand for their hosts; an operation of theirs sends 100 and 30 bytes."""
    seen = bench.run(
        world=3, streamed=streamed, rule=RULE,
        counters={rank: lambda rank=rank, each=each: each * len(bench.calls[rank]) for rank, each in ((0, 100), (1, 30))},
    )  # fmt: skip
    assert seen.found is not None
    assert seen.found.wire_bytes == 130.0


def test_nobody_counts(bench: Bench) -> None:
    for counters in (None, {}):
        seen = bench.run(rule=RULE, counters=counters)
        assert seen.found is not None
        assert seen.found.wire_bytes is None
