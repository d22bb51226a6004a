"""The data check must be able to fail: a library that errs is caught, in the very run that times it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import commbench
from commbench.launch.start import find_mpirun, mpirun_command, mpirun_environment

pytestmark = pytest.mark.mpi
FLAWED = Path(__file__).parent / "flawed_library"


def run(tmp_path: Path, links: Path, flaw: str, collective: str, *options: str) -> tuple[int, pd.DataFrame, str]:
    path = os.pathsep.join(filter(None, (str(FLAWED), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "gloo", "--collective", collective, "--sizes", "4K",
         "--calibration", str(links), "--out", str(tmp_path), *options],
        check=False, capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": path, "COMMBENCH_TEST_FLAW": flaw},
    )  # fmt: skip
    return done.returncode, commbench.load(tmp_path), done.stdout + done.stderr


def test_a_sound_library_passes_the_same_run(tmp_path: Path, links_file: Path) -> None:
    code, frame, text = run(tmp_path, links_file, "", "all_reduce", "--iters", "60")
    assert code == 0, text
    assert frame["status"].eq("ok").all()
    assert frame["wrong"].eq(0).all()
    isolated = frame[frame["timing"] == "isolated"].iloc[0]
    assert (isolated["samples"] + isolated["discarded"], isolated["verified"]) == (60, 60)


def test_one_flipped_element_of_one_isolated_operation(tmp_path: Path, links_file: Path) -> None:
    code, frame, text = run(tmp_path, links_file, "flip", "all_reduce", "--timing", "isolated", "--iters", "60")
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
def test_nothing_done_and_swapped_blocks(tmp_path: Path, links_file: Path, flaw: str, collective: str) -> None:
    code, frame, _ = run(tmp_path, links_file, flaw, collective, "--iters", "20")
    assert code == 3
    assert frame["timing"].tolist() == ["isolated", "streamed"]
    assert frame["status"].eq("wrong").all()
    assert frame["wrong"].gt(100).all()  # of 1024 elements: not a chance hit
    assert frame["busbw_Bps"].isna().all()


@pytest.fixture(scope="module")
def flawed_mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that comes before MPI's own, for C and for Python alike."""
    mpirun = find_mpirun()
    assert mpirun is not None
    compiler = shutil.which("mpicc", path=str(Path(mpirun).parent))
    if compiler is None or shutil.which("cc") is None:
        pytest.skip("no mpicc beside mpirun, or no cc: apt-get install gcc libc6-dev")
    target = tmp_path_factory.mktemp("flawed") / "flawed_mpi.so"
    source = str(FLAWED / "flawed_mpi.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), source], check=True, timeout=60)
    return target


@pytest.mark.parametrize(
    ("flaw", "loop"), [("", "compiled"), ("flip", "compiled"), ("nothing", "compiled"), ("flip", "python")]
)
def test_mpi_that_errs_is_caught_whatever_loop_times_it(
    tmp_path: Path, links_file: Path, flawed_mpi: Path, flaw: str, loop: str
) -> None:
    mpirun = find_mpirun()
    assert mpirun is not None
    # numpy does the additions of own algorithms where Python is the loop.
    algorithms = "library,own:ring" if loop == "compiled" else "library"
    done = subprocess.run(
        [*mpirun_command(mpirun, 2, oversubscribed=True), "env", f"LD_PRELOAD={flawed_mpi}", sys.executable, "-m",
         "commbench", "run", "--backend", "mpi", "--collective", "all_reduce", "--algorithm", algorithms, "--sizes",
         "4K", "--iters", "60", "--calibration", str(links_file), "--out", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=150,
        env={**mpirun_environment(os.environ, oversubscribed=True), "COMMBENCH_TEST_FLAW": flaw,
             "COMMBENCH_COMPILED": "1" if loop == "compiled" else "0"},
    )  # fmt: skip
    frame = commbench.load(tmp_path)
    assert {settings["loop"].partition(":")[0] for settings in frame["backend_settings"]} == {loop}
    assert set(frame["algorithm"]) == set(algorithms.split(","))
    isolated = frame[frame["timing"] == "isolated"]
    if not flaw:
        assert done.returncode == 0, done.stderr
        assert frame["status"].eq("ok").all()
        assert isolated["verified"].ge(30).all()  # the first round whole, later ones as far as time allows
        return
    assert done.returncode == 3
    assert isolated["status"].eq("wrong").all()
    assert isolated["busbw_Bps"].isna().all()
    if flaw == "nothing":
        assert frame["wrong"].gt(100).all()  # of 1024 elements: not a chance hit
    else:
        assert isolated["wrong"].between(1, 10).all()
