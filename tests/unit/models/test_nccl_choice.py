"""What NCCL's tuner may choose from: defaults, what is forced, types and operations, by version; and its choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.collectives import COLLECTIVES
from commbench.models.nccl import (
    ALGORITHMS,
    PROTOCOLS,
    Graph,
    NcclInputs,
    nccl_estimate,
    nccl_times,
    parse_list,
    parse_version,
)
from commbench.models.nccl.constants import constants
from commbench.models.nccl.enabling import allowed
from commbench.models.nccl.inputs import BALANCED_TREE, NVLS, RING

VERSIONS = (
    "2.18.6", "2.19.4", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.6", "2.27.7", "2.28.3",
    "2.28.7", "2.28.9", "2.29.2", "2.29.7", "2.30.7",
)  # fmt: skip
NEWEST = "2.30.7"


def graph(pattern: int, channels: int, intra: float, inter: float, **rest: object) -> Graph:
    return Graph(
        pattern=pattern, channels=channels, bw_intra_Bps=intra * 1e9, bw_inter_Bps=inter * 1e9,
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip


H100_NODE = NcclInputs(
    ranks=8, nodes=1, ring=graph(RING, 12, 30, 30, same_channels=True), tree=graph(BALANCED_TREE, 12, 30, 30),
    nvls=graph(NVLS, 8, 40, 60),
)  # fmt: skip
H200_FOUR_NODES = NcclInputs(
    ranks=32, nodes=4, ring=graph(RING, 8, 45, 45), tree=graph(BALANCED_TREE, 8, 45, 45), nvls=graph(NVLS, 8, 40, 48)
)


def test_ll128_is_on_only_where_it_is_safe() -> None:
    def on(version: str, **changes: object) -> bool:
        inputs = replace(H100_NODE, **changes)  # type: ignore[arg-type]
        return ("AllReduce", "Ring", "LL128") in allowed(inputs, parse_version(version), None, None)

    def ring(**types: str) -> Graph:
        return graph(RING, 12, 30, 30, **types)

    assert on(NEWEST)
    assert not on(NEWEST, ring=ring(type_intra="PIX"))
    assert on(NEWEST, ring=ring(type_inter="PXN"))
    assert not on(NEWEST, ring=ring(type_inter="PHB"))
    assert not on(NEWEST, ring=ring(type_inter="PXN"), cc_min=80, cc_max=80)
    assert on(NEWEST, ring=ring(type_inter="PXB"), cc_min=80, cc_max=80)
    assert not on("2.29.7", cc_min=90, cc_max=100)
    assert on("2.30.7", cc_min=90, cc_max=100)
    assert not on("2.30.7", cc_min=80, cc_max=90)
    # Before 2.27 only capabilities that are listed: 10.3 (B300) is not, 10.0 since 2.25.
    assert [on(version, cc_min=103, cc_max=103) for version in ("2.26.6", "2.27.7")] == [False, True]
    assert [on(version, cc_min=100, cc_max=100) for version in ("2.24.3", "2.25.1")] == [False, True]
    forced = allowed(replace(H100_NODE, ring=ring(type_intra="SYS")), (2, 30), None, "LL128")
    assert ("AllReduce", "Ring", "LL128") in forced


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_forced_is_obeyed(version: str) -> None:
    for algorithm in ("Ring", "Tree", "NVLSTree"):
        for protocol in PROTOCOLS if algorithm != "NVLSTree" else ("Simple",):
            got = nccl_estimate(
                "all_reduce", 1 << 20, H200_FOUR_NODES, version=version, algo=algorithm.lower(), proto=protocol
            )
            assert (got.algorithm, got.protocol) == (algorithm, protocol)
    without = nccl_estimate("all_reduce", 8, H200_FOUR_NODES, version=version, proto="^LL,LL128")
    assert without.protocol == "Simple"


def test_what_cannot_be_had_falls_back_or_not_by_version() -> None:
    def of(version: str, collective: str, algo: str, **rest: str) -> str | None:
        return nccl_estimate(collective, 1 << 20, H100_NODE, version=version, algo=algo, **rest).algorithm

    assert [of(v, "all_gather", "Tree") for v in ("2.18.6", "2.19.4", "2.23.4", "2.24.3")] == ["Ring"] * 3 + [None]
    # Only SHARP in the network asked for, and there is none: ring and tree come back until 2.23.
    assert of("2.23.4", "all_reduce", "CollNetDirect") in ("Ring", "Tree")
    assert of("2.24.3", "all_reduce", "CollNetDirect") is None
    # NVLS cannot average floats: from 2.19 to 2.23 the ring is taken instead.
    answers = [of(v, "all_reduce", "NVLS", reduce_op="avg") for v in ("2.18.6", "2.19.4", "2.23.4", "2.24.3")]
    assert answers == [None, "Ring", "Ring", None]
    reason = nccl_estimate("all_gather", 1 << 20, H100_NODE, version=NEWEST, algo="Tree").reason
    assert reason == "no algorithm and protocol are left by NCCL_ALGO=Tree"


def test_lists_per_function() -> None:
    value = "ring;allreduce:tree,NVLS;broadcast:^Tree"
    algorithms = parse_list(value, "algorithm", (2, 24))
    chosen = {function: [name for name, on in names.items() if on] for function, names in algorithms.items()}
    assert chosen["AllGather"] == ["Ring"]
    assert chosen["AllReduce"] == ["Tree", "NVLS"]
    assert chosen["Broadcast"] == [name for name in ALGORITHMS if name != "Tree"]
    assert nccl_estimate("all_gather", 1 << 30, H100_NODE, version="2.24.3", algo=value).algorithm == "Ring"
    assert nccl_estimate("all_reduce", 1 << 30, H100_NODE, version="2.24.3", algo=value).algorithm == "NVLS"
    # A list that only excludes others turns LL128 on for good, where nothing said leaves it to the paths.
    assert parse_list("^LL", "protocol", (2, 24))["AllReduce"] == {"LL": 0, "LL128": 1, "Simple": 1}
    assert parse_list(None, "protocol", (2, 24))["AllReduce"] == {"LL": 1, "LL128": 2, "Simple": 1}


@pytest.mark.parametrize(
    ("text", "version", "says"),
    [
        ("rings", (2, 30), "did you mean 'Ring'"),
        ("ring;tree", (2, 30), "every part but the first needs a function"),
        ("ring;allgathers:tree", (2, 30), "did you mean 'AllGather'"),
        ("allreduce:ring", (2, 23, 4), "from 2.24 on"),
    ],
)
def test_lists_that_nccl_refuses(text: str, version: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_list(text, "algorithm", version)


def test_types_and_operations_that_nvls_cannot_reduce() -> None:
    def of(version: str = NEWEST, collective: str = "all_reduce", **kind: str) -> str | None:
        return nccl_estimate(collective, 1 << 30, H100_NODE, version=version, **kind).algorithm

    assert of() == "NVLS"
    assert of(dtype="bfloat16", reduce_op="max") == "NVLS"
    assert of(dtype="float32", reduce_op="max") == "Ring"
    assert of(dtype="uint8") == "Ring"
    assert of(reduce_op="avg") == "Ring"
    # all_gather needs no reduction, except that 2.20 and 2.21 ask for one all the same.
    for version, there in (("2.19.4", True), ("2.20.5", False), ("2.21.5", False), ("2.22.3", True)):
        times = nccl_times("all_gather", 1 << 30, H100_NODE, version=version, dtype="uint8")
        assert (("NVLS", "Simple") in times) == there, version


def test_long_rings_of_fp8_are_the_last_resort_from_2_24_on() -> None:
    size = 1 << 33
    plain = nccl_estimate("all_reduce", size, H200_FOUR_NODES, version="2.24.3", algo="Ring,Tree")
    fp8 = nccl_estimate("all_reduce", size, H200_FOUR_NODES, version="2.24.3", algo="Ring,Tree", dtype="float8_e5m2")
    assert (plain.algorithm, fp8.algorithm) == ("Ring", "Tree")
    only = nccl_estimate("all_reduce", size, H200_FOUR_NODES, version="2.24.3", algo="Ring", dtype="float8_e5m2")
    assert only.seconds == plain.seconds


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in
                                        ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")])  # fmt: skip
def test_collectives_that_nccl_does_not_model(collective: str) -> None:
    got = nccl_estimate(collective, 1 << 20, H100_NODE, version=NEWEST)
    assert (got.seconds, got.algorithm) == (None, None)
    assert got.reason == f"NCCL's tuner does not model {collective}"
    assert got.bus_bandwidth_Bps(collective, 1 << 20, 8) is None
    assert nccl_times(collective, 1 << 20, H100_NODE, version=NEWEST) == {}


def test_racks_joined_by_nvlink_by_version() -> None:
    rack = replace(H100_NODE, ranks=72, multi_host_nvlink=True)
    assert nccl_estimate("all_reduce", 1 << 30, rack, version="2.19.4").seconds is None
    assert nccl_estimate("all_reduce", 1 << 30, rack, version="2.20.5").algorithm == "Ring"
    assert nccl_estimate("all_reduce", 1 << 30, rack, version="2.21.5").algorithm == "NVLS"
    # all_gather over more than 32 ranks has no NVLS since 2.25.
    for version, there in (("2.24.3", True), ("2.25.1", False), (NEWEST, False)):
        assert (("NVLS", "Simple") in nccl_times("all_gather", 1 << 30, rack, version=version)) == there


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.27", (2, 27)), ("2.27.7", (2, 27, 7)), ("2.29.7+cuda12.9", (2, 29, 7)), ("v2.18.3-1", (2, 18, 3)),
     ("22907", (2, 29, 7)), (" 2.30.7 ", (2, 30, 7))],
)  # fmt: skip
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["2.17.1", "2.31.0", "3.0", "two", "", "2", "21708"])
def test_versions_outside_the_model(text: str) -> None:
    with pytest.raises(ValueError, match=r"outside the tuning model|not an NCCL version"):
        parse_version(text)


def test_constants_of_a_patch_release_are_those_of_the_newest_before_it() -> None:
    assert constants((2, 27, 3)) == constants((2, 26, 2)) == constants((2, 25, 1))
    assert constants((2, 29, 3)) == constants((2, 29, 2)) != constants((2, 29, 7))


@pytest.mark.parametrize(
    "change",
    [{"ranks": 0}, {"nodes": 9}, {"nodes": 0}, {"cc_min": 100}],
)
def test_impossible_communicators(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least one node|compute capability"):
        replace(H100_NODE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"pattern": 0}, {"channels": -1}, {"bw_intra_Bps": -1.0}, {"type_intra": "USB"}])
def test_impossible_graphs(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"pattern must|cannot be negative|unknown path type 'USB'"):
        replace(H100_NODE.ring, **change)  # type: ignore[arg-type]


def test_one_rank_and_unknown_names() -> None:
    alone = replace(H100_NODE, ranks=1)
    assert nccl_estimate("all_reduce", 8, alone, version=NEWEST).reason == "one rank has nobody to talk to"
    with pytest.raises(ValueError, match="did you mean 'all_reduce'"):
        nccl_estimate("allreduce", 8, H100_NODE, version=NEWEST)


speeds = st.sampled_from([0.24, 3.0, 12.0, 24.0, 45.0, 48.0, 90.0])


@st.composite
def communicators(draw: st.DrawFn) -> NcclInputs:
    nodes = draw(st.integers(1, 40))
    per_node = draw(st.integers(2 if nodes == 1 else 1, 9))
    cc = draw(st.sampled_from([70, 80, 86, 90, 100, 103]))
    channels = draw(st.integers(1, 32))
    intra, inter = draw(speeds), draw(speeds)
    heads = draw(st.integers(1, 32))
    return NcclInputs(
        ranks=nodes * per_node, nodes=nodes, cc_min=cc, cc_max=cc, ring=graph(RING, channels, inter, inter),
        tree=graph(BALANCED_TREE, channels, intra, inter),
        nvls=graph(NVLS, heads, intra, inter) if cc >= 90 else None,
        cpu_vendor=draw(st.sampled_from(["intel", "amd", "mixed", "arm"])),
    )  # fmt: skip


collectives = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"])
versions = st.sampled_from(VERSIONS)
sizes = st.integers(0, 1 << 36)


@given(communicators(), collectives, versions, sizes)
def test_the_choice_is_the_least_of_positive_times(
    inputs: NcclInputs, collective: str, version: str, size: int
) -> None:
    times = nccl_times(collective, size, inputs, version=version)
    chosen = nccl_estimate(collective, size, inputs, version=version)
    assert times
    assert all(seconds > 0 for seconds in times.values())
    assert chosen.seconds == min(times.values())
    assert chosen.algorithm is not None and chosen.protocol is not None
    assert times[chosen.algorithm, chosen.protocol] == chosen.seconds
    again = nccl_estimate(collective, size, inputs, version=version, algo=chosen.algorithm, proto=chosen.protocol)
    assert again == chosen


@given(communicators(), collectives, versions, sizes, sizes)
def test_more_bytes_never_take_less_where_no_correction_is(
    inputs: NcclInputs, collective: str, version: str, first: int, second: int
) -> None:
    small, large = sorted((first, second))
    less = nccl_times(collective, small, inputs, version=version)
    more = nccl_times(collective, large, inputs, version=version)
    assert less.keys() == more.keys()
    for pair, seconds in less.items():
        if pair[0] not in ("Tree", "NVLSTree"):
            assert more[pair] >= seconds


@given(communicators(), versions, sizes, st.sampled_from(ALGORITHMS), st.sampled_from(PROTOCOLS))
def test_a_forced_pair_is_taken_or_nothing_is_from_2_24_on(
    inputs: NcclInputs, version: str, size: int, algorithm: str, protocol: str
) -> None:
    got = nccl_estimate("all_reduce", size, inputs, version=version, algo=algorithm, proto=protocol)
    assert got.protocol in (protocol, None)
    if parse_version(version) >= (2, 24):
        assert got.algorithm in (algorithm, None)
        assert (got.seconds is None) == (got.reason is not None)
