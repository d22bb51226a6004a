"""Published values are complete, consistent with the formulas that they name, and found by shape."""

from __future__ import annotations

import csv
from collections import Counter

import pytest

from commbench.cases import DTYPES
from commbench.collectives import EVERY
from commbench.moe.conventions import CONVENTIONS
from commbench.moe.profiles import profile, profiles
from commbench.moe.published import DATA, published, published_for
from commbench.moe.routing import why_not
from commbench.workloads import MODES, Workload

DECODE = Workload(tokens=128, hidden=7168, experts=256, topk=8, mode="low_latency")
PREFILL = Workload(tokens=4096, hidden=7168, experts=256, topk=8)


def test_every_row_is_whole() -> None:
    with DATA.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(set(map(tuple, rows))) == len(rows)
    for value in published():
        assert value.library
        assert value.hardware
        assert value.network
        assert value.source
        assert value.mode in MODES
        assert value.collective in EVERY
        assert value.dtype in DTYPES
        assert value.timing in ("kernel", "call")
        assert value.time_s is not None or value.bandwidth_Bps is not None
        assert (value.convention is not None) == (value.bandwidth_Bps is not None)
        assert value.convention in (*CONVENTIONS, "busbw", None)
        assert (value.convention == "busbw") == (value.collective == "all_to_all" and value.bandwidth_Bps is not None)
        assert value.experts is None or value.experts % value.ranks == 0
        assert value.nodes is None or value.ranks == 8 * value.nodes
        if value.collective == "moe_combine":
            assert value.dtype == "bfloat16"


def test_the_first_published_row_is_found_with_its_hardware() -> None:
    found = [
        v
        for v in published_for(DECODE, 8, "moe_dispatch", nodes=1)
        if v.library == "DeepEP V1" and v.hardware == "H800"
    ]
    assert [(v.time_s, v.bandwidth_Bps, v.convention) for v in found] == [(77e-6, 98e9, "deepep_low_latency")]
    combine = [v for v in published_for(DECODE, 8, "moe_combine") if v.hardware == "H800"]
    assert [(v.time_s, v.bandwidth_Bps) for v in combine] == [(114e-6, 127e9)]


def test_values_are_found_by_shape_alone() -> None:
    assert {v.dtype for v in published_for(PREFILL, 16, "moe_dispatch")} == {"float8_e4m3fn", "bfloat16"}
    assert {v.dtype for v in published_for(PREFILL, 16, "moe_dispatch", "bfloat16")} == {"bfloat16"}
    assert {v.mode for v in published_for(PREFILL, 16, "moe_dispatch")} == {"throughput"}
    assert published_for(DECODE, 7, "moe_dispatch") == ()
    assert published_for(PREFILL, 16, "moe_dispatch", nodes=4) != published_for(PREFILL, 16, "moe_dispatch", nodes=2)
    other = Workload(tokens=128, hidden=4096, experts=256, topk=8, mode="low_latency")
    assert published_for(other, 8, "moe_dispatch") == ()


def test_low_latency_bandwidths_follow_from_their_times() -> None:
    """By the test's formula, within what rounding and another moment of measuring leave (UCCL's differ most)."""
    checked = 0
    for value in published():
        if value.convention != "deepep_low_latency" or value.time_s is None:
            continue
        each = 7408 if value.collective == "moe_dispatch" else 14336
        assert value.bandwidth_Bps == pytest.approx(128 * 8 * each / value.time_s, rel=0.2), value
        checked += 1
    assert checked == 12 + 3 * 6


def test_internode_bandwidths_count_every_host_once() -> None:
    """uccl's EP16: 4096 tokens to both hosts of two, 7392 bytes each, in 1196 us."""
    value = next(v for v in published_for(PREFILL, 16, "moe_dispatch") if v.hardware == "H200")
    assert value.time_s == pytest.approx(1196e-6)
    assert value.bandwidth_Bps == pytest.approx(4096 * 2 * 7392 / 1196e-6, rel=0.02)


def test_libraries_are_those_of_the_sources() -> None:
    counted = Counter(value.library for value in published())
    assert set(counted) == {
        "DeepEP V1", "DeepEP V2", "DeepEP Hybrid-EP", "NCCL EP", "NCCL alltoall", "NVSHMEM alltoall", "UCCL-EP",
        "pplx-garden", "pplx-kernels", "torch all_to_all_single",
    }  # fmt: skip
    assert counted["NCCL EP"] == 8
    assert counted["DeepEP V2"] == 10


def test_profiles_can_be_routed_on_a_host_and_on_two() -> None:
    for name, one in profiles().items():
        assert one.name == name
        assert one.source
        assert why_not(one.workload, 8, (0,) * 8) is None, name
        assert why_not(one.workload, 8, (0,) * 4 + (1,) * 4) is None, name
        assert one.mode in MODES
        # An FP8 token has a scale for each 128 values.
        assert one.dtype == "bfloat16" or one.hidden % 128 == 0
        assert one.dtype in DTYPES


def test_profiles_by_name() -> None:
    decode = profile("deepseek-v3-decode")
    assert (decode.tokens, decode.mode, decode.dtype) == (128, "low_latency", "float8_e4m3fn")
    assert (decode.workload.hidden, decode.workload.experts, decode.workload.topk) == (7168, 256, 8)
    assert profile("mixtral-8x7b").workload == Workload(tokens=4096, hidden=4096, experts=8, topk=2)
    assert profile("qwen3-235b").workload == profile("qwen3-235b-prefill").workload
    assert published_for(profile("deepseek-v3-decode").workload, 8, "moe_dispatch")
    assert published_for(profile("deepseek-v3-prefill").workload, 64, "moe_combine")
    with pytest.raises(ValueError, match="did you mean 'deepseek-v3"):
        profile("deepseek_v3")
