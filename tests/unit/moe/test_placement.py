"""Who holds which expert, and which copy a token takes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.moe.placement import canonical_placement, choose_slots, homes, parse_placement, place
from commbench.workloads import Workload

SMALL = Workload(tokens=16, hidden=128, experts=8, topk=2)


def workload(**changes: Any) -> Workload:
    return Workload(**{**SMALL.to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("contiguous", ("contiguous", 0)), ("round_robin", ("round_robin", 0)), ("eplb", ("eplb", 0)),
        ("eplb:32", ("eplb", 32)),
    ],
)  # fmt: skip
def test_placements_are_parsed(text: str, found: tuple[str, int]) -> None:
    assert parse_placement(text) == found
    assert canonical_placement(text) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [("eplb:x", "write for example eplb:32"), ("eplb:", "eplb:32"), ("contigous", "did you mean 'contiguous'")],
)
def test_what_is_no_placement_is_said(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_placement(text)


def test_contiguous_and_round_robin_by_hand() -> None:
    found = place(SMALL, 4, (0, 0, 1, 1), None)
    assert found.rank_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert found.expert_of == (0, 1, 2, 3, 4, 5, 6, 7)
    assert found.copies == tuple((slot,) for slot in range(8))
    assert found.host_of == (0, 0, 1, 1)
    turned = place(workload(experts_on="round_robin"), 4, (0, 0, 1, 1), None)
    assert turned.expert_of == (0, 4, 1, 5, 2, 6, 3, 7)
    assert turned.copies == ((0,), (2,), (4,), (6,), (1,), (3,), (5,), (7,))


def test_experts_that_do_not_divide_are_refused_or_uneven() -> None:
    with pytest.raises(ValueError, match="10 experts do not divide over 4 ranks.*eplb:2"):
        place(workload(experts=10), 4, (0,) * 4, None)
    with pytest.raises(ValueError, match="10 experts and 3 redundant do not divide over 4 ranks.*eplb:6"):
        place(workload(experts=10, experts_on="eplb:3"), 4, (0,) * 4, None)
    uneven = place(workload(experts=10, uneven_experts=True), 4, (0,) * 4, None)
    assert [len(uneven.slots_of(rank)) for rank in range(4)] == [3, 3, 2, 2]
    filled = place(workload(experts=10, experts_on="eplb:2"), 4, (0,) * 4, None)
    assert filled.rank_of == (0,) * 3 + (1,) * 3 + (2,) * 3 + (3,) * 3
    with pytest.raises(ValueError, match="25 redundant experts are more than 8 experts can have on 4 ranks: .* 24"):
        place(workload(experts_on="eplb:25", uneven_experts=True), 4, (0,) * 4, None)


def test_homes_are_where_experts_are_without_balancing() -> None:
    assert homes(SMALL, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert homes(workload(experts_on="round_robin"), 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert homes(workload(experts_on="eplb:4"), 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert homes(workload(experts=6, experts_on="eplb:2"), 4).tolist() == [0, 0, 1, 1, 2, 3]


def rank_loads(found: Any, load: list[float]) -> list[float]:
    totals = [0.0] * len(found.host_of)
    for slot, expert in enumerate(found.expert_of):
        totals[found.rank_of[slot]] += load[expert] / len(found.copies[expert])
    return totals


def test_eplb_by_hand() -> None:
    """One expert of 12 and seven of 1 to 4, two of each: the heaviest is halved, then halves go to different ranks."""
    load = [12.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    found = place(workload(experts=7, experts_on="eplb:1"), 2, (0, 0), np.array(load))
    # Per copy: 6 6 | 3 3 | 2 2 | 1 1; each rank gets one of every pair.
    assert rank_loads(found, load) == [12.0, 12.0]
    assert {found.rank_of[slot] for slot in found.copies[0]} == {0, 1}
    assert all(len(copies) == 1 for copies in found.copies[1:])


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.integers(1, 7), per_rank=st.integers(1, 5), data=st.data(),
    load=st.lists(st.floats(0, 100), min_size=41, max_size=41), uneven=st.booleans(),
)  # fmt: skip
def test_eplb_fills_ranks_evenly_with_different_experts(
    ranks: int, per_rank: int, data: st.DataObject, load: list[float], uneven: bool
) -> None:
    slots = ranks * per_rank + (data.draw(st.integers(0, ranks - 1)) if uneven else 0)
    experts = data.draw(st.integers(-(-slots // ranks), slots))
    one = workload(experts=experts, topk=1, experts_on=f"eplb:{slots - experts}", uneven_experts=uneven)
    found = place(one, ranks, (0,) * ranks, np.array(load[:experts]))
    assert sorted(found.rank_of) == list(found.rank_of)
    sizes = [len(found.slots_of(rank)) for rank in range(ranks)]
    assert sum(sizes) == slots
    assert max(sizes) - min(sizes) <= 1
    for rank in range(ranks):
        held = [found.expert_of[slot] for slot in found.slots_of(rank)]
        assert len(set(held)) == len(held)
    for expert, copies in enumerate(found.copies):
        assert copies
        assert [found.expert_of[slot] for slot in copies] == [expert] * len(copies)
    assert sum(len(copies) for copies in found.copies) == slots


@settings(max_examples=40, deadline=None)
@given(load=st.lists(st.floats(0.1, 10), min_size=6, max_size=6))
def test_eplb_is_near_the_best_of_all_placements(load: list[float]) -> None:
    """Six experts on two ranks, against all ten ways to halve them: greedy is within 7/6 (Graham's bound for two)."""
    found = place(workload(experts=6, topk=1, experts_on="eplb"), 2, (0, 0), np.array(load))
    total = sum(load)
    best = min(max(sum(half), total - sum(half)) for half in itertools.combinations(load, 3))
    # Room for three on each rank can make greedy worse than without, but not than what is left when one rank is full.
    assert max(rank_loads(found, load)) <= best * 7 / 6 + max(load) / 2


def test_eplb_mends_a_hot_expert() -> None:
    load = np.ones(64)
    load[:4] = 40.0
    before = place(workload(experts=64, topk=1), 8, (0,) * 8, None)
    after = place(workload(experts=64, topk=1, experts_on="eplb:16"), 8, (0,) * 8, load)
    # 220 in all, 27.5 a rank on average; 40 + 40 + 40 + 40 + 4 are on the first.
    assert max(rank_loads(before, load.tolist())) == 164.0
    # Each of the four in five copies of 8: four ranks get three of them and seven others, four two and eight others.
    assert sorted(rank_loads(after, load.tolist())) == pytest.approx([24.0] * 4 + [31.0] * 4)


def test_a_token_takes_the_copy_on_its_rank_then_on_its_host_then_takes_turns() -> None:
    found = place(workload(experts=4, experts_on="eplb:4"), 4, (0, 0, 1, 1), np.array([9.0, 9.0, 1.0, 1.0]))
    ids = np.array([[0, 1], [0, 2], [3, -1], [1, 0]])
    for rank in range(4):
        chosen = choose_slots(found, ids, rank)
        for (token, k), expert in np.ndenumerate(ids):
            slot = int(chosen[token, k])
            if expert < 0:
                assert slot == -1
                continue
            assert found.expert_of[slot] == expert
            owners = [found.rank_of[copy] for copy in found.copies[expert]]
            if rank in owners:
                assert found.rank_of[slot] == rank
            elif any(found.host_of[owner] == found.host_of[rank] for owner in owners):
                assert found.host_of[found.rank_of[slot]] == found.host_of[rank]


def test_copies_elsewhere_take_turns_over_tokens_and_over_ranks_of_one_token() -> None:
    # Ranks 2 to 7, each a host of its own, have none of expert 0's two copies.
    found = place(workload(experts=7, experts_on="eplb:1"), 8, tuple(range(8)), np.array([50.0] + [1.0] * 6))
    owners = {found.rank_of[slot] for slot in found.copies[0]}
    others = [rank for rank in range(8) if rank not in owners]
    for rank in others:
        chosen = choose_slots(found, np.zeros((10, 1), dtype=np.int64), rank)
        assert sorted(np.bincount(chosen.ravel())[list(found.copies[0])].tolist()) == [5, 5]
    first = [int(choose_slots(found, np.zeros((1, 1), dtype=np.int64), rank)[0, 0]) for rank in others]
    assert {first.count(slot) for slot in found.copies[0]} == {3}
