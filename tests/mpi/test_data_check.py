"""The data check must be able to fail: a library that errs is caught, in the very run that times it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import commbench

pytestmark = pytest.mark.mpi
FLAWED = Path(__file__).parent / "flawed_library"


def run(tmp_path: Path, flaw: str, collective: str, *options: str) -> tuple[int, pd.DataFrame, str]:
    path = os.pathsep.join(filter(None, (str(FLAWED), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "gloo", "--collective", collective, "--sizes", "4K",
         "--out", str(tmp_path), *options],
        check=False, capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": path, "COMMBENCH_TEST_FLAW": flaw},
    )  # fmt: skip
    return done.returncode, commbench.load(tmp_path), done.stdout + done.stderr


def test_a_sound_library_passes_the_same_run(tmp_path: Path) -> None:
    code, frame, text = run(tmp_path, "", "all_reduce", "--iters", "60")
    assert code == 0, text
    assert frame["status"].eq("ok").all()
    assert frame["wrong"].eq(0).all()
    isolated = frame[frame["timing"] == "isolated"].iloc[0]
    assert (isolated["samples"] + isolated["discarded"], isolated["verified"]) == (60, 60)


def test_one_flipped_element_of_one_isolated_operation(tmp_path: Path) -> None:
    code, frame, text = run(tmp_path, "flip", "all_reduce", "--timing", "isolated", "--iters", "60")
    assert code == 3
    (point,) = frame.to_dict("records")
    assert (point["status"], point["wrong"]) == ("wrong", 1)
    assert pd.isna(point["algbw_Bps"])
    assert pd.isna(point["busbw_Bps"])
    assert "1 points have wrong data" in text


@pytest.mark.parametrize(
    ("flaw", "collective"),
    [("nothing", "all_reduce"), ("nothing", "all_gather"), ("swap", "all_gather"), ("swap", "all_to_all"),
     ("swap", "broadcast")],
)  # fmt: skip
def test_nothing_done_and_swapped_blocks(tmp_path: Path, flaw: str, collective: str) -> None:
    code, frame, _ = run(tmp_path, flaw, collective, "--iters", "20")
    assert code == 3
    assert frame["timing"].tolist() == ["isolated", "streamed"]
    assert frame["status"].eq("wrong").all()
    assert frame["wrong"].gt(100).all()  # of 1024 elements: not a chance hit
    assert frame["busbw_Bps"].isna().all()
