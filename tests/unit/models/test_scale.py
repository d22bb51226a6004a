"""Closed forms of worlds of any size: against the textbooks, the simulation, and what is worked out by hand."""

from __future__ import annotations

import itertools
import statistics
import time
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.collectives import COLLECTIVES
from commbench.models import Link, Links, bound, closed_form, predict, price
from commbench.models.hardware import load_hardware
from commbench.models.hardware_links import hardware_links
from commbench.models.prediction import predict_algorithm, predict_even
from commbench.models.rounds import World
from commbench.models.scale import best_pieces, multi_rail_ring_s, time_at_scale, times_at_scale
from commbench.models.scale_bounds import bound_of_kinds, bound_of_world, kinds_of_hosts
from commbench.models.tree_paths import binomial_paths, double_tree_edges
from commbench.schedules import ALGORITHMS, HIERARCHICAL, PIPELINED, build, buildable
from commbench.schedules.trees import _two_trees

ALPHA, BETA, GAMMA = 1e-5, 1e-9, 3e-10
ALIKE = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA), reduce_seconds_per_byte=GAMMA)
PAIRS = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]
FLAT = [pair for pair in PAIRS if pair not in HIERARCHICAL]
TREES = [pair for pair in FLAT if pair[1] == "double_binary_tree"]


def table(latency: float, per_byte: float) -> tuple[tuple[float, float], ...]:
    """Messages of up to 64 KiB take half as long again a byte."""
    sizes = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
    return tuple((size, latency + size * per_byte * (1.5 if size <= 64 << 10 else 1.0)) for size in sizes)


TWO_CLASSES = Links(
    same_host=Link(latency_s=1e-6, seconds_per_byte=1e-10),
    other_host=Link(latency_s=1e-5, seconds_per_byte=1e-9),
    reduce_seconds_per_byte=1e-10,
)
RAILS = hardware_links(load_hardware("h200-8x400g"), 8)
TCP = Links(
    same_host=Link(
        latency_s=2e-6, seconds_per_byte=3e-10, overhead_s=1e-6, table=table(2e-6, 3e-10),
        exchange=table(3e-6, 4e-10), shift=table(4e-6, 4e-10),
    ),
    other_host=Link(
        latency_s=3e-5, seconds_per_byte=4e-8, overhead_s=6e-6, table=table(3e-5, 4e-8),
        exchange=table(4e-5, 6e-8), shift=table(4e-5, 4.4e-8), fan_in=table(5e-6, 4e-8),
    ),
    reduce_seconds_per_byte=2e-10, host_seconds_per_message=1e-6, host_seconds_per_byte=2e-10,
    nic_seconds_per_byte=4e-8, nic=table(1e-5, 4.4e-8),
)  # fmt: skip
# (hosts, ranks on each); 64 ranks at most.
LAYOUTS = ((1, 3), (1, 8), (7, 1), (8, 1), (2, 2), (3, 3), (4, 2), (5, 3), (2, 8), (4, 4), (8, 4), (9, 7), (8, 8))
SIZES = (8.0, 65536.0, 3e7)

