"""The nccl backend on a machine without GPUs: against the rules of torch's own, and over a double of torch.cuda.

The double (cuda_double/) takes the place of the library, in real rank processes; nothing of commbench is replaced but
how they are started (conftest.py), and links are given but where they are measured over the double too.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import commbench
from commbench.backends import BACKENDS
from commbench.backends.base import BackendError, Context
from commbench.backends.nccl import Nccl
from commbench.backends.nccl_account import Gpu, NcclAccount
from commbench.cases import DTYPES, REDUCE_OPS, Case, Sweep
from commbench.collectives import COLLECTIVES
from commbench.launch.run import Run
from commbench.launch.runner import run_local
from commbench.models.links import Link, Links
from commbench.store.calibration import CalibratedBackend, Calibration

DOUBLE = Path(__file__).parent / "cuda_double"
KERNEL_S = 10e-6  # of the double
RANKS = 2
Calls = list[list[dict[str, Any]]]
Launch = Callable[..., tuple[Run, Calls]]
# Measuring links takes a run seconds, and nothing here is asked of them.
KNOWN_LINKS = Links(same_host=Link(latency_s=1e-6, seconds_per_byte=1e-10))


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> Launch:
    """Runs a sweep on ``ranks`` processes that see ``gpus`` each; the run, and the calls of each rank's torch."""
    calls = tmp_path / "calls"
    calls.mkdir()

    def run(*, gpus: int, ranks: int = RANKS, calibrate: bool = False, **sweep: Any) -> tuple[Run, Calls]:
        path = os.pathsep.join(filter(None, (str(DOUBLE), os.environ.get("PYTHONPATH"))))
        for name, value in {"PYTHONPATH": path, "COMMBENCH_TEST_CUDA": calls, "COMMBENCH_TEST_GPUS": gpus}.items():
            monkeypatch.setenv(name, str(value))
        found = run_local(
            Sweep(**{"backends": ("nccl",), "sizes": (4096,), "iterations": 4, "budget_s": 5.0, **sweep}),
            ranks=ranks, out=tmp_path / "results", on_event=lambda event: None,
            given=None if calibrate else known_links(ranks),
        )  # fmt: skip
        files = sorted(calls.glob("rank-*.jsonl"))
        return found, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    return run


def known_links(ranks: int) -> Calibration:
    found = CalibratedBackend(version="", settings={}, links=KNOWN_LINKS)
    return Calibration(path=Path("links.json"), hosts=("a",) * ranks, backends={"nccl": found})


def case(**fields: Any) -> Case:
    base: dict[str, Any] = {
        "collective": "all_reduce", "backend": "nccl", "bytes": 4096, "requested_bytes": 4096, "ranks": 2, "nodes": 1
    }  # fmt: skip
    return Case(**{**base, **fields})


@pytest.fixture(scope="module")
def double() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_double", DOUBLE / "cuda_double.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the double is like what it stands in for ------------------------------------------------------


