"""One rule of taint at a time, on states that differ in one thing, and the watch that takes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.provenance.gpu_taint import GROWING, LEAST_SHARE, GpuWatch, degraded, joined, taint

_spec = importlib.util.spec_from_file_location("pynvml_double", Path(__file__).with_name("pynvml_double.py"))
assert _spec and _spec.loader
double = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(double)


def state(at_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    healthy = {
        "monotonic_s": at_s, "reasons": [], "throttled_ns": {}, "ecc_uncorrected": 0, "remap_pending": False,
        "remap_failed": False, "pcie_replays": 5, "pcie_width": 16, "pcie_max_width": 16, "links_up": [0, 1, 2],
        "link_errors": {"replay": 1, "recovery": 1, "crc": 1},
    }  # fmt: skip
    return healthy | changes


def between(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Of two seconds."""
    return taint(state(10.0, **before), state(12.0, **after))


def test_nothing_happened() -> None:
    assert between({}, {}) is None


@pytest.mark.parametrize("name", ["idle", "application_clocks", "sync_boost", "display_clocks", "reliability"])
def test_reasons_that_are_no_fault(name: str) -> None:
    assert between({"reasons": [name]}, {"reasons": [name]}) is None
    assert between({"throttled_ns": {name: 0}}, {"throttled_ns": {name: 2_000_000_000}}) is None


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("sw_thermal", "thermal slowdown"), ("hw_thermal", "thermal slowdown"), ("hw_power_brake", "power brake"),
        ("sw_power_cap", "power cap"), ("board_limit", "board limit"), ("hw_slowdown", "hardware slowdown"),
    ],
)  # fmt: skip
def test_without_a_counter_one_moment_is_enough(reason: str, text: str) -> None:
    assert between({"reasons": [reason]}, {}) == text
    assert between({}, {"reasons": ["idle", reason]}) == text


@pytest.mark.parametrize(
    ("counter", "text"),
    [
        ("thermal", "thermal slowdown"), ("sw_thermal", "thermal slowdown"), ("hw_thermal", "thermal slowdown"),
        ("hw_power_brake", "power brake"), ("sw_power_cap", "power cap"), ("board_limit", "board limit"),
    ],
)  # fmt: skip
def test_counters_tell_the_share_of_the_time(counter: str, text: str) -> None:
    # 0.5 s of 2 s.
    grown = between({"throttled_ns": {counter: 10**9}}, {"throttled_ns": {counter: 1_500_000_000}})
    assert grown == f"{text} 25 % of the time"


def test_several_counters_of_one_thing_give_the_greatest_share() -> None:
    after = {"thermal": 400_000_000, "hw_thermal": 600_000_000}
    assert between({"throttled_ns": {"thermal": 0, "hw_thermal": 0}}, {"throttled_ns": after}) == (
        "thermal slowdown 30 % of the time"
    )


def test_a_counter_that_stands_still_outweighs_a_single_moment_but_not_two() -> None:
    still = {"throttled_ns": {"sw_power_cap": 7}}
    held = {**still, "reasons": ["sw_power_cap"]}
    assert between(held, still) is None
    assert between(still, held) is None
    assert between(held, held) == "power cap"


def test_a_share_that_moves_no_median() -> None:
    counters = [{"throttled_ns": {"sw_power_cap": ns}} for ns in (0, 19_000_000, 20_000_000)]  # of 2 s: 0.95 %, 1 %
    assert LEAST_SHARE == 0.01
    assert between(counters[0], counters[1]) is None
    assert between(counters[0], counters[2]) == "power cap 1 % of the time"


def test_more_than_all_of_the_time_is_all_of_it() -> None:
    assert between({"throttled_ns": {"sw_power_cap": 0}}, {"throttled_ns": {"sw_power_cap": 9 * 10**9}}) == (
        "power cap 100 % of the time"
    )


def test_a_hardware_slowdown_is_named_by_its_cause() -> None:
    assert between({}, {"reasons": ["hw_slowdown", "hw_thermal"]}) == "thermal slowdown"
    assert between({}, {"reasons": ["hw_slowdown", "hw_power_brake"]}) == "power brake"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ecc_uncorrected", "2 uncorrected ECC errors"), ("pcie_replays", "2 PCIe replays"),
        ("link_errors.replay", "2 NVLink replays"), ("link_errors.recovery", "2 NVLink recoveries"),
        ("link_errors.crc", "2 NVLink CRC errors"), ("link_errors.link_recovery", "2 NVLink recoveries"),
        ("link_errors.malformed_packets", "2 malformed NVLink packets"),
        ("link_errors.buffer_overruns", "2 NVLink buffer overruns"), ("link_errors.receive", "2 NVLink receive errors"),
        ("link_errors.integrity", "2 NVLink integrity errors"), ("link_errors.symbol", "2 NVLink symbol errors"),
    ],
)  # fmt: skip
def test_counters_of_errors_that_grew(name: str, text: str) -> None:
    def with_count(count: int) -> dict[str, Any]:
        part, _, kind = name.partition(".")
        return {part: {kind: count}} if kind else {part: count}

    assert between(with_count(40), with_count(42)) == text
    assert between(with_count(40), with_count(40)) is None
    assert between(with_count(40), with_count(1)) is None  # reset meanwhile
    assert name in GROWING


def test_errors_that_were_corrected_are_none() -> None:
    assert between({"link_errors": {"effective": 0}}, {"link_errors": {"effective": 9}}) is None