# Error of the form over the simulation's time, median and greatest, over LAYOUTS, the three links above and SIZES.
ACCURACY = {
    ("all_reduce", "ring"): (1e-9, 0.09),
    ("all_reduce", "binomial_tree"): (1e-9, 0.13),
    ("all_reduce", "double_binary_tree"): (0.08, 0.75),
    ("all_reduce", "recursive_doubling"): (1e-9, 0.50),
    ("all_reduce", "halving_doubling"): (1e-9, 0.55),
    ("all_reduce", "hierarchical"): (1e-9, 0.10),
    ("all_gather", "ring"): (1e-9, 1e-3),
    ("all_gather", "recursive_doubling"): (1e-9, 0.55),
    ("all_gather", "bruck"): (1e-9, 0.20),
    ("all_gather", "hierarchical"): (1e-9, 0.15),
    ("reduce_scatter", "ring"): (1e-9, 0.15),
    ("reduce_scatter", "halving_doubling"): (1e-9, 0.55),
    ("reduce_scatter", "pairwise"): (1e-3, 0.25),
    ("reduce_scatter", "hierarchical"): (1e-9, 0.10),
    ("all_to_all", "pairwise"): (1e-3, 0.25),
    ("all_to_all", "bruck"): (1e-9, 0.20),
    ("all_to_all", "hierarchical"): (1e-9, 0.10),
    ("broadcast", "ring"): (1e-9, 0.25),
    ("broadcast", "binomial_tree"): (1e-9, 0.15),
    ("broadcast", "double_binary_tree"): (0.05, 0.40),
    ("broadcast", "hierarchical"): (0.01, 0.20),
    ("reduce", "ring"): (1e-9, 0.25),
    ("reduce", "binomial_tree"): (1e-9, 0.15),
    ("reduce", "double_binary_tree"): (0.05, 0.40),
    ("reduce", "hierarchical"): (0.01, 0.20),
    ("gather", "binomial_tree"): (1e-9, 0.10),
    ("scatter", "binomial_tree"): (1e-9, 0.10),
    ("send_recv", "ring"): (1e-9, 1e-9),
    ("barrier", "dissemination"): (1e-9, 3e-3),
}