def shape(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    return [(p.name, p.kind, repr(p.default)) for p in inspect.signature(function).parameters.values()]


def test_the_doubles_have_the_signatures_of_torch(double: ModuleType) -> None:
    compared = 0
    for path, doubles in double.DOUBLES.items():
        for function in doubles:
            real = getattr(double.owner(path), function.__name__)
            if path in ("torch", "torch.Tensor"):
                assert callable(real)  # built in, without a signature to read
                continue
            if isinstance(function, type):
                for name in {"__new__", *vars(function)} & {"__new__", "record", "query", "elapsed_time", "replay"}:
                    assert shape(getattr(function, name)) == shape(getattr(real, name)), f"{path}.{name}"
                    compared += 1
                if function.__name__ != "graph":
                    continue
            assert shape(function) == shape(real), f"{path}.{function.__name__}"
            compared += 1
    assert compared == 36


def types_of_nccl() -> set[str]:
    """The types that torch maps to one of NCCL's, from the header that it installs."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/NCCLUtils.hpp"
    found = re.findall(r"\{at::k(\w+), nccl\w+\}", header.read_text())
    names = {
        "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Char": "int8",
        "Byte": "uint8", "Int": "int32", "Long": "int64",
    }  # fmt: skip
    return {names.get(name, name.lower()) for name in found}


def test_the_double_takes_the_types_that_torch_maps_to_nccl(double: ModuleType) -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in double.NCCL_TYPES} == {
        name for name in types_of_nccl() if not name.endswith("fnuz")
    }


# -- what is refused before anything runs ----------------------------------------------------------


def compared(capability: tuple[int, int]) -> Nccl:
    """As rank 1 of 2 has it after the ranks have compared their devices, of which the lesser one is told."""
    backend = Nccl()
    backend._account = NcclAccount(22707, {})
    gpus = [[["uuid-0", 12, 0], ["x86_64", "intel"]], [["uuid-1", *capability], ["x86_64", "intel"]]]
    context = Context(
        rank=1, world=2, local_rank=1, hosts=("a", "a"), address="127.0.0.1", interface="lo", share=lambda value: value,
        agree=lambda value, decide: decide(gpus) if isinstance(value, list) else decide([value, value]),
    )  # fmt: skip
    backend._account.compare(context, Gpu("uuid-1", *capability))
    return backend


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_type_is_refused_if_torch_has_no_nccl_type_for_it(dtype: str) -> None:
    backend = compared((9, 0))
    reason = backend.why_not(case(collective="all_gather", reduce_op=None, dtype=dtype))
    assert (reason is None) == (dtype in types_of_nccl()), reason


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_bitwise_operations_are_refused(op: str) -> None:
    reason = compared((9, 0)).why_not(case(dtype="int32", reduce_op=op))
    assert reason == (f"NCCL has no reduce operation {op!r}" if op in ("band", "bor", "bxor") else None)


def test_float8_is_reduced_only_where_every_gpu_can() -> None:
    backend = compared((8, 9))
    assert backend.why_not(case(dtype="float8_e5m2", reduce_op="sum")) == (
        "NCCL reduces float8_e5m2 from compute capability 9.0 on, and a GPU of this job has 8.9"
    )
    assert backend.why_not(case(collective="all_gather", dtype="float8_e5m2", reduce_op=None)) is None
    assert compared((10, 0)).why_not(case(dtype="float8_e5m2", reduce_op="sum")) is None


def test_no_graph_can_hold_a_barrier_that_makes_the_host_wait() -> None:
    barrier = {"collective": "barrier", "reduce_op": None, "bytes": 0}
    assert compared((9, 0)).why_not(case(execution="graph", **barrier)) == (
        "torch's barrier makes the host wait, which a graph cannot"
    )
    assert compared((9, 0)).why_not(case(**barrier)) is None


def test_a_cpu_build_of_torch_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    context = Context(
        rank=0, world=2, local_rank=0, hosts=("a", "a"), address="127.0.0.1", interface="lo", share=lambda value: value
    )
    with pytest.raises(BackendError, match=r"^torch \S+ sees no GPU, or has no NCCL: install a CUDA build") as error:
        Nccl().start(context)
    assert "\n" not in str(error.value)


class Driver:
    """libcuda.so.1 that finds ``devices``."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    def cuInit(self, flags: int) -> int:
        return 0 if self.devices else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0


@pytest.mark.parametrize(
    ("devices", "cuda", "hip", "expected"),
    [(2, "'13.0'", "None", None),
     (0, "'13.0'", "None", "finds no GPU"),
     (2, "None", "None", "torch 9.9.9+cpu is built without CUDA: install a CUDA build of torch"),
     (2, "None", "'7.1'", None)],
)  # fmt: skip
def test_what_is_missing_is_known_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, cuda: str, hip: str, expected: str | None
) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "version.py").write_text(
        f"from typing import Optional\n__version__ = '9.9.9+cpu'\ncuda: Optional[str] = {cuda}\nhip: str = {hip}\n"
    )
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr("commbench.backends.ctypes.CDLL", lambda name: Driver(devices))
    reason = BACKENDS["nccl"].why_unavailable()
    assert (reason is None) if expected is None else reason is not None and expected in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "nccl", "--out", str(tmp_path / "results")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"commbench: error: backend 'nccl': .*: .*\n", done.stderr), done.stderr
    assert not (tmp_path / "results").exists()


