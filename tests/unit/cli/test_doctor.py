from __future__ import annotations

import importlib.metadata
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from commbench.backends import BACKENDS
from commbench.cli import doctor as module
from commbench.cli.doctor import Check, doctor, examine, probe_mpirun
from commbench.launch.place import FAMILIES, Place
from commbench.launch.start import find_mpirun

AT_REST = Check(subject="mpirun", ok=True, text="there")


def fake_mpirun(folder: Path, body: str) -> str:
    """An mpirun that answers --version at once and otherwise does what ``body`` says."""
    script = folder / "mpirun"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit 0\n{body}\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher in the environment, and no mpirun started."""
    for family in FAMILIES:
        for name in (*family.signs, family.rank, family.world):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "probe_mpirun", lambda mpirun, place: AT_REST)


def answer() -> tuple[int, dict[str, str]]:
    """The exit code of the command, and its lines by subject."""
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, [])
    return result.exit_code, {line.split()[0]: line for line in result.output.splitlines()}


@pytest.mark.usefixtures("quiet")
def test_every_line_of_the_answer() -> None:
    code, lines = answer()
    assert code == 0
    assert list(lines) == ["machine", "python", "GPU", "network", "launcher", "mpirun", *BACKENDS, "extras"]
    assert " yes torch " + importlib.metadata.version("torch") in lines["gloo"]
    assert "none: commbench run starts its own ranks" in lines["launcher"]
    assert "lo 127.0.0.1" in lines["network"]


@pytest.mark.usefixtures("quiet")
def test_it_imports_no_communication_library() -> None:
    before = {name for name in ("torch", "mpi4py") if name in sys.modules}
    list(examine())
    assert {name for name in ("torch", "mpi4py") if name in sys.modules} == before


@pytest.mark.usefixtures("quiet")
def test_the_launcher_seen_and_the_one_that_is_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "unclear: env: RANK and WORLD_SIZE set without" in answer()[1]["launcher"]
    monkeypatch.setenv("FLUX_TASK_RANK", "1")
    monkeypatch.setenv("FLUX_JOB_SIZE", "4")
    monkeypatch.setenv("FLUX_TASK_LOCAL_ID", "1")
    assert "flux: rank 1 of 4" in answer()[1]["launcher"]


@pytest.mark.usefixtures("quiet")
def test_a_machine_that_can_run_nothing_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    code, lines = answer()
    assert code == 2
    assert "pip install 'commbench[mpi]'" in lines["mpi"]


@pytest.mark.usefixtures("quiet")
def test_an_mpi_that_does_not_start_takes_its_backends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "probe_mpirun", lambda mpirun, place: Check(subject="mpirun", ok=False, text="broken"))
    code, lines = answer()
    assert code == 0
    assert " no " in lines["mpi"]
    assert " yes " in lines["gloo"]


def test_no_mpirun() -> None:
    check = probe_mpirun(None, None)
    assert check.ok is False
    assert "pip install 'commbench[mpi]'" in check.text


def test_below_a_launcher_mpirun_is_not_tried(tmp_path: Path) -> None:
    mpirun = fake_mpirun(tmp_path, f"touch {tmp_path}/started")
    place = Place(rank=0, world=2, local_rank=0, local_world=2, launcher="slurm")
    check = probe_mpirun(mpirun, place)
    assert check.ok is None
    assert "slurm started this" in check.text
    assert not (tmp_path / "started").exists()


def test_singletons_are_recognised(tmp_path: Path) -> None:
    check = probe_mpirun(fake_mpirun(tmp_path, "echo 1 Example MPI 1.0; echo 1 Example MPI 1.0"), None)
    assert check.ok is False
    assert "do not find one another" in check.text


def test_an_mpirun_that_fails_says_its_last_line(tmp_path: Path) -> None:
    check = probe_mpirun(fake_mpirun(tmp_path, "echo no such fabric >&2; exit 7"), None)
    assert check.ok is False
    assert "no such fabric" in check.text
    assert "\n" not in check.text


def test_an_mpirun_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.5)
    start = time.monotonic()
    check = probe_mpirun(fake_mpirun(tmp_path, "sleep 30"), None)
    assert check.ok is False
    assert "did not end within 0.5 s" in check.text
    assert time.monotonic() - start < 10


@pytest.mark.mpi
def test_the_mpirun_of_this_machine_starts_two_ranks() -> None:
    check = probe_mpirun(find_mpirun(), None)
    assert check.ok is True, check.text
    assert "started 2 ranks" in check.text


def test_extras_are_read_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = ["torch>=2.6", "typer>=0.1; extra == 'one'", "torch; extra == 'two'", 'no-such-thing-x; extra == "two"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wants)
    assert module._extras() == "one; to add: pip install 'commbench[two]'"
