"""``commbench moe`` with real processes on gloo and MPI: data, load, bytes, phases, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commbench
from commbench.moe.conventions import CONVENTIONS
from commbench.moe.routing import Router
from commbench.workloads import Workload

pytestmark = pytest.mark.mpi

MOE = [sys.executable, "-m", "commbench", "moe"]
SHAPE = ["--hidden", "256", "--experts", "16", "--topk", "4"]


def moe(*words: str, timeout: float = 170, **changes: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MOE, *words], capture_output=True, text=True, check=False, timeout=timeout, **changes)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, links_file: Path) -> Any:
    """Both backends on four ranks, all kinds of dispatch."""
    out = tmp_path_factory.mktemp("moe")
    done = moe(
        "--backend", "gloo,mpi", "--ranks", "4", "--tokens", "40", *SHAPE, "--mode", "throughput,low_latency",
        "--dispatch", "flat,hierarchical", "--dtype", "fp8,bf16", "--routing", "uniform,imbalance:2.0", "--iters", "6",
        "--calibration", str(links_file), "--seed", "3", "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return commbench.load(out), done.stdout


def test_every_case_is_right_and_checked(four: Any) -> None:
    frame, _ = four
    # 2 backends x 2 modes x 2 dispatches x 2 routings, of dispatches in 2 types and combines in one.
    assert len(frame) == 2 * 8 * 3
    skipped = frame[frame["status"] == "skipped"]
    assert set(skipped["reason"]) == {"low latency goes straight to the experts' ranks: there is no hierarchical form"}
    assert len(skipped) == 2 * 2 * 3
    ok = frame[frame["status"] == "ok"]
    assert len(ok) + len(skipped) == len(frame)
    assert (ok["wrong"] == 0).all()
    assert (ok["verified"] > 0).all()
    assert (ok["samples"] + ok["discarded"] == 6).all()


def test_loads_are_what_routing_says(four: Any) -> None:
    frame, _ = four
    ok = frame[frame["status"] == "ok"]
    for point in ok.to_dict("records"):
        workload = Workload(**point["workload"])
        if point["routing"] == "imbalance:2":
            assert point["load"]["rank_max_over_mean"] == pytest.approx(2.0, rel=0.01)
            assert int(np.argmax(point["load"]["rank_tokens"])) == 0
        # Nothing is masked: four ranks' tokens go to four experts each.
        assert sum(point["load"]["rank_tokens"]) == pytest.approx(4 * workload.tokens * 4)
        assert point["bytes"] == workload.tokens * 4 * workload.token_bytes(point["dtype"])
        assert point["convention_bytes"]["logical"] == pytest.approx(point["bytes"])
        assert set(point["convention_bytes"]) == set(CONVENTIONS)


def test_bandwidths_are_of_the_convention_that_is_named(four: Any) -> None:
    frame, text = four
    ok = frame[frame["status"] == "ok"]
    for point in ok.to_dict("records"):
        low = point["mode"] == "low_latency"
        assert point["bytes_convention"] == ("deepep_low_latency" if low else "deepep_normal")
        of = point["convention_bytes"][point["bytes_convention"]]
        assert point["algbw_Bps"] == pytest.approx(of / point["time_s"])
    assert "GB/s: of deepep_low_latency" in text
    assert "GB/s: of deepep_normal" in text


def test_phases_add_up_and_what_stands_beside_is_there(four: Any) -> None:
    frame, _ = four
    ok = frame[frame["status"] == "ok"]
    names = {
        ("moe_dispatch", "own:flat", "throughput"): ["layout", "quantise", "counts", "send", "recv", "permute"],
        ("moe_dispatch", "own:hierarchical", "throughput"): [
            "layout", "quantise", "counts", "send", "recv", "forward", "permute",
        ],
        ("moe_combine", "own:hierarchical", "throughput"): ["permute", "gather", "send", "recv", "reduce"],
        ("moe_dispatch", "own:flat", "low_latency"): ["layout", "quantise", "send", "recv", "permute"],
    }  # fmt: skip
    for point in ok.to_dict("records"):
        wanted = names.get((point["collective"], point["algorithm"], point["mode"]))
        assert wanted is None or list(point["phases"]) == [*wanted, "total"]
        parts = [seconds for name, seconds in point["phases"].items() if name != "total"]
        # What is left are the stamps themselves, and whatever put a rank off its core just between two of them.
        # What is between the last mark and the end is stamps, and whoever took the core meanwhile.
        assert 0.5 * point["phases"]["total"] <= sum(parts) <= point["phases"]["total"]
        assert point["predicted_s"] > 0
        assert point["matched"]["time_s"] > 0
        assert len(point["rank_times"]) == 4
        assert 0 <= point["straggler"]["rank"] < 4
        assert (point["quantise_error"] is not None and point["quantise_error"] == point["quantise_error"]) == (
            point["dtype"] == "float8_e4m3fn"
        )


def test_dispatch_and_combine_on_all_backends_route_alike(four: Any) -> None:
    frame, _ = four
    ok = frame[(frame["status"] == "ok") & (frame["routing"] == "uniform") & (frame["tokens"] == 40)]
    loads = {str(point["load"]["rank_tokens"]) for point in ok.to_dict("records")}
    assert len(loads) == 1


def test_a_recorded_routing_with_masks_uneven_tokens_copies_and_known_counts(tmp_path: Path, links_file: Path) -> None:
    ids = np.argsort(np.random.default_rng(1).random((2, 3, 12, 16)), axis=3)[..., :4]
    ids[:, 0, :, 0] = -1
    np.savez(tmp_path / "ids.npz", ids=ids)
    done = moe(
        "--backend", "mpi", "--ranks", "3", "--tokens", "12", *SHAPE, "--routing", f"file:{tmp_path / 'ids.npz'}",
        "--experts-on", "eplb:2", "--counts", "known", "--timing", "isolated,streamed", "--iters", "4", "--calibration",
        str(links_file), "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path / "out")
    assert (frame["status"] == "ok").all()
    assert (frame["wrong"] == 0).all()
    for load in frame["load"]:
        # Two iterations in turn, each with 12 masked of 3 x 12 x 4.
        assert sum(load["rank_tokens"]) == pytest.approx(3 * 12 * 4 - 12)
        assert "rank_max_over_mean_before" in load


FLAWED = Path(__file__).parent / "flawed_library"


@pytest.mark.parametrize(("flaw", "mode"), [("", "throughput"), ("late", "throughput"), ("late", "low_latency")])
def test_one_wrong_bit_of_an_exchange_is_found(tmp_path: Path, links_file: Path, flaw: str, mode: str) -> None:
    path = os.pathsep.join(filter(None, (str(FLAWED), os.environ.get("PYTHONPATH"))))
    done = moe(
        "--backend", "gloo", "--ranks", "2", "--tokens", "20", "--hidden", "2048", "--experts", "8", "--topk", "2",
        "--mode", mode, "--iters", "4", "--seed", "5", "--calibration", str(links_file), "--out", str(tmp_path),
        env={**os.environ, "PYTHONPATH": path, "COMMBENCH_TEST_FLAW": flaw},
    )  # fmt: skip
    frame = commbench.load(tmp_path).set_index("collective")
    if not flaw:
        assert done.returncode == 0, done.stderr
        assert frame["status"].eq("ok").all()
        return
    assert done.returncode == 3
    assert "2 points have wrong data" in done.stderr
    assert frame["status"].eq("wrong").all()
    assert frame["algbw_Bps"].isna().all()
    assert frame["busbw_Bps"].isna().all()
    # Each time a bit of one value, which a record's two experts both get where they are of this rank.
    dispatch = frame.loc["moe_dispatch"]
    assert 1 <= dispatch["wrong"] <= 2 * dispatch["verified"]
    assert frame.loc["moe_combine", "wrong"] >= 1


def test_what_does_not_fit_is_skipped_with_the_bytes_that_it_needs(tmp_path: Path, links_file: Path) -> None:
    done = moe("--backend", "gloo", "--tokens", "64M", *SHAPE, "--calibration", str(links_file), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path)
    assert frame["status"].eq("skipped").all()
    assert frame["reason"].str.fullmatch(r"needs [0-9.]+ GB a rank and [0-9.]+ GB is available").all()
    assert frame["tokens"].eq(64 << 20).all()
    # Two ranks' 2**26 tokens of 512 bytes go to both ranks: as many are kept of each, and of four selections a row.
    needs = float(frame["reason"][0].split()[1]) * 1e9
    assert needs > (2**26 + 2**28) * 512
    assert "every case was skipped" in done.stdout


def test_a_killed_rank_is_named_and_points_are_kept(tmp_path: Path, links_file: Path) -> None:
    run = subprocess.Popen(
        [*MOE, "--backend", "mpi", "--ranks", "3", "--tokens", "16", *SHAPE, "--uneven-experts", "--for", "2m",
         "--calibration", str(links_file), "--out", str(tmp_path)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert run.stderr is not None
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("points.jsonl")) or not next(tmp_path.rglob("points.jsonl")).stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    ranks = [
        int(path.name) for path in Path("/proc").iterdir()
        if path.name.isdigit() and _is_rank(path, str(run.pid), "2")
    ]  # fmt: skip
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 3
    assert "rank 2" in said
    assert len(commbench.load(tmp_path)) >= 1


def _is_rank(path: Path, root: str, rank: str) -> bool:
    """Whether this process is the rank of that number below ``root``."""
    try:
        environment = (path / "environ").read_bytes().split(b"\0")
        if f"OMPI_COMM_WORLD_RANK={rank}".encode() not in environment:
            return False
        while path.name not in (root, "1", "0"):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            path = path.parent / parent
        return path.name == root
    except OSError:
        return False


def test_routers_agree_across_processes() -> None:
    """What the ranks of a run rely on: another interpreter works out the same selections."""
    script = (
        "from commbench.moe.routing import Router; from commbench.workloads import Workload;"
        "r = Router(Workload(tokens=9, hidden=128, experts=8, topk=3, routing='zipf:1.2'), 4, (0, 0, 1, 1), 5);"
        "print(r.selections(2, 7)[0].tolist())"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    router = Router(Workload(tokens=9, hidden=128, experts=8, topk=3, routing="zipf:1.2"), 4, (0, 0, 1, 1), 5)
    assert other.strip() == str(router.selections(2, 7)[0].tolist())
