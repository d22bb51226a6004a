"""Draws of different experts: exact counts, exact chances, and whole numbers that add up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.moe import draws
from commbench.moe.imbalance import level


def all_different(chosen: np.ndarray) -> bool:
    return all(len(set(row)) == len(row) for row in chosen.tolist())


@st.composite
def counted(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Tokens, k, and how many tokens each expert gets: none more than all, together k of each token."""
    tokens, topk = draw(st.integers(1, 30)), draw(st.integers(1, 6))
    left, counts = tokens * topk, []
    while left:
        counts.append(min(draw(st.integers(1, tokens)), left))
        left -= counts[-1]
    return tokens, topk, counts


@settings(max_examples=200, deadline=None)
@given(case=counted(), seed=st.integers(0, 9))
def test_by_counts_gives_every_expert_its_number_of_different_tokens(
    case: tuple[int, int, list[int]], seed: int
) -> None:
    tokens, topk, counts = case
    chosen = draws.by_counts(np.random.default_rng(seed), tokens, topk, np.array(counts, dtype=np.int64))
    assert chosen.shape == (tokens, topk)
    assert all_different(chosen)
    assert [Counter(chosen.ravel().tolist())[expert] for expert in range(len(counts))] == counts


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=12), topk=st.integers(1, 5), seed=st.integers(0, 9),
    shares=st.lists(st.floats(0, 1), min_size=5, max_size=30),
)  # fmt: skip
def test_spread_gives_ranks_their_tokens_and_experts_their_totals(
    rows: list[int], topk: int, seed: int, shares: list[float]
) -> None:
    everyone = sum(rows)
    # Totals of any shape that tokens of different experts can have: ragged rooms, filled evenly.
    room = np.array([everyone if at < topk else int(share * everyone) for at, share in enumerate(shares)])
    totals = level(everyone * topk, room)
    found = draws.spread(np.random.default_rng(seed), totals, np.array(rows, dtype=np.int64), topk)
    assert (found.sum(axis=0) == totals).all()
    assert (found.sum(axis=1) == np.array(rows) * topk).all()
    assert (found >= 0).all()
    assert (found <= np.array(rows)[:, None]).all()


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 200), room=st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_level_is_as_equal_as_can_be(total: int, room: list[int]) -> None:
    total = min(total, sum(room))
    found = level(total, np.array(room)).tolist()
    naive = [0] * len(room)
    for _ in range(total):  # one after the other, to whoever has least
        naive[min((at for at in range(len(room)) if naive[at] < room[at]), key=lambda at: (naive[at], at))] += 1
    assert sorted(found) == sorted(naive)
    assert all(a <= b for a, b in zip(found, room, strict=True))


@pytest.mark.parametrize("topk", [1, 3, 6])
def test_by_chances_keeps_to_the_chances(topk: int) -> None:
    chances = draws.shares(np.array([9.0, 5.0, 5.0, 3.0, 2.0, 1.0, 1.0]), topk)
    assert chances.sum() == pytest.approx(topk)
    chosen = draws.by_chances(np.random.default_rng(1), 40000, topk, chances)
    assert all_different(chosen)
    counts = Counter(chosen.ravel().tolist())
    for expert, chance in enumerate(chances.tolist()):
        spread = (40000 * chance * (1 - chance)) ** 0.5
        assert abs(counts[expert] - 40000 * chance) <= 5 * spread + 1e-6


@pytest.mark.parametrize(("experts", "within"), [(8, 1.5), (40, 4)])
def test_by_chances_chooses_any_two_together(experts: int, within: float) -> None:
    """Systematic sampling over one fixed order would never choose neighbours."""
    chosen = draws.by_chances(np.random.default_rng(1), 200000, 2, np.full(experts, 2 / experts))
    pairs = Counter(tuple(sorted(row)) for row in chosen.tolist())
    assert len(pairs) == experts * (experts - 1) // 2
    assert max(pairs.values()) < within * min(pairs.values())


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), data=st.data())
def test_shares_are_proportional_or_certain(weights: list[float], data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, len(weights)))
    found = draws.shares(np.array(weights), topk)
    assert found.sum() == pytest.approx(topk)
    assert found.max() <= 1
    free = [(share / weight) for share, weight in zip(found.tolist(), weights, strict=True) if share < 1 - 1e-9]
    assert max(free, default=1) == pytest.approx(min(free, default=1))
    certain = [weight for share, weight in zip(found.tolist(), weights, strict=True) if share >= 1 - 1e-9]
    uncertain = [weight for share, weight in zip(found.tolist(), weights, strict=True) if share < 1 - 1e-9]
    assert min(certain, default=float("inf")) >= max(uncertain, default=0)


def test_subsets_of_everything_is_everything() -> None:
    chosen = draws.subsets(np.random.default_rng(0), 50, 7, 7)
    assert (np.sort(chosen, axis=1) == np.arange(7)).all()
