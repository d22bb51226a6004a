"""The sample run in results/ was written by an earlier commit: what is stored must stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest

import commbench
from commbench.cases import Layout, Sweep
from commbench.cli.show import show

SAMPLE = Path(__file__).parents[3] / "results" / "sample"


def test_the_sample_is_read_whole() -> None:
    frame = commbench.load(SAMPLE)
    assert len(frame) == 32
    assert frame["status"].eq("ok").all()
    assert frame["wrong"].eq(0).all()
    assert frame.groupby(["backend", "collective", "timing"]).size().eq(4).all()


def test_its_cases_are_still_the_same_cases() -> None:
    sweep = Sweep(collectives=("all_reduce", "all_gather"), sizes=(8, 4096, 262144, 4194304))
    now = {case.case_id for case in sweep.expand(Layout(hosts=("vm", "vm")))}
    assert set(commbench.load(SAMPLE)["case_id"]) == now


def test_show_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(run=str(SAMPLE)) == 0
    text = capsys.readouterr().out
    assert "ended ok; 32 points (32 ok)" in text
    assert text.count("rates in GB/s") == 4