class Library:
    """libnccl.so.2 in the version that its header would call ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code

    def ncclGetVersion(self, number: Any) -> int:
        number._obj.value = self.code
        return 0


def test_the_version_is_that_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Nccl()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr("commbench.backends.nccl.ctypes.CDLL", lambda name, mode: Library(22907))
    assert backend.version().startswith("NCCL 2.29.7, torch ")

    def not_loaded(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr("commbench.backends.nccl.ctypes.CDLL", not_loaded)
    assert backend.version().startswith("NCCL 2.27.3, torch ")


# -- ranks and their GPUs --------------------------------------------------------------------------


def test_more_ranks_than_gpus_is_one_clear_line(launch: Launch) -> None:
    run, _ = launch(gpus=2, ranks=3, collectives=("barrier",))
    assert run.exit_code == 3
    assert "local rank 2, but its host has 2 GPUs: start at most one rank a GPU" in run.outcome.line
    assert run.outcome.ranks == (2,)


def test_ranks_that_share_a_gpu_are_named(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    run, _ = launch(gpus=1, collectives=("barrier",))
    assert run.exit_code == 3
    assert re.search(r"ranks 0 and 1 on \S+ have the same GPU: start at most one rank a GPU", run.outcome.line)
    assert list(scratch.iterdir()) == []


def test_a_launcher_may_show_each_rank_its_own_gpu_only(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_TEST_BOUND", "1")
    run, calls = launch(gpus=1, collectives=("all_reduce",), timings=("isolated",))
    assert run.exit_code == 0, run.outcome.line
    assert [rank[0] for rank in calls] == [{"call": "set_device", "device": "cuda:0"}] * RANKS


def test_one_rank_has_nobody_to_talk_to(launch: Launch) -> None:
    run, _ = launch(gpus=1, ranks=1)
    assert run.exit_code == 0, run.outcome.line
    assert {point["status"] for point in run.points} == {"skipped"}
    assert {point["reason"] for point in run.points} == {"a world group of one rank has nobody to talk to"}


def test_buffers_that_do_not_fit_the_gpu_are_skipped(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_TEST_GPU_MEMORY", str(100 << 20))
    run, _ = launch(gpus=RANKS, collectives=("all_reduce",), timings=("isolated",), sizes=(64 << 20,))
    assert run.exit_code == 0, run.outcome.line
    assert [point["reason"] for point in run.points] == ["needs 0.3 GB a rank and 0.1 GB is available"]


# -- a run -----------------------------------------------------------------------------------------

LETTERS = {
    "upload": "U", "synchronize": "S", "download": "D", "event": "E", "flush": "F", "sleep": "I", "replay": "R",
}  # fmt: skip


def after_calibration(calls: list[dict[str, Any]]) -> str:
    """A letter a call, from the first upload on: what is above, B for the barrier before an operation, C for an
    operation and c for one that is captured."""
    first = next(index for index, call in enumerate(calls) if call["call"] == "upload")
    return "".join(map(_letter, calls[first:]))


def _letter(call: dict[str, Any]) -> str:
    if call["call"] == "all_reduce" and call["sizes"] == [1]:
        return "B"
    return LETTERS.get(call["call"], "c" if call.get("captured") else "C")


# What a rank does beside rounds: data, warm-up, the first barrier, marks that are made, marks beside one another.
AROUND = "U|D|C+S|BS|(IEES){20}"


def check_start(calls: Calls) -> None:
    for rank, mine in enumerate(calls):
        device = f"cuda:{rank}"
        assert mine[0] == {"call": "set_device", "device": device}
        assert mine[1] == {
            "call": "init_process_group", "backend": "nccl", "device_id": device, "rank": rank, "world_size": RANKS
        }  # fmt: skip
        assert {call["device"] for call in mine if call["call"] == "synchronize"} == {device}
        assert all(call["pinned"] for call in mine if call["call"] in ("upload", "download"))


def check_points(run: Run) -> None:
    assert run.exit_code == 0, run.outcome.line
    points = run.points
    assert {point["status"] for point in points} == {"ok"}, [point["reason"] for point in points]
    assert {point["wrong"] for point in points} == {0}
    assert {point["backend_settings"]["device"] for point in points} == {"Double 9000"}
    for point in points:
        if point["collective"] == "barrier":
            assert "torch's barrier makes the host wait" in point["note"]
            continue
        assert point["verified"]
        # A kernel is all that is between two marks: no flush, no barrier, no pause.
        assert point["time_s"] == pytest.approx(KERNEL_S)
        assert (point["start"], point["host_bound"]) == ("stream", False)
        assert point["host_s"] > 0
        assert point["time_shortest_s"] == (pytest.approx(KERNEL_S) if point["timing"] == "isolated" else None)


EVERYTHING = {"collectives": tuple(COLLECTIVES), "ops": ("sum", "avg"), "dtypes": ("float32",)}
IN_PLACE = tuple(name for name, spec in COLLECTIVES.items() if spec.in_place)


@pytest.mark.parametrize(
    "sweep",
    [EVERYTHING, {"collectives": IN_PLACE, "placements": ("in",), "dtypes": ("int32",), "root": 1}],
    ids=["out", "in"],
)
def test_isolated_operations_are_between_two_marks_behind_a_barrier(launch: Launch, sweep: dict[str, Any]) -> None:
    run, calls = launch(gpus=RANKS, timings=("isolated",), **sweep)
    check_points(run)
    check_start(calls)
    for mine in calls:
        text = after_calibration(mine)
        # A pause for the host to get ahead in; the cache is emptied and the barrier passed outside the marks.
        assert re.fullmatch(rf"({AROUND}|E*SI(FBECE)+S)+", text), text
        assert "FBECE" in text
        assert {call["size"] for call in mine if call["call"] == "flush"} == {2 << 20}  # twice the cache
        # Nothing is left on the device when it is read or written.
        assert {call["queued"] for call in mine if call["call"] in ("upload", "download")} == {0}


def test_streamed_operations_are_between_two_marks_together(launch: Launch) -> None:
    run, calls = launch(gpus=RANKS, timings=("streamed",), iterations=40, **EVERYTHING)
    check_points(run)
    check_start(calls)
    for mine in calls:
        text = after_calibration(mine)
        # The host's pace is a part of what is asked: no pause. Batches of torch's barrier are waited for one by one.
        assert re.fullmatch(rf"({AROUND}|E*SBEC+ES)+", text), text
        # 40 operations are ten batches of four.
        assert text.count("BECCCCES") >= 10
        downloads = [index for index, letter in enumerate(text) if letter == "D"]
        assert all(text[index - 1] in "SD" for index in downloads)


@pytest.mark.parametrize("timing", ["isolated", "streamed"])
def test_graphs_are_captured_once_and_launched_between_the_marks(launch: Launch, timing: str) -> None:
    """Data, in place too, is as right as without them: what the first launch did to it is put back."""
    names = tuple(name for name in COLLECTIVES if name != "barrier")
    sweep = {"collectives": names, "ops": ("sum", "avg"), "iterations": 40, "sizes": (1 << 20,)}
    run, calls = launch(gpus=RANKS, timings=(timing,), executions=("graph",), **sweep)
    check_points(run)
    assert {point["execution"] for point in run.points} == {"graph"}
    for mine in calls:
        text = after_calibration(mine)
        captures = "Sc+RSU*"  # torch waits before a capture; the first launch is not timed
        rounds = "E*SI(FBERE)+S" if timing == "isolated" else "E*SIBER+ES"
        assert re.fullmatch(rf"({AROUND}|ScRS|{captures}|{rounds})+", text), text
        assert {call["operations"] for call in mine if call["call"] == "replay"} <= (
            {1} if timing == "isolated" else {1, 4}
        )


def test_a_graph_holds_many_operations_where_a_batch_has_them(launch: Launch) -> None:
    """150 a batch on two sets of buffers: twice a graph of 64 and one of 22. A warm cache is not emptied."""
    sweep = {"collectives": ("all_gather",), "iterations": 1500, "sizes": (4096,), "cache": "warm"}
    run, calls = launch(gpus=RANKS, timings=("streamed",), executions=("graph",), **sweep)
    check_points(run)
    assert "IBERRRES" in after_calibration(calls[0])
    replays = [call["operations"] for call in calls[0] if call["call"] == "replay"]
    assert replays[-3:] == [64, 64, 22]
    assert sum(call.get("captured", False) for call in calls[0]) == 1 + 64 + 22
    assert not [call for call in calls[0] if call["call"] == "flush"]


def test_what_cannot_be_captured_is_skipped_with_the_library_s_reason(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMBENCH_TEST_NO_GRAPHS", "1")
    run, _ = launch(
        gpus=RANKS, timings=("isolated",), executions=("graph", "eager"), collectives=("all_reduce", "barrier")
    )
    assert run.exit_code == 0, run.outcome.line
    found = {(point["collective"], point["execution"]): (point["status"], point["reason"]) for point in run.points}
    refused = "RuntimeError: CUDA error: operation failed due to a previous error during capture"
    assert found == {
        ("all_reduce", "graph"): ("skipped", f"nccl refuses it: {refused}"),
        ("all_reduce", "eager"): ("ok", None),
        ("barrier", "graph"): ("skipped", "torch's barrier makes the host wait, which a graph cannot"),
        ("barrier", "eager"): ("ok", None),
    }


def test_ranks_outside_the_groups_keep_step_with_the_barrier(launch: Launch) -> None:
    run, calls = launch(gpus=3, ranks=3, groups=("pair:0-2",), collectives=("all_reduce",), iterations=40)
    check_points(run)
    barriers = [sum(_letter(call) == "B" for call in mine) for mine in calls]
    assert barriers == [barriers[0]] * 3
    assert not [call for call in calls[1] if call["call"] == "upload"]


def test_roots_and_neighbours_are_named_by_their_world_rank(launch: Launch) -> None:
    """In a pair out of three ranks, root 1 of the group is rank 2 of the world."""
    collectives = ("broadcast", "reduce", "gather", "scatter", "send_recv", "all_gather")
    run, calls = launch(
        gpus=3, ranks=3, groups=("pair:0-2",), root=1, timings=("isolated",), collectives=collectives, calibrate=True
    )
    check_points(run)
    for mine in (calls[0], calls[2]):
        assert {call["root"] for call in mine if "root" in call} == {2}
        last = [call for call in mine if call["call"] == "batch_isend_irecv"][-1]
        assert set(last["peers"]) == ({2} if mine is calls[0] else {0})
    assert not [call for call in calls[1] if call["call"] == "upload"]


@pytest.mark.parametrize("timing", ["isolated", "streamed"])
def test_own_algorithms_are_enqueued_and_waited_for_once(launch: Launch, timing: str) -> None:
    """Messages in groups and additions go to the stream; the host waits where it would for the library."""
    sweep = {"collectives": ("all_reduce", "broadcast", "all_to_all", "barrier"), "iterations": 40}
    names = ("own:ring/2", "own:double_binary_tree/3", "own:bruck", "own:dissemination")
    run, calls = launch(gpus=3, ranks=3, ops=("sum", "avg"), timings=(timing,), algorithms=names, **sweep)
    assert run.exit_code == 0, run.outcome.line
    points = [point for point in run.points if point["status"] != "skipped"]
    done = {(point["collective"], point["algorithm"], point["reduce_op"]) for point in points}
    assert done == {
        ("all_reduce", "own:ring/2", "sum"), ("all_reduce", "own:double_binary_tree/3", "sum"),
        ("broadcast", "own:ring/2", None), ("broadcast", "own:double_binary_tree/3", None),
        ("all_to_all", "own:bruck", None), ("barrier", "own:dissemination", None),
    }  # fmt: skip
    assert {(point["status"], point["wrong"]) for point in points} == {("ok", 0)}
    assert {point["start"] for point in points} == {"stream"}
    reasons = {point["reason"] for point in run.points}
    assert "messages over nccl are reduced by torch, which has no 'avg' of two float32" in reasons
    assert {call["call"] for mine in calls for call in mine} <= {
        "set_device", "init_process_group", "upload", "download", "synchronize", "batch_isend_irecv", "send", "recv",
        "all_reduce", "event", "flush", "sleep",
    }  # fmt: skip
    for mine in calls:
        text = after_calibration(mine)
        rounds = "E*SI(FBEC+E)+S" if timing == "isolated" else "E*SBEC+ES"
        assert re.fullmatch(rf"({AROUND}|{rounds})+", text), text
        # An empty message carries a byte.
        assert min(size for call in mine if call["call"] == "batch_isend_irecv" for size in call["sizes"]) == 1


def test_the_version_and_settings_are_kept(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_SECRET_KEY", "hidden")
    run, _ = launch(gpus=RANKS, collectives=("all_reduce",), timings=("isolated",))
    (settings,) = (point["backend_settings"] for point in run.points)
    assert settings == {
        "device": "Double 9000", "NCCL_ALGO": "Ring", "NCCL_SECRET_KEY": "(redacted)", "nccl graphs": "not written",
    }  # fmt: skip
    manifest = json.loads((run.directory / "launches/0/manifest.json").read_text())
    assert re.match(r"NCCL \d+\.\d+\.\d+, torch ", manifest["backends"]["nccl"]["version"])
    assert commbench.load(run.directory)["backend_settings"].iloc[0] == settings


# -- what NCCL's tuner expects ---------------------------------------------------------------------

CHANNEL = '<channel><gpu dev="0"/><gpu dev="1"/></channel>'
GRAPHS = f"""<graphs version="1">
  <graph id="0" pattern="4" crossnic="0" nchannels="2" speedintra="40" speedinter="40" latencyinter="0" \
