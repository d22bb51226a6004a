"""A whole run over doubles of torch.cuda and of NVML, in which one GPU's PCIe link replays: what is stored and shown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from commbench.cases import Sweep
from commbench.cli.show import show
from commbench.launch.run import Run
from commbench.launch.runner import run_local

CUDA = Path(__file__).parents[1] / "backends" / "cuda_double"
NVML = Path(__file__).with_name("pynvml_double.py")
# GPU 1 has replayed once more whenever it is asked. Ranks' devices of the other double are called so.
PYNVML = f"""
import importlib.util, itertools
spec = importlib.util.spec_from_file_location("pynvml_double", {str(NVML)!r})
double = importlib.util.module_from_spec(spec)
spec.loader.exec_module(double)

class Nvml(double.Nvml):
    _replays = itertools.count(7)

    def nvmlDeviceGetPcieReplayCounter(self, handle):
        return next(self._replays) if handle.number == 1 else 0

nvml = Nvml(*(double.Gpu(n, uuid=f"GPU-00000000-{{n}}", ancestors={{1 - n: 10}}) for n in (0, 1)))
globals().update({{name: getattr(nvml, name) for name in dir(nvml) if not name.startswith("_")}})
"""


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for folder in ("calls", "nvml"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nvml/pynvml.py").write_text(PYNVML)
    path = os.pathsep.join(filter(None, (str(tmp_path / "nvml"), str(CUDA), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("COMMBENCH_TEST_CUDA", str(tmp_path / "calls"))
    monkeypatch.setenv("COMMBENCH_TEST_GPUS", "2")
    sweep = Sweep(
        backends=("nccl",),
        collectives=("all_reduce",),
        timings=("isolated",),
        sizes=(4096,),
        iterations=4,
        budget_s=5.0,
    )
    return run_local(sweep, ranks=2, out=tmp_path / "results", on_event=lambda event: None)


def test_a_tainted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = measured(tmp_path, monkeypatch)
    manifest = json.loads((run.directory / "launches/0/manifest.json").read_text())
    (host,) = set(manifest["hosts"])
    assert [point["tainted"] for point in run.points] == [f"1 PCIe replays (rank 1 on {host})"]
    (said,) = manifest["tainted"]
    assert said.startswith(f"{host}: GPU 1: ")
    assert said.endswith(" PCIe replays")
    assert manifest["unwatched"] == []
    facts = json.loads((run.directory / f"hosts/{host}.json").read_text())
    assert [gpu["index"] for gpu in facts["before"]["gpus"]["devices"]] == [0, 1]
    assert facts["before"]["gpu_topology"]["ancestors"] == [[None, "PIX"], ["PIX", None]]
    assert [gpu["pci"] for gpu in facts["after"]["gpus"]["devices"]] == ["0000:1b:00.0", "0000:2b:00.0"]
    show(str(run.directory))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"tainted: 1 PCIe replays (rank 1 on {host})" in shown
    assert f"tainted: 1 of 1 points; {said}" in shown
