from __future__ import annotations

from typing import Any

import pytest

from commbench.cli import doctor as module
from commbench.cli.doctor_gpus import gpu_lines

STATE = {"monotonic_s": 1.0, "reasons": ["idle"], "throttled_ns": {"sw_power_cap": 5}, "pcie_width": 16,
         "pcie_max_width": 16, "remap_pending": False, "links_up": [0], "link_errors": {}}  # fmt: skip


def machine(*states: dict[str, Any]) -> dict[str, Any]:
    return {
        "driver": "570.86.10",
        "devices": [{"index": n, "name": "Example GPU", "state": s} for n, s in enumerate(states)],
    }


def connected(**changes: Any) -> dict[str, Any]:
    every = [[None, "ok"], ["ok", None]]
    return {
        "pci": ["a", "b"], "peer_access": {"read": every, "write": every}, "nvlinks": [[0, 0], [0, 0]],
        "nvlinks_to_switches": [18, 18], "nics": {}, "nic_distance": {},
    } | changes  # fmt: skip


def test_two_healthy_gpus() -> None:
    assert list(gpu_lines(machine(STATE, STATE), connected())) == [
        ("2 x Example GPU, driver 570.86.10", None),
        ("peer access between all; 18 NVLinks each to switches", None),
    ]


def test_one_gpu_has_nobody_to_reach() -> None:
    alone = {"pci": ["a"], "peer_access": {"read": [[None]], "write": [[None]]}, "nics": {}}
    assert list(gpu_lines(machine(STATE), alone)) == [("1 x Example GPU, driver 570.86.10", None)]


def test_what_holds_now_is_wrong() -> None:
    hot = {**STATE, "reasons": ["hw_slowdown", "hw_thermal"], "pcie_width": 8}
    lines = list(gpu_lines(machine(STATE, hot), connected()))
    assert lines[1] == (
        "number 1: thermal slowdown, PCIe x8 instead of x16: its times are not to be compared with others", False
    )  # fmt: skip
    assert len(lines) == 3


def test_peers_that_do_not_reach_one_another() -> None:
    one_way = {
        "read": [[None, "ok"], ["topology not supported", None]],
        "write": [[None, {"error": "x"}], ["ok", None]],
    }
    (_, (text, _)) = gpu_lines(machine(STATE, STATE), connected(peer_access=one_way, nvlinks_to_switches=[0, 0]))
    assert text == "peer access missing: x for 1 of 2 pairs, topology not supported for 1 of 2 pairs; no NVLinks"


def test_the_nearest_adapters() -> None:
    distances = {"a": {"mlx5_0": "PXB", "mlx5_1": "PIX", "ib1": "PIX", "eth0": "SYS"}, "b": {"mlx5_0": None}}
    lines = list(gpu_lines(machine(STATE, STATE), connected(nics={"mlx5_0": {}}, nic_distance=distances)))
    assert lines[-1] == ("nearest adapters 0: mlx5_1, ib1 (PIX); 1: unknown", None)


def test_a_gpu_that_is_lost_and_a_topology_that_fails() -> None:
    lost = {"driver": "570", "devices": [{"index": 0, "error": "NVMLError: GPU is lost"}]}
    assert list(gpu_lines(lost, {"error": "x"})) == [
        ("1 x NVMLError: GPU is lost, driver 570", None), ("how they are connected is unknown: x", None)
    ]  # fmt: skip


def test_doctor_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "collect_gpus", lambda: machine(STATE, {**STATE, "remap_pending": True}))
    monkeypatch.setattr(module, "collect_topology", connected)
    checks = list(module._gpus())
    assert [check.subject for check in checks] == ["GPU"] * 3
    assert [check.ok for check in checks] == [None, False, None]


def test_a_driver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("version mismatch")

    monkeypatch.setattr(module, "collect_gpus", broken)
    monkeypatch.setenv("PATH", "")
    (check,) = module._gpus()
    assert check.text == "none found; NVML fails: RuntimeError: version mismatch"