typeintra="NVL" typeinter="PIX" samechannels="1">{CHANNEL}{CHANNEL}</graph>
  <graph id="1" pattern="1" crossnic="0" nchannels="2" speedintra="40" speedinter="40" latencyinter="0" \
typeintra="NVL" typeinter="PIX" samechannels="1">{CHANNEL}{CHANNEL}</graph>
</graphs>
"""
# Two ranks, 4096 B, by ring and LL: 6.6 us and 0.6 for each of 2(n-1) or n-1 steps, or for one message that is passed
# on in the same channels; half of two channels' 40 GB/s is bus bandwidth, of which a gathering has twice.
BY_RING_AND_LL = {
    "all_reduce": 7.8e-6 + 4096 / 40e9, "all_gather": 7.2e-6 + 4096 / 80e9, "reduce_scatter": 7.2e-6 + 4096 / 80e9,
    "broadcast": 7.2e-6 + 4096 / 40e9, "reduce": 7.2e-6 + 4096 / 40e9,
}  # fmt: skip


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL 2.27.7 of two H100-like GPUs, which leaves its graphs where it is told to."""
    monkeypatch.setenv("COMMBENCH_TEST_NCCL", "2.27.7")
    monkeypatch.setenv("COMMBENCH_TEST_GRAPHS", GRAPHS)
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_COLLNET_ENABLE", "NCCL_GRAPH_DUMP_FILE"):
        monkeypatch.delenv(name, raising=False)


