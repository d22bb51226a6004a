"""``commbench calibrate`` on this host, and runs that take its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import commbench
from commbench.store.calibration import read_calibration

pytestmark = pytest.mark.mpi


def command(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commbench", *words], check=False, capture_output=True, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip


def test_calibrate_then_run_with_its_links(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    done = command("calibrate", "--file", str(file), "--out", str(tmp_path / "c"), "--label", "here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"calibration: {file}\n")
    for backend in ("gloo", "mpi"):
        assert f"{backend}: 2 ranks on 1 host\n" in done.stdout
        found = read_calibration(file).backend(backend)
        assert {w["pattern"] for w in found.windows} == {"one_way", "exchange", "stream"}
        assert found.links.same_host is not None
        assert found.links.other_host is None
    (run,) = (tmp_path / "c").glob("*/*")
    assert json.loads((run / "end.json").read_text())["status"] == "ok"
    assert (run / "calibration.json").read_bytes() == file.read_bytes()

    done = command(
        "run", "--calibration", str(file), "--collective", "all_reduce", "--algorithm", "library,own:ring", "--sizes",
        "64K", "--iters", "5", "--out", str(tmp_path / "r"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path / "r")
    for backend in ("gloo", "mpi"):
        mine = frame[frame["backend"] == backend]
        assert mine["calibration_id"].eq(read_calibration(file).backend(backend).links.calibration_id).all()
        assert mine.loc[mine["algorithm"] == "own:ring", "predicted_s"].gt(0).all()
    assert frame["wire_bytes"].isna().all()  # nothing leaves this host
    assert not list((tmp_path / "r").rglob("calibration.json"))


def test_a_run_leaves_a_calibration_that_another_takes(tmp_path: Path) -> None:
    one = ("--backend", "mpi", "--collective", "barrier", "--timing", "isolated", "--iters", "1")
    assert command("run", *one, "--out", str(tmp_path / "a")).returncode == 0
    (run,) = (tmp_path / "a").glob("*/*")
    done = command("run", *one, "--calibration", str(run), "--out", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr
    done = command("run", *one, "--calibration", str(run), "--backend", "gloo", "--out", str(tmp_path / "b"))
    assert done.returncode == 2
    assert "holds no gloo, only mpi" in done.stderr
    assert "Traceback" not in done.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for words, line in (
        (("calibrate", "--backend", "glo"), "unknown backend 'glo': did you mean 'gloo'?"),
        (("calibrate", "--file", str(tmp_path / "no" / "where.json")), "--file: there is no directory"),
        (("calibrate", "--ranks", "0"), "--ranks: 0 is too small"),
        (("calibrate", "--nodes", "2"), "--nodes 2 needs a launcher"),
        (("run", "--calibration", str(tmp_path / "none.json")), "write one with `commbench calibrate`"),
    ):
        done = command(*words, "--out", str(tmp_path))
        assert done.returncode == 2, words
        assert line in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not list(tmp_path.glob("2*"))