def test_rows_of_memory() -> None:
    assert between({}, {"remap_pending": True}) == "memory rows wait to be remapped"
    assert between({}, {"remap_failed": True}) == "memory rows could not be remapped"
    assert between({"remap_pending": None}, {"remap_pending": None}) is None


def test_a_fabric_that_gives_less() -> None:
    assert between({}, {"fabric_degraded": True}) == "reduced bandwidth of the NVLink fabric"
    assert between({}, {"fabric_degraded": False}) is None


def test_a_narrow_slot_and_links_that_went_down() -> None:
    assert between({}, {"pcie_width": 8}) == "PCIe x8 instead of x16"
    assert between({}, {"pcie_width": None}) is None
    assert between({}, {"links_up": [1]}) == "NVLink 0, 2 went down"
    assert between({"links_up": [1]}, {}) is None


def test_several_reasons_in_one() -> None:
    assert between({}, {"reasons": ["sw_power_cap"], "pcie_replays": 6}) == "power cap, 1 PCIe replays"


def test_a_driver_that_fails_meanwhile() -> None:
    lost = {"ecc_uncorrected": {"error": "NVMLError: GPU is lost"}}
    assert between({}, lost) == "the driver fails: NVMLError: GPU is lost"
    assert between(lost, lost) is None
    assert between({"reasons": {"error": "x"}}, {"reasons": {"error": "x"}, **lost}) == between({}, lost)


_COUNTS = st.dictionaries(st.sampled_from(["thermal", "sw_power_cap", "idle"]), st.integers(0, 2**63))
_ANY = st.fixed_dictionaries(
    {"reasons": st.one_of(st.none(), st.lists(st.sampled_from(["idle", "hw_thermal", "sw_power_cap"]))),
     "throttled_ns": _COUNTS, "pcie_width": st.one_of(st.none(), st.integers(1, 16)),
     "ecc_uncorrected": st.one_of(st.none(), st.integers(0, 9), st.just({"error": "x"})),
     "links_up": st.lists(st.integers(0, 17), unique=True), "link_errors": _COUNTS}
)  # fmt: skip


@given(_ANY, _ANY, st.floats(0, 100))
def test_any_two_states_give_a_line_or_nothing(before: Any, after: Any, elapsed_s: float) -> None:
    found = taint(state(0.0, **before), state(elapsed_s, **after))
    assert found is None or (found and "\n" not in found)


# -- the watch, and hosts ------------------------------------------------------------------------------


def test_a_watch_from_case_to_case(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = double.Gpu(0, links=[0, 0], values={(91, 0): 2, (161, 0): 1, (161, 1): 1, (165, 0): 1, (165, 1): 1})
    nvml = double.Nvml(gpu)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    watch = GpuWatch(gpu.uuid)
    first = watch.state()
    assert watch.taint(first) is None
    gpu.values[161, 1] = 3
    assert watch.taint(first) == "2 NVLink replays"
    gpu.values[165, 0] = 0
    assert watch.taint(watch.state()) is None
    assert watch.taint(first) == "2 NVLink replays, NVLink 0 went down"
    assert watch.taint(None) is None
    nvml.calls.clear()
    watch.state()
    assert len(nvml.calls) <= 20  # and of these three fetch all fields of all links
    watch.close()
    watch.close()
    assert nvml.users == 0
    assert watch.state() is None


def test_a_gpu_that_falls_off_the_bus_taints(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = double.Gpu(0)
    monkeypatch.setitem(sys.modules, "pynvml", double.Nvml(gpu))
    watch = GpuWatch("0000:1b:00.0")
    before = watch.state()
    gpu.fails = {"nvmlDeviceGetTotalEccErrors": 15}
    assert watch.taint(before) == "the driver fails: NVMLError: GPU is lost"


def host(*gpus: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": {"driver": "570", "devices": [{"index": n, "uuid": f"u{n}", **gpu} for n, gpu in enumerate(gpus)]}}


def test_a_host_before_and_after_a_run() -> None:
    before = host({"state": state(0.0)}, {"state": state(0.0)}, {"state": state(0.0)})
    after = host({"state": state(9.0, pcie_replays=6)}, {"state": state(9.0)}, {"state": state(9.0, pcie_width=4)})
    assert degraded(before, after, {"u0", "u1", "u2"}) == ["GPU 0: 1 PCIe replays", "GPU 2: PCIe x4 instead of x16"]
    assert degraded(before, after, {"u1", "u2"}) == ["GPU 2: PCIe x4 instead of x16"]
    assert degraded(before, after, set()) == []


def test_a_device_that_is_gone_after_the_run() -> None:
    before = host({"state": state()}, {"state": state()})
    lost = {
        "gpus": {
            "devices": [
                {"index": 0, "error": "NVMLError: GPU is lost"},
                {"index": 1, "uuid": "u1", "state": state(1.0)},
            ]
        }
    }
    assert degraded(before, lost, {"u0", "u1"}) == ["GPU 0: the driver shows it no more"]


@pytest.mark.parametrize("gpus", [None, {"error": "x"}, {"devices": []}])
def test_hosts_without_gpus(gpus: Any) -> None:
    assert degraded({"gpus": gpus}, {"gpus": gpus}, {"u0"}) == []
    assert degraded({}, {}, {"u0"}) == []


def test_ranks_together() -> None:
    assert joined([None, None], ["a", "b"]) is None
    assert joined([None, "power cap"], ["a", "b"]) == "power cap (rank 1 on b)"
    assert joined(["power cap"] * 6, ["a"] * 6) == (
        "power cap (rank 0 on a); power cap (rank 1 on a); power cap (rank 2 on a); power cap (rank 3 on a); "
        "and 2 more ranks"
    )