def estimates(run: Run) -> dict[str, float | None]:
    """By collective, all of whose points say the same."""
    assert run.exit_code == 0, run.outcome.line
    assert {point["status"] for point in run.points} == {"ok"}, [point["reason"] for point in run.points]
    found = {point["collective"]: point["nccl_estimate_s"] for point in run.points}
    assert all(point["nccl_estimate_s"] == found[point["collective"]] for point in run.points)
    return found


@pytest.mark.usefixtures("nccl")
def test_points_hold_what_the_tuner_expects(launch: Launch) -> None:
    run, calls = launch(gpus=RANKS, collectives=tuple(COLLECTIVES))
    found = estimates(run)
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(BY_RING_AND_LL)
    assert {name for name, value in found.items() if value is None} == set(COLLECTIVES) - set(BY_RING_AND_LL)
    # Only rank 0's NCCL was told to write, into a file that is gone; the settings do not speak of it.
    assert [[call["path"] for call in mine if call["call"] == "dump_graphs"] != [] for mine in calls] == [True, False]
    (path,) = (Path(call["path"]) for call in calls[0] if call["call"] == "dump_graphs")
    assert not path.parent.exists()
    assert {tuple(point["backend_settings"]) for point in run.points} == {("device",)}


@pytest.mark.usefixtures("nccl")
def test_other_communicators_write_over_the_graphs_and_have_no_estimate(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMBENCH_TEST_GRAPHS", GRAPHS.replace('<gpu dev="1"/>', '<gpu dev="1"/><gpu dev="2"/>'))
    options = {"algorithms": ("library", "own:ring"), "collectives": ("all_reduce",), "timings": ("isolated",)}
    run, calls = launch(gpus=3, ranks=3, groups=("pair:0-1", "world"), sizes=(3 * 4096,), **options)
    assert run.exit_code == 0, run.outcome.line
    assert sum(call["call"] == "dump_graphs" for call in calls[0]) == 2
    found = {(point["group"], point["algorithm"]): point["nccl_estimate_s"] for point in run.points}
    assert found.pop(("world", "library")) == pytest.approx(6.6e-6 + 4 * 0.6e-6 + 3 * 4096 / (40e9 * 3 / 4))
    assert found == {("world", "own:ring"): None, ("pair:0-1", "library"): None, ("pair:0-1", "own:ring"): None}


# -- algorithms that it is told to use -------------------------------------------------------------


def without_own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where files that are not kept lie."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return scratch


def test_nccl_is_told_by_its_environment_and_its_log_is_read(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An NCCL whose log cannot be turned on and off: it is on throughout."""
    scratch = without_own_settings(monkeypatch, tmp_path)
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "INIT")
    monkeypatch.setenv("COMMBENCH_TEST_CHOICE", "RING LL")
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")
    run, calls = launch(gpus=RANKS, algorithms=("ring:ll",), collectives=collectives)
    skipped = [point for point in run.points if point["status"] == "skipped"]
    assert {(point["collective"], point["reason"]) for point in skipped} == {
        ("all_to_all", "nccl cannot be told by which algorithm to do all_to_all")
    }
    measured = [point for point in run.points if point["status"] != "skipped"]
    found = {(p["status"], p["algorithm"], p["used_algorithm"], p["protocol"], p["channels"]) for p in measured}
    assert found == {("ok", "ring:ll", "ring", "ll", 2)}
    assert not [point["note"] for point in measured if "NCCL took" in (point["note"] or "")]
    for point in measured:
        settings = point["backend_settings"]
        lists = [f"{name}:Ring" for name in ("allreduce", "allgather", "reducescatter", "broadcast", "reduce")]
        assert settings["NCCL_ALGO"] == ";".join(lists)
        assert settings["NCCL_PROTO"] == settings["NCCL_ALGO"].replace("Ring", "LL")
        assert (settings["NCCL_DEBUG"], settings["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,TUNING")
        assert "NCCL_DEBUG_FILE" not in settings
    assert not [call for mine in calls for call in mine if call["call"] == "reset"]
    assert list(scratch.iterdir()) == []


def test_what_nccl_chose_is_asked_in_a_call_of_its_own(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of every case, by rank 0's log, which no timed call writes into."""
    scratch = without_own_settings(monkeypatch, tmp_path)
    monkeypatch.setenv("COMMBENCH_TEST_RESET", "1")
    monkeypatch.setenv("COMMBENCH_TEST_CHOICE", "TREE SIMPLE")
    sweep = {"collectives": ("all_reduce", "all_to_all"), "executions": ("eager", "graph")}
    run, calls = launch(gpus=RANKS, timings=("isolated",), **sweep)
    check_points(run)
    found = {(p["collective"], p["algorithm"], p["used_algorithm"], p["protocol"], p["channels"]) for p in run.points}
    assert found == {("all_reduce", "library", "tree", "simple", 2), ("all_to_all", "library", None, None, None)}
    assert not [name for point in run.points for name in point["backend_settings"] if name.startswith("NCCL_DEBUG")]
    names = [[call["call"] for call in mine] for mine in calls]
    for mine in names:
        # On and off for each of four cases, one call in between: performed, or captured where it was timed so.
        assert mine.count("reset") == 8
    first = names[0]
    assert first.count("logged") == 2
    at = [index for index, name in enumerate(first) if name == "reset"]
    for on, off in zip(at[::2], at[1::2], strict=True):
        assert 2 <= off - on <= 4, first[on : off + 1]
    assert list(scratch.iterdir()) == []


def test_ranks_share_a_gpu_only_where_the_user_lets_them_and_have_no_times_to_compare(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    run, _ = launch(gpus=1, collectives=("all_reduce",), timings=("isolated",))
    assert run.exit_code == 0, run.outcome.line
    (point,) = run.points
    assert (point["status"], point["wrong"]) == ("ok", 0)
    assert point["tainted"] == "several ranks on one GPU: no timing"