def on_hosts(hosts: int, per_host: int) -> tuple[int, ...]:
    return tuple(rank // per_host for rank in range(hosts * per_host))


@pytest.mark.parametrize("pair", [pair for pair in FLAT if pair not in TREES], ids=":".join)
def test_ranks_that_are_all_alike_have_the_textbooks_form(pair: tuple[str, str]) -> None:
    """One rank a host, or all on one, full duplex: rounds·α + bytes·β + reduced bytes·γ."""
    inside = Links(same_host=ALIKE.other_host, reduce_seconds_per_byte=GAMMA)
    for pieces, n in itertools.product((1, 2, 7) if pair in PIPELINED else (1,), (2, 3, 5, 8, 12, 33, 100, 4096)):
        seconds = closed_form(*pair, n, pieces).seconds(1e6, ALPHA, BETA, GAMMA)
        assert time_at_scale(*pair, 1e6, World.even(n, n), ALIKE, pieces=pieces) == pytest.approx(seconds, rel=1e-9)
        assert time_at_scale(*pair, 1e6, World.even(n, 1), inside, pieces=pieces) == pytest.approx(seconds, rel=1e-9)


def errors(pair: tuple[str, str]) -> dict[tuple[object, ...], float]:
    """Form over simulation, less one."""
    found = {}
    for (k, g), links, size in itertools.product(LAYOUTS, (TWO_CLASSES, RAILS, TCP), SIZES):
        hosts, world = on_hosts(k, g), World.even(k * g, k)
        if buildable(*pair, hosts):
            continue
        pieces = best_pieces(*pair, size, world, links) if pair in PIPELINED else 1
        form = time_at_scale(*pair, size, world, links, pieces=pieces)
        found[k, g, size, links is TCP] = form / price(build(*pair, k * g, 0, pieces, hosts), size, hosts, links) - 1
    return found


@pytest.mark.parametrize("pair", ACCURACY, ids=":".join)
def test_near_the_simulation(pair: tuple[str, str]) -> None:
    found = errors(pair)
    median = statistics.median(map(abs, found.values()))
    worst = max(found, key=lambda key: abs(found[key]))
    print(f"{':'.join(pair)}: median {median:.2%}, greatest {found[worst]:+.2%} at {worst}")
    most, greatest = ACCURACY[pair]
    assert median <= most
    assert abs(found[worst]) <= greatest, worst


def test_every_algorithm_has_a_form() -> None:
    assert set(ACCURACY) == set(PAIRS)
    with pytest.raises(ValueError, match="did you mean 'all_reduce:ring'"):
        time_at_scale("all_reduce", "rings", 8, World.even(8, 1), ALIKE)


@pytest.mark.parametrize("links", [TWO_CLASSES, RAILS, TCP])
@pytest.mark.parametrize(
    "pair", [("all_gather", "ring"), ("send_recv", "ring"), ("barrier", "dissemination")], ids=":".join
)
def test_exact_for_two_classes_of_links(pair: tuple[str, str], links: Links) -> None:
    for (k, g), size in itertools.product(LAYOUTS, SIZES):
        seconds = price(build(*pair, k * g), size, on_hosts(k, g), links)
        assert time_at_scale(*pair, size, World.even(k * g, k), links) == pytest.approx(seconds, rel=3e-3)


@pytest.mark.parametrize("pair", sorted(HIERARCHICAL - PIPELINED), ids=":".join)
def test_hierarchies_are_exact_on_full_duplex_links(pair: tuple[str, str]) -> None:
    for links, (k, g), size in itertools.product((TWO_CLASSES, RAILS), LAYOUTS, SIZES):
        if k > 1 and g > 1:
            hosts = on_hosts(k, g)
            seconds = price(build(*pair, k * g, hosts=hosts), size, hosts, links)
            assert time_at_scale(*pair, size, World.even(k * g, k), links) == pytest.approx(seconds, rel=5e-3)


def test_hierarchical_all_reduce_by_hand() -> None:
    """12,500 hosts of 8, one NIC each for all eight: both halves of the ring on the rails are bound by the NIC."""
    m, k, g = 8e9, 12_500, 8
    seconds = time_at_scale("all_reduce", "hierarchical", m, World.even(k * g, k), TWO_CLASSES)
    inside = 2 * 7 * 1e-6 + 2 * 7 / 8 * m * 1e-10 + 7 / 8 * m * 1e-10
    # Eight messages of m/100,000 behind one another take longer than one and its latency (and addition).
    piece = m / (k * g)
    between = 2 * (k - 1) * 8 * piece * 1e-9
    assert 8 * piece * 1e-9 > 1e-5 + piece * 1.1e-9
    assert seconds == pytest.approx(inside + between, rel=1e-3)


def test_shared_nic_of_an_all_to_all_by_hand() -> None:
    """1000 hosts of 8: 7992 of 8000 blocks of each rank leave through the NIC, so 8·7992/8000 of m a host."""
    m = 8e9
    seconds = time_at_scale("all_to_all", "pairwise", m, World.even(8000, 1000), TWO_CLASSES)
    assert seconds == pytest.approx(8 * 7992 / 8000 * m * 1e-9, rel=0.02)


def test_slowest_host_holds_up_a_ring() -> None:
    slow = Links(
        same_host=TWO_CLASSES.same_host, other_host=TWO_CLASSES.other_host, host_rates=((1e-9, 1e-9), (1e-9, 4e-9))
    )
    hosts = on_hosts(4, 2)
    ring = price(build("all_gather", "ring", 8), 8e6, hosts, slow)
    assert ring == pytest.approx(7 * (1e-5 + 1e6 * 4e-9), rel=1e-9)
    assert time_at_scale("all_gather", "ring", 8e6, World.even(8, 4), slow) == pytest.approx(ring, rel=1e-9)


@given(
    collective=st.sampled_from(list(COLLECTIVES)),
    hosts=st.one_of(
        st.lists(st.integers(0, 5), min_size=2, max_size=33).map(tuple),
        st.sampled_from([on_hosts(k, g) for k in range(1, 34) for g in range(1, 33 // k + 1) if k * g > 1]),
    ),
    rates=st.lists(st.floats(1e-11, 1e-8), min_size=14, max_size=14),
    known=st.integers(0, 5),
    nic=st.sampled_from([0.0, 1e-12, 1e-10]),
    timing=st.sampled_from(["isolated", "streamed"]),
    at=st.integers(0, 32),
    size=st.floats(1, 1e9),
)
@settings(deadline=None, max_examples=400)
def test_bound_is_that_of_the_definition(
    collective: str,
    hosts: tuple[int, ...],
    rates: list[float],
    known: int,
    nic: float,
    timing: str,
    at: int,
    size: float,
) -> None:
    """Any layout of up to 33 ranks; host rates for none, some or all hosts."""
    root = at % len(hosts) if COLLECTIVES[collective].rooted else 0
    links = Links(
        same_host=Link(latency_s=1e3 * rates[0], seconds_per_byte=rates[1]),
        other_host=Link(latency_s=1e3 * rates[2], seconds_per_byte=rates[3]),
        nic_seconds_per_byte=nic,
        host_rates=tuple(zip(rates[4 : 4 + known], rates[9 : 9 + known], strict=True)),
    )
    least = bound(collective, size, hosts, links, timing, root)
    assert bound_of_kinds(collective, size, kinds_of_hosts(hosts, root), links, timing) == pytest.approx(
        least, rel=1e-14
    )
    k = len(set(hosts))
    if hosts == on_hosts(k, len(hosts) // k):
        world = World.even(len(hosts), k)
        assert bound_of_world(collective, size, world, links, timing, root) == pytest.approx(least, rel=1e-14)


@given(
    collective=st.sampled_from(list(ALGORITHMS)),
    world=st.sampled_from([(70, 7), (128, 2), (96, 96), (99, 9), (1000, 125), (100_000, 12_500)]),
    links=st.sampled_from([TWO_CLASSES, RAILS, TCP]),
    timing=st.sampled_from(["isolated", "streamed"]),
    size=st.floats(8, 1e10),
)
@settings(deadline=None, max_examples=100)
def test_never_below_the_bound(collective: str, world: tuple[int, int], links: Links, timing: str, size: float) -> None:
    found = predict_even(collective, size, *world, links, timing)
    assert found.bound_s == bound_of_world(collective, size, World.even(*world), links, timing)
    assert min(found.times.values()) >= found.bound_s


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_even_worlds_and_lists_of_hosts_agree(collective: str) -> None:
    for k, g in ((2, 3), (9, 8)):
        one = predict_even(collective, 1e6, k * g, k, TCP, root=0)
        assert one == predict(collective, 1e6, on_hosts(k, g), TCP)
    known = {name for name in ALGORITHMS[collective] if (collective, name) not in HIERARCHICAL}
    assert set(predict_even(collective, 1e6, 100, 1, TCP).times) == known


def test_unequal_hosts_count_as_the_most_loaded_one() -> None:
    unequal = (*on_hosts(9, 8), 9)
    found = predict("all_to_all", 1e8, unequal, TWO_CLASSES)
    assert set(found.times) == {"pairwise", "bruck"}  # hierarchies need equal hosts
    world = World(ranks=73, hosts=10, per_host=8)
    assert World.of(unequal) == world
    assert found.times["bruck"] == time_at_scale("all_to_all", "bruck", 1e8, world, TWO_CLASSES)
    assert predict_algorithm("all_to_all", "bruck", 1e8, unequal, TWO_CLASSES) == found.times["bruck"]


@given(hosts=st.lists(st.integers(0, 6), min_size=65, max_size=90).map(tuple), most=st.integers(0, 60))
@settings(deadline=None, max_examples=30)
def test_any_layout_of_many_ranks_has_times_above_its_bound(hosts: tuple[int, ...], most: int) -> None:
    crowded = (*(0 for _ in range(most)), *hosts[most:])
    for collective in ALGORITHMS:
        found = predict(collective, 1e6, crowded, TCP)
        assert min(found.times.values()) >= found.bound_s > 0
        assert max(found.times.values()) < 60


@pytest.mark.parametrize(("ranks", "hosts"), [(10, 3), (4, 8), (0, 1), (8, 0)])
def test_worlds_that_cannot_be(ranks: int, hosts: int) -> None:
    with pytest.raises(ValueError, match="cannot be shared out equally"):
        World.even(ranks, hosts)


def test_a_link_that_is_missing() -> None:
    with pytest.raises(ValueError, match="no link inside a host"):
        times_at_scale("all_reduce", 8, World.even(200, 100), ALIKE)


@pytest.mark.parametrize("ranks", [*range(2, 40), 64, 100])
@pytest.mark.parametrize(("per_host", "root"), [(1, 0), (2, 1), (3, 0), (4, 3), (5, 2), (8, 0)])
def test_paths_of_binomial_trees(ranks: int, per_host: int, root: int) -> None:
    """The longest path for rounds of any costs, against a walk over every rank of the tree."""
    hosts = -(-(ranks + root) // per_host)
    distances = [1 << j for j in range((ranks - 1).bit_length())]
    for inside, crossing in (([1] * 7, [10] * 7), ([1, 2, 3, 4, 5, 6, 7], [3, 30, 4, 50, 6, 70, 8])):
        cost = {d: (inside[j], crossing[j] if hosts > 1 else inside[j]) for j, d in enumerate(distances)}
        done = {0: 0.0}  # when a rank is through with its messages so far
        for d in reversed(distances):
            for v in [v for v in done if v % (2 * d) == 0 and v + d < ranks]:
                crosses = (v + root) // per_host != (v + d + root) // per_host
                done[v] = done[v + d] = done[v] + cost[d][crosses]
        longest = max(
            sum(cost[d][bool(crossings & d)] for d in distances if waits & d)
            for waits, crossings in binomial_paths(ranks, hosts, per_host, root)
        )
        assert longest == max(done.values())


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 8, 11, 16, 40, 127])
@pytest.mark.parametrize("per_host", [2, 3, 4, 6, 8, 12, 72])
def test_edges_of_double_trees_that_leave_a_host(hosts: int, per_host: int) -> None:
    leaving, reaching = [0] * hosts, [0] * hosts
    for parents in _two_trees(hosts * per_host):
        for child, parent in enumerate(parents):
            if child and parent // per_host != child // per_host:
                leaving[parent // per_host] += 1
                reaching[child // per_host] += 1
    assert double_tree_edges(hosts * per_host, hosts, per_host) == max(*leaving, *reaching)


def test_multi_rail_ring_by_hand() -> None:
    """4 nodes of 8 H200: 370.8 GB/s a GPU is less than the node's 8 · 48 = 384 GB/s, adding keeps pace with both."""
    m = 1e9
    seconds = multi_rail_ring_s("all_reduce", m, World.even(32, 4), RAILS)
    assert seconds == pytest.approx(2 * (28 * 6e-7 + 3 * 2.7e-6) + 2 * 31 / 32 * m / 370.8e9, rel=1e-9)
    one_nic = hardware_links(load_hardware("h200-1x400g"), 8)
    gather = multi_rail_ring_s("all_gather", m, World.even(32, 4), one_nic)
    assert gather == pytest.approx(28 * 6e-7 + 3 * 2.7e-6 + 31 / 32 * m / 48e9, rel=1e-9)
    assert multi_rail_ring_s("all_reduce", m, World.even(8, 1), RAILS) is None
    assert multi_rail_ring_s("all_to_all", m, World.even(32, 4), RAILS) is None


def test_links_of_hardware() -> None:
    four = hardware_links(load_hardware("h200-4x400g"), 4)  # half of the GPUs bring half of the NICs
    assert four.same_host == Link(latency_s=6e-7, seconds_per_byte=1 / 370.8e9)
    assert four.nic_rate(0, out=True) == pytest.approx(1 / (2 * 48e9))
    assert four.rate(0, out=True) == pytest.approx(1 / 48e9)
    with pytest.raises(ValueError, match="8 GPUs a node, too few for 9"):
        hardware_links(load_hardware("h200-8x400g"), 9)


@lru_cache(maxsize=1)
def seconds_for_a_hundred_thousand() -> dict[str, float]:
    found = {}
    for collective in ALGORITHMS:
        start = time.process_time()
        for power in range(30):
            predict_even(collective, float(8 << power), 100_000, 12_500, TCP)
        found[collective] = time.process_time() - start
    return found


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_a_hundred_thousand_ranks_and_thirty_sizes_in_less_than_a_second(collective: str) -> None:
    assert seconds_for_a_hundred_thousand()[collective] < 1.0
