"""Launches of several sets of processes: interleaved, each in an order of its own, under variants, bound to cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import commbench
from commbench.launch.order import launch_seed

pytestmark = pytest.mark.mpi
COMMAND = (sys.executable, "-m", "commbench", "run")
# What gloo's ranks say of their threads and MPI's of their transports shows that both see what the variant sets.
VARIANT = """many:OMP_NUM_THREADS=2,OMPI_MCA_btl="self,sm",OMPI_MCA_no_such=1"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, Path, str]:
    """gloo and MPI, with and without the variant, twice; on cores of their own where there are two."""
    out = tmp_path_factory.mktemp("launches")
    bind = "core" if len(os.sched_getaffinity(0)) > 1 else "numa"
    found = subprocess.run(
        [*COMMAND, "--collective", "all_reduce,all_gather", "--sizes", "8,512,4K", "--timing", "isolated",
         "--iters", "20", "--seed", "7", "--launches", "2", "--variant", VARIANT, "--bind", bind, "--out", str(out)],
        check=False, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    (path,) = out.glob("*/*")
    return commbench.load(path), path, found.stderr


def manifests(path: Path) -> list[dict[str, Any]]:
    folders = sorted((path / "launches").iterdir(), key=lambda folder: int(folder.name))
    return [json.loads((folder / "manifest.json").read_text()) for folder in folders]


def test_launches_of_all_sets_take_turns(done: tuple[pd.DataFrame, Path, str]) -> None:
    frame, path, said = done
    sets = [(next(iter(one["backends"])), one["variant"], one["repetition"]) for one in manifests(path)]
    assert sets == [
        ("gloo", "default", 0), ("mpi", "default", 0), ("gloo", "many", 0), ("mpi", "many", 0),
        ("mpi", "many", 1), ("gloo", "many", 1), ("mpi", "default", 1), ("gloo", "default", 1),
    ]  # fmt: skip
    assert "launch 3 of 8: gloo, variant many" in said.splitlines()
    assert frame["status"].eq("ok").all()
    # The same six cases of each library in both variants, twice.
    assert (
        frame.groupby(["backend", "variant"])["case_id"].agg(["size", "nunique"]).to_numpy().tolist() == [[12, 6]] * 4
    )
    assert frame["case_id"].nunique() == 12
    run = json.loads((path / "manifest.json").read_text())
    settings = {"OMP_NUM_THREADS": "2", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_no_such": "1"}
    assert run["variants"] == {"default": {}, "many": settings}
    assert run["overridden"] == {"many": {"OMP_NUM_THREADS": "1"}}
    assert (run["launches"], run["cases"]) == (8, 48)
    assert json.loads((path / "end.json").read_text())["repetitions"] == 2


def test_every_launch_has_an_order_of_its_own_and_keeps_it(done: tuple[pd.DataFrame, Path, str]) -> None:
    frame, path, _ = done
    orders = []
    for number, one in enumerate(manifests(path)):
        assert one["seed"] == launch_seed(7, number)
        assert frame.loc[frame["launch"] == number, "case_id"].tolist() == one["order"]
        orders.append(tuple(one["order"]))
    assert len(set(orders)) == len(orders)
    assert frame["seed"].eq(7).all()  # of the data: the same in all


def test_ranks_see_their_variant_and_the_library_is_asked(done: tuple[pd.DataFrame, Path, str]) -> None:
    frame, path, _ = done
    for one in manifests(path):
        for name, backend in one["backends"].items():
            told = {key: backend["settings"].get(key) for key in ("threads", "btl", "no_such")}
            several = one["variant"] == "many"
            expected = {"gloo": ("2" if several else "1", None, None), "mpi": (None, None, None)}[name]
            if name == "mpi" and several:
                expected = (None, "self,sm", "(this Open MPI has no such setting)")
            assert tuple(told.values()) == expected
    settings = frame[(frame["backend"] == "mpi") & (frame["variant"] == "many")]["backend_settings"]
    assert {each["btl"] for each in settings} == {"self,sm"}


def test_where_ranks_ran_is_known(done: tuple[pd.DataFrame, Path, str]) -> None:
    frame, path, _ = done
    for number, one in enumerate(manifests(path)):
        facts = one["facts"]
        assert all(isinstance(value, (int, float, str)) for value in facts.values())
        assert (facts["order"], facts["variant"], facts["bind"]) == (number, one["variant"], one["bind"])
        assert [facts["rank0.cores"], facts["rank1.cores"]] == one["bound"]
        if one["bind"] == "core":
            assert one["bound"] == [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
            assert [facts["rank0.core"], facts["rank1.core_end"]] == [int(core) for core in one["bound"]]
            assert facts["distinct_cores"] == facts["distinct_cores_end"] == 2
    starts = [one["facts"]["started_s"] for one in manifests(path)]
    assert starts == sorted(starts)
    assert frame["preemptions"].ge(0).all()
    assert frame["steal_s"].ge(0).all()


def test_ctrl_c_between_launches_ends_in_order(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--backend", "mpi", "--collective", "barrier", "--timing", "streamed", "--iters", "5",
         "--launches", "2", "--spread", "1h", "--out", str(tmp_path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.rstrip())
        if line.startswith("next launch in "):
            break
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1].splitlines()
    assert time.monotonic() - asked < 20
    assert process.returncode == 3, [*lines, *rest]
    (path,) = tmp_path.glob("*/*")
    end = json.loads((path / "end.json").read_text())
    assert (end["status"], end["reason"], end["exit_code"]) == ("interrupted", "interrupted between launches", 3)
    assert (end["points"], end["repetitions"]) == ({"ok": 1}, 1)
    assert rest[0] == f"commbench: interrupted between launches; 1 points kept in {path}"
    assert lines[-1].startswith(("next launch in 17", "next launch in 18"))  # half an hour
