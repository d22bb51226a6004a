"""What is asked of NVML, on a double that is compared with the installed module."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commbench.provenance import gpu as gpu_module
from commbench.provenance import gpu_nvml, gpu_taint, gpu_topology
from commbench.provenance.collect import collect_after, collect_before
from commbench.provenance.gpu import LINK_FIELDS, REASONS, THROTTLE_FIELDS, collect_gpus
from commbench.provenance.gpu_nvml import fields, find, session
from commbench.provenance.gpu_taint import GpuWatch


def load_double() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pynvml_double", Path(__file__).with_name("pynvml_double.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


double = load_double()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(*gpus: Any, **changes: Any) -> Any:
        nvml = double.Nvml(*gpus, **changes)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- the double and the numbers, against the real module -----------------------------------------------


def asked() -> set[str]:
    """Every NVML function that the sources name."""
    trees = [ast.parse(inspect.getsource(module)) for module in (gpu_module, gpu_nvml, gpu_taint, gpu_topology)]
    texts = {node.value for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    attributes = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in texts | attributes if re.fullmatch(r"nvml(Init|Shutdown|System\w+|Device\w+)", name)}


def test_what_is_asked_exists_with_these_arguments() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert len(asked()) > 30
    for name in asked():
        there = list(inspect.signature(getattr(pynvml, name)).parameters)
        here = list(inspect.signature(getattr(double.Nvml(), name)).parameters)
        assert here == there, name


def test_numbers_are_those_of_nvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    reasons = {"idle": "GpuIdle", "application_clocks": "ApplicationsClocksSetting", "sw_power_cap": "SwPowerCap",
               "hw_slowdown": "HwSlowdown", "sync_boost": "SyncBoost", "sw_thermal": "SwThermalSlowdown",
               "hw_thermal": "HwThermalSlowdown", "hw_power_brake": "HwPowerBrakeSlowdown",
               "display_clocks": "DisplayClockSetting"}  # fmt: skip
    assert {n: REASONS[n] for n in reasons} == {
        n: getattr(pynvml, f"nvmlClocksEventReason{w}") for n, w in reasons.items()
    }
    assert REASONS["board_limit"] == pynvml.nvmlClocksThrottleReasonBoardLimit
    assert REASONS["reliability"] == pynvml.nvmlClocksThrottleReasonReliability
    times = {"sw_power_cap": "PERF_POLICY_POWER", "thermal": "PERF_POLICY_THERMAL",
             "sync_boost": "PERF_POLICY_SYNC_BOOST", "board_limit": "PERF_POLICY_BOARD_LIMIT",
             "reliability": "PERF_POLICY_RELIABILITY", "sw_thermal": "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
             "hw_thermal": "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
             "hw_power_brake": "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN"}  # fmt: skip
    assert {name: getattr(pynvml, f"NVML_FI_DEV_{word}") for name, word in times.items()} == THROTTLE_FIELDS
    links = {"replay": "ERROR_DL_REPLAY", "recovery": "ERROR_DL_RECOVERY", "crc": "ERROR_DL_CRC",
             "malformed_packets": "COUNT_MALFORMED_PACKET_ERRORS", "buffer_overruns": "COUNT_BUFFER_OVERRUN_ERRORS",
             "receive": "COUNT_RCV_ERRORS", "integrity": "COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
             "link_recovery": "COUNT_LINK_RECOVERY_EVENTS", "effective": "COUNT_EFFECTIVE_ERRORS",
             "symbol": "COUNT_SYMBOL_ERRORS"}  # fmt: skip
    assert {name: getattr(pynvml, f"NVML_FI_DEV_NVLINK_{word}") for name, word in links.items()} == LINK_FIELDS
    assert gpu_module.MAX_LINKS == pynvml.NVML_NVLINK_MAX_LINKS
    assert (165, 91) == (pynvml.NVML_FI_DEV_NVLINK_GET_STATE, pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    members = [name for name, _ in pynvml.c_nvmlValue_t._fields_]
    kinds = ["DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG", "SIGNED_LONG_LONG", "SIGNED_INT",
             "UNSIGNED_SHORT"]  # fmt: skip
    assert [getattr(pynvml, f"NVML_VALUE_TYPE_{kind}") for kind in kinds] == list(range(len(members)))
    assert list(gpu_nvml._MEMBERS) == members
    fabric = dict(pynvml.c_nvmlGpuFabricInfo_v2_t._fields_)
    assert {name: fabric[name] for name, _ in double.FabricInfo._fields_} == dict(double.FabricInfo._fields_)


def test_fields_of_the_real_structure() -> None:
    pynvml = pytest.importorskip("pynvml")
    array = (pynvml.c_nvmlFieldValue_t * 3)()
    array[0].valueType, array[0].value.ullVal = 3, 2**40
    array[1].valueType, array[1].value.uiVal = 1, 5
    array[2].nvmlReturn = 3

    class Module:
        @staticmethod
        def nvmlDeviceGetFieldValues(handle: Any, fieldIds: Any) -> Any:
            return array

    assert fields(Module(), None, [(1, 0), (2, 0), (3, 0)]) == [2**40, 5, None]


def test_a_real_module_without_a_driver_is_no_gpu() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert collect_gpus() is None
        assert gpu_topology.collect_topology() is None
        watch = GpuWatch("0000:1b:00.0")
        assert (watch.state(), watch.taint({})) == (None, None)
        assert watch.why_not == "no NVML: install nvidia-ml-py"
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a driver here: tests/gpu has the test")


# -- facts ---------------------------------------------------------------------------------------------


def test_a_gpu_and_its_units(install: Any, tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    values = {
        (74, 0): 5_000_000,
        (270, 0): 9,
        (91, 0): 2,
        (161, 0): 3,
        (161, 1): 4,
        (163, 1): 1,
        (165, 0): 1,
        (165, 1): 0,
    }
    nvml = install(double.Gpu(0, values=values, links=["switch", None], reasons=0x4 | 0x1, fabric=(3, 7, 0b0110)))
    found = collect_gpus(tmp_path)
    assert found is not None
    assert (found["driver"], found["nvml"]) == ("570.86.10", "12.570.86.10")
    (facts,) = found["devices"]
    state = facts.pop("state")
    assert facts == {
        "index": 0, "uuid": hashed("GPU-00000000-1111-2222-3333-444444444444"), "name": "Example GPU",
        "pci": "0000:1b:00.0", "numa_node": 1, "vbios": "96.00.89.00.01", "sm_clock_Hz": 1_755_000_000,
        "sm_clock_max_Hz": 1_980_000_000, "memory_clock_Hz": 2_619_000_000, "memory_clock_max_Hz": 2_619_000_000,
        "power_W": pytest.approx(123.456), "power_limit_W": pytest.approx(700), "temperature_C": 41,
        "performance_state": 0, "persistence": True, "compute_mode": "exclusive process", "mig": False, "ecc": True,
        "ecc_corrected": 7, "pcie": {"generation": 4, "max_generation": 5, "width": 16, "max_width": 16},
        "nvlinks": [
            {"link": 0, "up": True, "version": "4.0", "remote": "0000:c0:00.0", "remote_type": "switch",
             "errors": {"replay": 3}},
            {"link": 1, "up": False, "version": "4.0", "remote": None, "remote_type": None,
             "errors": {"replay": 4, "crc": 1}},
        ],
        "fabric": {"state": "completed", "status": 0, "clique": 7, "health_mask": 6},
    }  # fmt: skip
    assert state.pop("monotonic_s") > 0
    assert state == {
        "reasons": ["idle", "sw_power_cap"], "throttled_ns": {"sw_power_cap": 5_000_000, "hw_thermal": 9},
        "ecc_uncorrected": 0, "remap_pending": False, "remap_failed": False, "pcie_replays": 2, "pcie_width": 16,
        "pcie_max_width": 16, "links_up": [0], "link_errors": {"replay": 7, "crc": 1}, "fabric_degraded": False,
    }  # fmt: skip
    assert nvml.users == 0
    assert "1111-2222" not in json.dumps(found)


def test_a_driver_without_fields_and_new_names(install: Any) -> None:
    fails = {"nvmlDeviceGetFieldValues": 13, "nvmlDeviceGetCurrentClocksEventReasons": 13}
    install(double.Gpu(0, fails=fails, links=[0, None], reasons=0x40, policies={0: 11, 1: 22}))
    (facts,) = (collect_gpus() or {})["devices"]
    assert facts["state"]["reasons"] == ["hw_thermal"]
    assert facts["state"]["throttled_ns"] == {"sw_power_cap": 11, "thermal": 22}
    assert [link["up"] for link in facts["nvlinks"]] == [True, False]
    # Counters 0 to 3 of link 1 are 10 to 13, and CRC errors are the third and the fourth.
    assert facts["nvlinks"][1]["errors"] == {"replay": 10, "recovery": 11, "crc": 12 + 13}
    assert facts["fabric"] is None


def test_what_a_device_does_not_have_is_none_and_what_fails_says_so(install: Any) -> None:
    fails = {"nvmlDeviceGetPowerUsage": 3, "nvmlDeviceGetRemappedRows": 3, "nvmlDeviceGetEccMode": 3,
             "nvmlDeviceGetCurrPcieLinkWidth": 15}  # fmt: skip
    install(double.Gpu(0, fails=fails))
    (facts,) = (collect_gpus() or {})["devices"]
    assert (facts["power_W"], facts["ecc"], facts["nvlinks"]) == (None, None, [])
    assert (facts["state"]["remap_pending"], facts["state"]["links_up"]) == (None, [])
    assert facts["pcie"]["width"] == {"error": "NVMLError: GPU is lost"}
    assert facts["power_limit_W"] == pytest.approx(700)


@pytest.mark.parametrize(("mask", "degraded"), [(0b1000, None), (0b1001, True), (0b1010, False)])
def test_a_fabric_says_whether_it_gives_less(install: Any, mask: int, degraded: bool | None) -> None:
    pynvml = pytest.importorskip("pynvml")
    assert (
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE,
    ) == (1, 2)
    assert pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW == 0
    install(double.Gpu(0, fabric=(3, 7, mask)))
    assert (collect_gpus() or {})["devices"][0]["state"]["fabric_degraded"] is degraded


def test_numbers_that_nvml_does_not_know(install: Any) -> None:
    gpu = double.Gpu(0)
    gpu.answers["CurrPcieLinkWidth"] = 0xFFFFFFFF
    install(gpu)
    assert (collect_gpus() or {})["devices"][0]["pcie"]["width"] is None


def test_a_lost_gpu_beside_a_good_one(install: Any) -> None:
    install(double.Gpu(0), double.Gpu(1), lost=(0,))
    lost, good = (collect_gpus() or {})["devices"]
    assert lost == {"index": 0, "error": "NVMLError: GPU is lost"}
    assert (good["index"], good["pci"]) == (1, "0000:2b:00.0")


@pytest.mark.parametrize("code", [9, 12])
def test_no_driver_is_no_gpu(install: Any, code: int) -> None:
    install(double.Gpu(0), start=code)
    assert collect_gpus() is None


def test_no_module_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert collect_gpus() is None


def test_a_driver_that_was_updated_under_the_library(install: Any, tmp_path: Path) -> None:
    install(double.Gpu(0), start=18)
    error = {"error": "NVMLError: RM has detected an NVML/RM version mismatch."}
    found = collect_before(tmp_path)
    assert (found["gpus"], found["gpu_topology"]) == (error, error)
    assert collect_after(tmp_path)["gpus"] == error
    assert GpuWatch("0000:1b:00.0").why_not == error["error"]


def test_it_is_part_of_what_is_collected(install: Any, tmp_path: Path) -> None:
    install(double.Gpu(0))
    assert collect_before(tmp_path)["gpus"]["devices"][0]["name"] == "Example GPU"
    assert collect_before(tmp_path)["gpu_topology"]["pci"] == ["0000:1b:00.0"]
    assert json.loads(json.dumps(collect_after(tmp_path)))["gpus"]["devices"][0]["index"] == 0
    assert "gpu_topology" not in collect_after(tmp_path)


# -- which device --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "GPU-00000001-1111-2222-3333-444444444444",  # NVML
        "00000001-1111-2222-3333-444444444444",  # torch
        "00000001111122223333444444444444",  # cupy's bytes
        "0000:2b:00.0",
    ],
)
def test_a_device_by_any_of_its_names(install: Any, text: str) -> None:
    gpus = [double.Gpu(0), double.Gpu(1)]
    install(*gpus)
    with session() as nvml:
        assert find(nvml, text) is gpus[1]


def test_a_part_of_a_gpu_is_watched_as_the_whole(install: Any) -> None:
    gpu = double.Gpu(0, parts=["MIG-aaaaaaaa-1111-2222-3333-444444444444"])
    nvml = install(gpu)
    watch = GpuWatch("aaaaaaaa-1111-2222-3333-444444444444")
    assert watch.identity == hashed(gpu.uuid)
    watch.close()
    assert nvml.users == 0


def test_a_device_that_nvml_does_not_know(install: Any) -> None:
    nvml = install(double.Gpu(0))
    watch = GpuWatch("0000:ff:00.0")
    assert watch.why_not == "LookupError: NVML knows no such device"
    assert watch.state() is None
    assert nvml.users == 0
