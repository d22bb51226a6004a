"""How a sweep becomes cases: groups on layouts with several hosts, sizes that round together, and names that last."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.cases import Case, Layout, Sweep, group_members, parse_group
from commbench.workloads import Workload

WORKLOAD = Workload(tokens=16, hidden=256, experts=8, topk=2)
TWO_BY_TWO = Layout(hosts=("a", "a", "b", "b"))
ROUND_ROBIN = Layout(hosts=("a", "b", "a", "b", "a", "b"))
UNEVEN = Layout(hosts=("b", "a", "a", "b", "a"))


def case(**changes: Any) -> Case:
    values: dict[str, Any] = {
        "collective": "all_reduce", "backend": "gloo", "bytes": 1024, "requested_bytes": 1024, "ranks": 4, "nodes": 1,
    }  # fmt: skip
    return Case(**(values | changes))


@pytest.mark.parametrize(
    ("layout", "group", "members"),
    [
        (TWO_BY_TWO, "world", ((0, 1, 2, 3),)),
        (TWO_BY_TWO, "node", ((0, 1), (2, 3))),
        (TWO_BY_TWO, "rail", ((0, 2), (1, 3))),
        (TWO_BY_TWO, "pair:0-3", ((0, 3),)),
        (ROUND_ROBIN, "node", ((0, 2, 4), (1, 3, 5))),
        (ROUND_ROBIN, "rail", ((0, 1), (2, 3), (4, 5))),
        (UNEVEN, "node", ((0, 3), (1, 2, 4))),
        (UNEVEN, "rail", ((0, 1), (2, 3), (4,))),
        (Layout(hosts=("a",) * 3), "node", ((0, 1, 2),)),
        (Layout(hosts=("a",) * 3), "rail", ((0,), (1,), (2,))),
        (Layout(hosts=("a", "b", "c")), "node", ((0,), (1,), (2,))),
    ],
)
def test_groups(layout: Layout, group: str, members: tuple[tuple[int, ...], ...]) -> None:
    assert group_members(group, layout) == members


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.sampled_from(["world", "node", "rail"]))
def test_every_rank_is_in_one_group_of_a_kind(hosts: list[str], group: str) -> None:
    layout = Layout(hosts=tuple(hosts))
    members = group_members(group, layout)
    assert sorted(rank for ranks in members for rank in ranks) == list(range(len(hosts)))
    for ranks in members:
        assert list(ranks) == sorted(ranks)
        found = [hosts[rank] for rank in ranks]
        if group == "node":
            assert len(set(found)) == 1
        if group == "rail":
            assert len(set(found)) == len(found)


def test_hosts_are_numbered_as_they_appear() -> None:
    assert UNEVEN.host_of == (0, 1, 1, 0, 1)
    assert UNEVEN.by_host() == ((0, 3), (1, 2, 4))
    assert UNEVEN.world == 5


def test_a_pair_has_one_name() -> None:
    assert parse_group("pair:3-1") == parse_group("pair:1-03") == "pair:1-3"
    for text in ("pair:1-1", "pair:01-1"):
        with pytest.raises(ValueError, match="names one rank twice"):
            parse_group(text)
    with pytest.raises(ValueError, match=r"group 'pair:0-4' is outside the world: ranks are 0 to 3"):
        group_members("pair:0-4", TWO_BY_TWO)


@given(st.text(max_size=20))
def test_no_text_makes_the_group_parser_crash(text: str) -> None:
    try:
        assert parse_group(text) in ("world", "node", "rail")
    except ValueError as error:
        assert str(error).startswith(f"unknown group {text!r}")


# -- identity --------------------------------------------------------------------------------------


def test_the_identity_is_the_same_in_every_process() -> None:
    program = (
        "from commbench.cases import Case; print(Case(collective='all_reduce', backend='gloo', bytes=1024, "
        "requested_bytes=1024, ranks=4, nodes=1).case_id)"
    )
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        found.add(done.stdout.strip())
    assert found == {case().case_id}


def test_the_identity_of_old_runs_still_holds() -> None:
    # Runs are compared by it: whoever changes how it is made cuts users off from their history.
    assert case().case_id == "27ed78180467"


def test_everything_but_the_reason_to_skip_is_identity() -> None:
    base = case()
    assert case(skip="no time").case_id == base.case_id
    changes: dict[str, Any] = {
        "collective": "all_gather", "backend": "mpi", "algorithm": "own:ring", "group": "node", "bytes": 1020,
        "requested_bytes": 1025, "dtype": "int32", "reduce_op": "max", "placement": "in", "timing": "streamed",
        "root": 1, "execution": "graph", "cache": "warm", "buffers": "registered", "ranks": 2, "nodes": 2,
        "workload": WORKLOAD,
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(Case)} - {"skip"}
    found = {base.case_id, *(case(**{name: value}).case_id for name, value in changes.items())}
    assert len(found) == 1 + len(changes)


def test_the_title_names_an_algorithm_that_is_not_the_librarys() -> None:
    one = {"collective": "broadcast", "backend": "mpi", "bytes": 64, "reduce_op": None}
    assert case(**one).title == "mpi broadcast 64 B float32 out isolated"
    assert case(**one, algorithm="own:ring/4").title == "mpi broadcast 64 B float32 out isolated by own:ring/4"
    assert case(**one, algorithm="own:ring", group="node").title.endswith(" isolated by own:ring in node")


def test_buffers_that_are_not_plain_are_in_the_title() -> None:
    assert case(buffers="plain").title == "gloo all_reduce 1024 B float32 sum out isolated"
    assert case(buffers="symmetric").title == "gloo all_reduce 1024 B float32 sum out isolated symmetric buffers"


def test_a_case_and_a_sweep_survive_json() -> None:
    one = case(skip="x", reduce_op=None)
    assert Case.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    routed = case(collective="moe_dispatch", workload=WORKLOAD)
    assert Case.from_dict(json.loads(json.dumps(routed.to_dict()))) == routed
    sweep = Sweep(
        sizes=(8, 16),
        dtypes=("int8",),
        soak_s=3.0,
        label="ä",
        left_out=(("barrier", "own:ring"),),
        workloads=(WORKLOAD,),
    )
    assert Sweep.from_dict(json.loads(json.dumps(sweep.to_dict()))) == sweep


# -- expansion -------------------------------------------------------------------------------------


def expand(layout: Layout = TWO_BY_TWO, **changes: Any) -> tuple[Case, ...]:
    values: dict[str, Any] = {"backends": ("gloo",), "timings": ("isolated",)}
    return Sweep(**(values | changes)).expand(layout)


def test_every_combination_once_with_sizes_ascending_within() -> None:
    cases = expand(
        backends=("gloo", "mpi"), collectives=("all_reduce", "broadcast"), sizes=(1024, 4096), dtypes=("float32", "int8"),
        ops=("sum", "max"), placements=("out", "in"), groups=("world", "node"), timings=("isolated", "streamed"),
    )  # fmt: skip
    # all_reduce: 2 sizes x types x ops x placements x groups x timings; broadcast has no op.
    assert len(cases) == 2 * (2**6 + 2**5)
    assert len({one.case_id for one in cases}) == len(cases)
    assert [one.backend for one in cases] == ["gloo"] * 96 + ["mpi"] * 96
    assert [one.bytes for one in cases[:4]] == [1024, 4096, 1024, 4096]
    assert {one.reduce_op for one in cases if one.collective == "broadcast"} == {None}


def test_routed_collectives_have_workloads_for_sizes_and_a_combine_is_in_bfloat16() -> None:
    larger = dataclasses.replace(WORKLOAD, tokens=64)
    cases = expand(
        collectives=("moe_dispatch", "moe_combine"), dtypes=("float8_e4m3fn", "bfloat16"), workloads=(WORKLOAD, larger)
    )
    # 16 tokens to 2 experts each: 256 values of 8 bits with 2 scales of 4 B, or of 16 bits.
    assert [(one.collective, one.dtype, one.workload, one.bytes) for one in cases] == [
        ("moe_dispatch", "float8_e4m3fn", WORKLOAD, 32 * 264), ("moe_dispatch", "float8_e4m3fn", larger, 128 * 264),
        ("moe_dispatch", "bfloat16", WORKLOAD, 32 * 512), ("moe_dispatch", "bfloat16", larger, 128 * 512),
        ("moe_combine", "bfloat16", WORKLOAD, 32 * 512), ("moe_combine", "bfloat16", larger, 128 * 512),
    ]  # fmt: skip
    assert all(one.bytes == one.requested_bytes and one.reduce_op is None for one in cases)
    assert len({one.case_id for one in cases}) == 6
    assert cases[0].title == (
        "gloo moe_dispatch 16 tokens x 256, top 2 of 8, throughput, uniform float8_e4m3fn isolated"
    )


def test_executions_are_cases_of_their_own_and_in_the_title() -> None:
    layout = Layout(hosts=("a", "a"))
    sweep = Sweep(backends=("nccl",), collectives=("all_reduce",), sizes=(8,), timings=("streamed",))
    (eager,) = sweep.expand(layout)
    found = dataclasses.replace(sweep, executions=("eager", "graph")).expand(layout)
    assert [case.execution for case in found] == ["eager", "graph"]
    assert found[0] == eager
    assert eager.case_id == found[0].case_id != found[1].case_id
    assert found[1].title == eager.title + " graph" == "nccl all_reduce 8 B float32 sum out streamed graph"


def test_kinds_of_buffers_are_cases_of_their_own() -> None:
    cases = expand(collectives=("all_reduce",), sizes=(64, 128), buffers=("plain", "symmetric"))
    assert [(one.buffers, one.bytes) for one in cases] == [
        ("plain", 64), ("plain", 128), ("symmetric", 64), ("symmetric", 128)
    ]  # fmt: skip
    assert len({one.case_id for one in cases}) == 4


def test_algorithms_of_a_sweep_and_what_is_left_out() -> None:
    cases = expand(
        collectives=("all_reduce", "barrier"), sizes=(64, 128), algorithms=("library", "own:ring", "own:dissemination"),
        left_out=(("barrier", "own:ring"), ("all_reduce", "own:dissemination")),
    )  # fmt: skip
    assert [(one.collective, one.algorithm, one.bytes) for one in cases] == [
        ("all_reduce", "library", 64), ("all_reduce", "library", 128),
        ("all_reduce", "own:ring", 64), ("all_reduce", "own:ring", 128),
        ("barrier", "library", 0), ("barrier", "own:dissemination", 0),
    ]  # fmt: skip


def test_sizes_that_round_together_are_one_case_and_an_exact_request_wins() -> None:
    cases = expand(collectives=("all_gather",), sizes=(65, 64, 66, 128))
    assert [(one.requested_bytes, one.bytes) for one in cases] == [(64, 64), (128, 128)]


def test_sizes_too_small_are_each_skipped_with_a_reason() -> None:
    cases = expand(collectives=("all_to_all",), sizes=(1, 8, 16))
    assert [(one.requested_bytes, one.bytes, one.skip) for one in cases] == [
        (1, 0, "1 B is less than one float32 a rank for 4 ranks"),
        (8, 0, "8 B is less than one float32 a rank for 4 ranks"),
        (16, 16, None),
    ]


def test_a_barrier_is_one_case_whatever_the_sizes_types_and_placements() -> None:
    cases = expand(
        collectives=("barrier",), sizes=(8, 16), dtypes=("int8", "float32"), placements=("in", "out"),
        buffers=("registered", "symmetric"),
    )  # fmt: skip
    (one,) = cases
    assert one.buffers == "plain"
    assert (one.bytes, one.requested_bytes, one.placement, one.reduce_op, one.skip) == (0, 0, "out", None, None)


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        (TWO_BY_TWO, {"dtypes": ("float16",), "ops": ("bxor",)}, "bitwise bxor is not defined for float16"),
        (TWO_BY_TWO, {"collectives": ("all_to_all",), "placements": ("in",)}, "all_to_all has no in-place form"),
        (UNEVEN, {"groups": ("node",)},
         "node groups differ in size (2 to 3 ranks): one message size would mean several"),
        (Layout(hosts=("a", "b")), {"groups": ("node",)}, "a node group of one rank has nobody to talk to"),
        (Layout(hosts=("a", "a")), {"groups": ("rail",)}, "a rail group of one rank has nobody to talk to"),
        (Layout(hosts=("a",)), {}, "a world group of one rank has nobody to talk to"),
        (TWO_BY_TWO, {"collectives": ("reduce",), "groups": ("node",), "root": 2},
         "root 2 is outside a node group of 2 ranks"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_skipped_with_the_reason(layout: Layout, changes: dict[str, Any], reason: str) -> None:
    (one,) = expand(layout, **({"collectives": ("all_reduce",), "sizes": (1024,)} | changes))
    assert one.skip == reason


def test_ranks_and_nodes_are_those_of_a_group() -> None:
    cases = expand(collectives=("all_reduce",), sizes=(1024,), groups=("world", "node", "rail", "pair:1-2"))
    assert {one.group: (one.ranks, one.nodes) for one in cases} == {
        "world": (4, 2), "node": (2, 1), "rail": (2, 2), "pair:1-2": (2, 2),
    }  # fmt: skip


def test_the_root_counts_only_where_there_is_one() -> None:
    cases = expand(collectives=("all_reduce", "broadcast"), sizes=(1024,), root=3)
    assert [one.root for one in cases] == [0, 3]
    with pytest.raises(ValueError, match="root 4 is outside the world: ranks are 0 to 3"):
        expand(root=4)


def test_elements_and_blocks() -> None:
    one = case(collective="all_gather", bytes=96, dtype="float64", ranks=3)
    assert (one.elements, one.block_elements, one.itemsize) == (12, 4, 8)
    assert case(bytes=96, dtype="bfloat16").block_elements == 48
