"""Routings do what their names promise: counts by loops, exponents by a fit, and no token with one expert twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commbench.moe.routing import HOT_SHARE, Router, canonical, parse_routing, why_not
from commbench.workloads import Workload

SMALL = Workload(tokens=64, hidden=128, experts=32, topk=4)


def workload(**changes: Any) -> Workload:
    return Workload(**{**SMALL.to_dict(), **changes})


def drawn(
    one: Workload, ranks: int, hosts: tuple[int, ...] | None = None, rounds: int = 1, seed: int = 3
) -> np.ndarray:
    """[rounds, ranks, T, K] ids; all ranks have as many tokens."""
    router = Router(one, ranks, hosts or (0,) * ranks, seed)
    return np.stack([np.stack([router.selections(r, i)[0] for r in range(ranks)]) for i in range(rounds)])


def no_token_has_an_expert_twice(ids: np.ndarray) -> bool:
    return all(
        max(Counter(e for e in row if e >= 0).values(), default=1) == 1 for row in ids.reshape(-1, ids.shape[-1])
    )


@pytest.mark.parametrize(
    ("text", "canonical_text"),
    [
        ("uniform", "uniform"), (" ramp ", "ramp"), ("zipf:1.20", "zipf:1.2"), ("zipf:0", "zipf:0"),
        ("hotspot:04", "hotspot:4"), ("imbalance:2.0", "imbalance:2"), ("local:.8", "local:0.8"),
        ("group_limited:4", "group_limited:4"), ("group_limited:4/8", "group_limited:4/8"),
        ("file:a:b/c.npz", "file:a:b/c.npz"),
    ],
)  # fmt: skip
def test_routings_are_written_in_one_way(text: str, canonical_text: str) -> None:
    assert parse_routing(text).text == canonical_text
    assert parse_routing(canonical_text) == parse_routing(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("unifrom", "did you mean 'uniform'"), ("uniform:2", "nothing to say after the colon"), ("zipf", "zipf:1.2"),
        ("zipf:-1", "exponent from 0 to 10"), ("zipf:nan", "exponent"), ("zipf:1e400", "exponent"),
        ("hotspot:0", "how many experts"),
        ("hotspot:1.5", "how many experts"), ("imbalance:0.9", "1 at least"), ("imbalance:", "over the mean"),
        ("local:1.1", "from 0 to 1"), ("group_limited:5/4", "how many groups"), ("group_limited:x", "how many groups"),
        ("file:", "a path"), ("", "unknown routing"), ("hotspot:3/4", "how many experts"),
    ],
)  # fmt: skip
def test_what_is_no_routing_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse_routing(text)
    assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_a_routing_or_one_line(text: str) -> None:
    try:
        found = parse_routing(text)
    except ValueError as error:
        assert str(error)
    else:
        assert parse_routing(found.text) == found


ROUTINGS = st.one_of(
    st.just("uniform"), st.just("ramp"),
    st.floats(0, 4).map(lambda x: f"zipf:{x:.3f}"), st.integers(1, 20).map(lambda x: f"hotspot:{x}"),
    st.floats(1, 6).map(lambda x: f"imbalance:{x:.3f}"), st.floats(0, 1).map(lambda x: f"local:{x:.3f}"),
    st.integers(1, 4).map(lambda x: f"group_limited:{x}"), st.integers(1, 4).map(lambda x: f"group_limited:{x}/4"),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    routing=ROUTINGS, ranks=st.integers(2, 9), tokens=st.integers(1, 70), experts=st.integers(1, 40),
    topk=st.integers(1, 9), masked=st.sampled_from([0.0, 0.0, 0.1, 0.9]), uneven=st.booleans(),
    on=st.sampled_from(["contiguous", "round_robin", "eplb", "eplb:3"]), seed=st.integers(0, 5),
)  # fmt: skip
def test_every_routing_is_valid_or_refused_in_one_line(
    routing: str, ranks: int, tokens: int, experts: int, topk: int, masked: float, uneven: bool, on: str, seed: int
) -> None:
    one = workload(
        tokens=tokens, experts=experts, topk=topk, routing=routing, masked=masked, uneven_tokens=uneven,
        uneven_experts=True, experts_on=on,
    )  # fmt: skip
    host_of = [rank * 3 // ranks for rank in range(ranks)]
    reason = why_not(one, ranks, host_of)
    if reason is not None:
        assert "\n" not in reason
        assume(False)
    router, twin = Router(one, ranks, host_of, seed), Router(one, ranks, host_of, seed)
    valid = 0
    for rank in range(ranks):
        ids, weights = router.selections(rank, 4)
        assert ids.shape == weights.shape == (max(1, tokens - rank) if uneven else tokens, topk)
        assert ids.dtype == np.int64
        assert weights.dtype == np.float32
        assert ids.min() >= -1
        assert ids.max() < experts
        assert no_token_has_an_expert_twice(ids)
        assert (weights[ids < 0] == 0).all()
        assert (weights[ids >= 0] > 0).all()
        some = (ids >= 0).any(axis=1)
        np.testing.assert_allclose(weights.sum(axis=1)[some], 1, rtol=1e-5)
        valid += int((ids >= 0).sum())
        # Any rank can work out any other's, and not in order.
        assert (twin.selections(ranks - 1 - rank, 4)[0] == router.selections(ranks - 1 - rank, 4)[0]).all()
    everything = sum(router.tokens(rank) for rank in range(ranks)) * topk
    assert abs(valid - (1 - masked) * everything) <= ranks + 1
    assert router.expected_load().sum() == pytest.approx((1 - masked) * everything, abs=1)


def test_iterations_ranks_and_seeds_differ_and_a_fixed_routing_does_not() -> None:
    ids = drawn(SMALL, 2, rounds=2)
    assert (ids[0] != ids[1]).any()
    assert (ids[0, 0] != ids[0, 1]).any()
    assert (drawn(SMALL, 2, seed=4)[0] != ids[0]).any()
    fixed = drawn(workload(fixed=True), 2, rounds=3)
    assert (fixed[0] == fixed[1]).all()
    assert (fixed[0] == fixed[2]).all()


def test_uniform_takes_every_set_of_experts_equally_often() -> None:
    ids = drawn(workload(tokens=6000, experts=6, topk=3), 2)
    sets = Counter(tuple(sorted(row)) for row in ids.reshape(-1, 3).tolist())
    assert len(sets) == 20  # 6 over 3
    expected = 12000 / 20
    assert max(abs(count - expected) for count in sets.values()) < 5 * expected**0.5


def test_group_limited_is_the_top_k_of_random_scores_within_the_best_groups() -> None:
    """Against scores drawn and sorted one token after the other: how often two experts of one group go together."""
    one = workload(tokens=20000, experts=12, topk=3, routing="group_limited:2")
    ids = drawn(one, 4, hosts=(0, 0, 1, 2)).reshape(-1, 3)
    # Ranks have three experts each, hosts six, three and three.
    group = [0] * 6 + [1] * 3 + [2] * 3
    rng = np.random.default_rng(0)
    reference: Counter[tuple[int, ...]] = Counter()
    for _ in range(20000):
        scores = rng.random(12)
        best = sorted(range(3), key=lambda g: -max(scores[e] for e in range(12) if group[e] == g))[:2]
        chosen = sorted((e for e in range(12) if group[e] in best), key=lambda e: -scores[e])[:3]
        reference[tuple(sorted(group[e] for e in chosen))] += 1
    found = Counter(tuple(sorted(group[e] for e in row)) for row in ids.tolist())
    assert set(found) == set(reference)
    assert all(len(set(pattern)) <= 2 for pattern in found)
    for pattern, count in reference.items():
        assert found[pattern] / 80000 == pytest.approx(count / 20000, abs=0.015)


def test_group_limited_of_neighbouring_ids_ignores_hosts() -> None:
    ids = drawn(workload(experts=64, topk=4, routing="group_limited:2/8"), 4, hosts=(0, 1, 2, 3))
    groups = [len({e // 8 for e in row}) for row in ids.reshape(-1, 4).tolist()]
    assert max(groups) == 2


def counts_of(ids: np.ndarray, experts: int) -> np.ndarray:
    counts = np.zeros(experts, dtype=np.int64)
    for expert in ids.ravel().tolist():
        if expert >= 0:
            counts[expert] += 1
    return counts


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.2])
def test_zipf_follows_its_exponent(exponent: float) -> None:
    tokens, ranks = 8000, 4
    counts = counts_of(drawn(workload(tokens=tokens, experts=64, topk=2, routing=f"zipf:{exponent}"), ranks), 64)
    ordered = np.sort(counts)[::-1]
    assert ordered.max() <= tokens * ranks
    uncapped = ordered < 0.999 * tokens * ranks
    places = np.arange(1, 65)[uncapped]
    slope = np.polyfit(np.log(places), np.log(ordered[uncapped]), 1, w=np.sqrt(ordered[uncapped]))[0]
    assert slope == pytest.approx(-exponent, abs=0.03)


def test_a_large_exponent_fills_the_heaviest_experts_and_shares_out_the_rest() -> None:
    counts = np.sort(counts_of(drawn(workload(tokens=2000, experts=16, topk=4, routing="zipf:3"), 2), 16))[::-1]
    assert counts[:2].tolist() == [4000, 4000]
    # Of 4 selections 2 are certain, and 2 are shared as 3^-3 : 4^-3 : ..., of which the largest stays below one.
    weights = [place**-3.0 for place in range(3, 17)]
    for place, weight in enumerate(weights[:4]):
        share = 2 * weight / sum(weights)
        assert share < 1
        assert counts[2 + place] / 4000 == pytest.approx(share, abs=0.03)


def test_zipf_has_the_same_heavy_experts_for_every_seed_and_not_in_the_order_of_ids() -> None:
    one = workload(tokens=4000, experts=64, topk=2, routing="zipf:1.2")
    first, second = counts_of(drawn(one, 2, seed=1), 64), counts_of(drawn(one, 2, seed=2), 64)
    heavy = np.argsort(-first)[:5].tolist()
    assert heavy == np.argsort(-second)[:5].tolist()
    assert heavy != sorted(heavy)


def test_ramp_grows_with_the_id() -> None:
    counts = counts_of(drawn(workload(tokens=20000, experts=16, topk=2, routing="ramp"), 4), 16)
    expected = 160000 * (np.arange(16) + 0.5) / sum(e + 0.5 for e in range(16))
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    assert counts[15] / counts.mean() == pytest.approx(2 * 15.5 / 16, rel=0.02)


@pytest.mark.parametrize(("hot", "share"), [(1, 1 / 4), (4, HOT_SHARE), (8, HOT_SHARE)])
def test_hotspots_get_most_selections(hot: int, share: float) -> None:
    # One expert cannot be more than one of a token's four.
    counts = counts_of(drawn(workload(tokens=10000, routing=f"hotspot:{hot}"), 2), 32)
    assert counts[:hot].sum() / counts.sum() == pytest.approx(share, abs=0.01)
    assert counts[hot:].min() > 0


def test_local_keeps_its_share() -> None:
    one = workload(tokens=5000, experts=32, topk=4, routing="local:0.8")
    for on in ("contiguous", "round_robin"):
        ids = drawn(workload(**{**one.to_dict(), "experts_on": on}), 4)[0]
        for rank in range(4):
            own = [e for e in range(32) if (e // 8 if on == "contiguous" else e % 4) == rank]
            mine = sum(e in own for e in ids[rank].ravel().tolist())
            assert mine / 20000 == pytest.approx(0.8, abs=0.01)
        # Another number of local experts each time, not 3 and then 4 of 4 for all.
        assert {sum(e // 8 == 0 for e in row) for row in drawn(one, 4)[0, 0].tolist()} >= {2, 3, 4}


def loads(one: Workload, ranks: int, rank_of: list[int]) -> list[int]:
    found = [0] * ranks
    router = Router(one, ranks, (0,) * ranks, 9)
    for rank in range(ranks):
        for row in router.selections(rank, 0)[0].tolist():
            for expert in row:
                if expert >= 0:
                    found[rank_of[expert]] += 1
    return found


@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0, 3.5])
@pytest.mark.parametrize("masked", [0.0, 0.2])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("on", ["contiguous", "round_robin"])
def test_imbalance_is_what_was_asked_for(factor: float, masked: float, uneven: bool, on: str) -> None:
    one = workload(
        tokens=200,
        experts=64,
        topk=6,
        routing=f"imbalance:{factor}",
        masked=masked,
        uneven_tokens=uneven,
        experts_on=on,
    )
    found = loads(one, 8, [e // 8 if on == "contiguous" else e % 8 for e in range(64)])
    mean = sum(found) / 8
    assert max(found) / mean == pytest.approx(factor, rel=0.01)
    assert found[0] == pytest.approx(factor * mean, rel=0.01)
    assert max(found[1:]) - min(found[1:]) <= 1


def test_imbalance_is_exact_with_one_token_a_rank() -> None:
    one = workload(tokens=1, experts=256, topk=8, routing="imbalance:2")
    found = loads(one, 64, [e // 4 for e in range(256)])
    assert found[0] == 16  # 64 ranks' 8 selections over 64 ranks are 8, twice that
    assert sum(found) == 512
    assert max(found[1:]) == 8


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.integers(2, 12), per_rank=st.integers(1, 6), tokens=st.integers(1, 40), topk=st.integers(1, 8),
    share=st.floats(0, 1), turn=st.integers(0, 3),
)  # fmt: skip
def test_imbalance_is_exact_up_to_what_can_be(
    ranks: int, per_rank: int, tokens: int, topk: int, share: float, turn: int
) -> None:
    experts = ranks * per_rank
    assume(topk <= experts)
    highest = min(per_rank, topk) * ranks / topk
    factor = round(1 + share * (highest - 1), 6)
    assume(1 <= factor <= highest)
    one = workload(tokens=tokens, experts=experts, topk=topk, routing=f"imbalance:{factor}")
    router = Router(one, ranks, (0,) * ranks, 5)
    found = [0] * ranks
    for rank in range(ranks):
        ids = router.selections(rank, turn)[0]
        assert no_token_has_an_expert_twice(ids)
        for expert in ids.ravel().tolist():
            found[expert // per_rank] += 1
    mean = tokens * topk
    assert sum(found) == mean * ranks
    assert abs(found[0] - factor * mean) <= 1
    assert max(found[1:]) <= max(found[0], -(-mean // 1))


def test_imbalance_spreads_tokens_over_ranks_as_chance_does() -> None:
    """Its tokens reach as many different ranks as uniform ones: a balanced routing must not be one without duplicates."""
    distinct = {}
    for routing in ("uniform", "imbalance:1"):
        ids = drawn(workload(tokens=1000, experts=64, topk=8, routing=routing), 8, rounds=2)
        distinct[routing] = np.mean([len({e // 8 for e in row}) for row in ids.reshape(-1, 8).tolist()])
    assert distinct["imbalance:1"] == pytest.approx(distinct["uniform"], rel=0.03)


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({"topk": 33}, 4, "topk 33 is more than 32 experts"),
        ({"routing": "imbalance:5"}, 4, "at most 4 times"),
        ({"routing": "imbalance:2.1", "experts": 8}, 4, "at most 2 times"),
        ({"routing": "imbalance:1", "experts": 5, "topk": 4, "uneven_experts": True}, 3, "at least 1.125 times"),
        ({"routing": "imbalance:1", "experts": 5, "topk": 5, "uneven_experts": True}, 2, "at least 1.2 times"),
        ({"routing": "imbalance:3", "masked": 0.5, "experts": 8, "topk": 8}, 4, "at most 2 times"),
        ({"routing": "local:0.9", "experts": 8}, 4, "use from 0 to 0.5"),
        ({"routing": "local:0", "experts": 8, "topk": 7}, 4, "use from 0.1429 to 0.2857"),
        ({"routing": "local:0.5", "experts_on": "eplb"}, 4, "exclude each other"),
        ({"routing": "hotspot:26"}, 4, "is no hotspot"),
        ({"routing": "hotspot:32"}, 4, "is no hotspot"),
        ({"routing": "hotspot:1", "experts": 4, "topk": 4}, 4, "is no hotspot"),
        ({"routing": "group_limited:1/16"}, 4, "leaves a token 2 experts to choose 4 from"),
        ({"experts": 30}, 4, "30 experts do not divide over 4 ranks"),
        ({"experts": 3, "uneven_experts": True, "topk": 1}, 4, "leave some of 4 ranks without one"),
        ({"experts_on": "nowhere"}, 4, "unknown placement of experts"),
        ({"tokens": 0}, 4, "tokens 0 is below one"),
        ({"masked": 1.0}, 4, "masked share"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(changes: dict[str, Any], ranks: int, says: str) -> None:
    reason = why_not(workload(**changes), ranks, (0,) * ranks)
    assert reason is not None
    assert says in reason
    assert "\n" not in reason


def test_the_highest_imbalance_that_is_named_can_be_had() -> None:
    assert why_not(workload(routing="imbalance:2", experts=8), 4, (0,) * 4) is None
    assert why_not(workload(routing="imbalance:4"), 4, (0,) * 4) is None


def test_expected_load_is_what_comes() -> None:
    for routing in ("uniform", "zipf:1.1", "hotspot:3", "ramp", "imbalance:1.5", "local:0.6", "group_limited:2"):
        one = workload(tokens=3000, routing=routing, masked=0.1, uneven_tokens=True)
        router = Router(one, 4, (0, 0, 1, 1), 2)
        counts = sum(counts_of(router.selections(rank, 0)[0], 32) for rank in range(4))
        expected = router.expected_load()
        assert np.abs(counts - expected).max() < 6 * np.sqrt(expected.max()), routing


def test_canonical_texts_of_a_workload() -> None:
    assert canonical(workload(routing="zipf:1.20", experts_on="eplb:0")) == ("zipf:1.2", "eplb")
