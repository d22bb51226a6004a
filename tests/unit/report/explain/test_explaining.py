"""From a run's directory to text and JSON, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commbench.cli.errors import UsageError
from commbench.cli.explain import Format, explain
from commbench.models import Link, Links

AFTER = ((4e-8, 4e-8), (1.6e-7, 1.6e-7), (4e-8, 4e-8))
SLOW_LINKS = Links(other_host=Link(latency_s=40e-6, seconds_per_byte=4e-8), host_rates=AFTER)


def test_text_of_a_sound_run(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.store(collectives=("all_reduce",), sizes=tuple(64 * 4**k for k in range(9)))
    assert explain(run=str(run)) == 0
    title, *lines, empty, last = capsys.readouterr().out.splitlines()
    assert title == "all_reduce mpi: 4 ranks on 4 hosts, float32 sum out of place, isolated"
    assert lines[0].split()[:4] == ["looks", "like", "ring", "64"]
    assert "0% off" in lines[0]
    assert lines[1].split() == ["regimes", "one;", "time", "=", "latency", "+", "bytes", "/", "rate", "in", "each,",
                                "right", "within", "0%"]  # fmt: skip
    assert lines[-1].split(maxsplit=1) == ["cause", "none: as fast as its models say"]
    assert (empty, last) == ("", f"run {run.name}: none: as fast as its models say")


def test_json_says_the_same(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ("a", "b", "c")
    run = lab.store(hosts=hosts, links=SLOW_LINKS, rates_after=AFTER, collectives=("all_gather",))
    assert explain(run="2", results=run.parents[1], output=Format.json) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run_id"] == run.name
    assert (found["cause"]["kind"], found["cause"]["cause"], found["cause"]["level"]) == (
        "slow_host",
        "slow host b",
        "high",
    )
    assert found["verdict"].startswith("slow host b (high): ")
    (curve,) = found["curves"]
    assert (curve["collective"], curve["ranks"], curve["sizes"][-1]) == ("all_gather", 3, 1 << 22)
    assert curve["looks_like"][0]["algorithm"] == "ring"
    assert curve["below_every"] == []  # the models know of the slow host
    assert curve["causes"][0] == found["cause"]


def test_several_launches_are_one_curve(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.store(launches=3, collectives=("all_reduce",))
    explain(run=str(run))
    assert capsys.readouterr().out.count("looks like") == 1


@pytest.mark.parametrize("damage", ["garbled", "missing", "without links", "of a crash"])
def test_what_a_manifest_lacks_is_not_known(lab: Any, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    run = lab.store()
    file = run / "launches" / "0" / "manifest.json"
    known = json.loads(file.read_text())
    if damage == "garbled":
        file.write_text("{")
    elif damage == "missing":
        file.unlink()
    elif damage == "without links":
        known["backends"]["mpi"]["links"] = None
        file.write_text(json.dumps(known))
    else:
        del known["after"], known["backends"]["mpi"]["host_rates_after"]
        file.write_text(json.dumps(known))
    assert explain(run=str(run)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "none: as fast as its models say" if damage == "of a crash" else "its links were not calibrated"
    )


def test_a_run_without_times(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.store(change=lambda point: setattr(point, "status", "skipped"))
    with pytest.raises(AssertionError):
        lab.verdict(change=lambda point: setattr(point, "status", "skipped"))
    assert explain(run=str(run)) == 0
    assert capsys.readouterr().out == f"run {run.name}: none: it has no times\n"


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist|holds no runs|is called"):
        explain(run="1999", results=tmp_path)


def test_names_from_outside_cannot_steer_a_terminal(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.store(hosts=("a", "b\x1b[31m", "c"), links=SLOW_LINKS, rates_after=AFTER)
    explain(run=str(run))
    out = capsys.readouterr().out
    assert "slow host b\ufffd[31m" in out
    assert "\x1b" not in out


def test_the_sample_run_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(run=str(Path(__file__).parents[4] / "results" / "sample")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("run ")
