"""GPUs as the driver shows them: what they are, how they are set, their state and their counters.

Source: NVIDIA's NVML API reference and ``nvml.h``. What a device or driver does not tell is None.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from commbench.provenance.gpu_nvml import ask, fields, handles, number, pci_address, session, text
from commbench.provenance.sources import ROOT, attempt, digest, read_int

_GRAPHICS_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_GPU_SENSOR = 0
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_REMOTE_TYPES = {0: "gpu", 1: "npu", 2: "switch"}
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
# nvmlNvlinkVersion_t, as texts.
_LINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS

# nvmlClocksEventReason* and, for the last two, nvmlClocksThrottleReason*: the bits of what holds the clocks down.
REASONS = {
    "idle": 0x1, "application_clocks": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal": 0x20, "hw_thermal": 0x40, "hw_power_brake": 0x80, "display_clocks": 0x100, "board_limit": 0x200,
    "reliability": 0x400,
}  # fmt: skip
# For how long, in ns: NVML_FI_DEV_PERF_POLICY_* and NVML_FI_DEV_CLOCKS_EVENT_REASON_*.
THROTTLE_FIELDS = {
    "sw_power_cap": 74, "thermal": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79, "sw_thermal": 269,
    "hw_thermal": 270, "hw_power_brake": 271,
}  # fmt: skip
# The same from older drivers: nvmlPerfPolicyType_t.
_POLICIES = {"sw_power_cap": 0, "thermal": 1, "sync_boost": 2, "board_limit": 3, "reliability": 5}
# Up to NVLink 4: NVML_FI_DEV_NVLINK_ERROR_DL_*. From NVLink 5 on: NVML_FI_DEV_NVLINK_COUNT_*. Scope: the link.
LINK_FIELDS = {
    "replay": 161, "recovery": 162, "crc": 163, "malformed_packets": 206, "buffer_overruns": 207, "receive": 208,
    "integrity": 211, "link_recovery": 215, "effective": 219, "symbol": 221,
}  # fmt: skip
# The same of older drivers: nvmlNvLinkErrorCounter_t, whose CRC errors are those of flits and those of data.
_LINK_COUNTERS = {"replay": (0,), "recovery": (1,), "crc": (2, 3)}
_LINK_STATE, _LINK_COUNT = 165, 91  # NVML_FI_DEV_NVLINK_GET_STATE, NVML_FI_DEV_NVLINK_LINK_COUNT
_ACTIVE = (1, 3)  # NVML_NVLINK_STATE_ACTIVE, and _ACTIVE_TRAFFIC_DISABLED, which is up too


def collect_gpus(root: Path = ROOT) -> dict[str, Any] | None:
    """``{"driver", "nvml", "devices": [facts]}`` of every GPU that NVML shows; None where there is no NVML or no driver.

    Raises what pynvml raises where NVML is there and does not work: call it through ``attempt``.
    """
    with session() as nvml:
        if nvml is None:
            return None
        return {
            "driver": text(nvml, "nvmlSystemGetDriverVersion"),
            "nvml": text(nvml, "nvmlSystemGetNVMLVersion"),
            "devices": [attempt(_device, root, nvml, n, handle) for n, handle in enumerate(handles(nvml))],
        }


def _device(root: Path, nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    if handle is None or isinstance(handle, dict):
        return {"index": index, **(handle or {"error": "NVML gives no handle"})}
    pci = pci_address(ask(nvml, "nvmlDeviceGetPciInfo", handle))
    return {
        "index": index,
        "uuid": identity(nvml, handle),
        "name": text(nvml, "nvmlDeviceGetName", handle),
        "pci": pci,
        "numa_node": read_int(root, f"sys/bus/pci/devices/{pci}/numa_node"),
        "vbios": text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        **_clocks(nvml, handle),
        **_settings(nvml, handle),
        "pcie": _pcie(nvml, handle),
        "nvlinks": _links(nvml, handle),
        "fabric": _fabric(nvml, handle),
        "state": device_state(nvml, handle, link_numbers(nvml, handle)),
    }


def identity(nvml: Any, handle: Any) -> str | None:
    """The device's UUID as it is stored: hashed."""
    uuid = text(nvml, "nvmlDeviceGetUUID", handle)
    return digest(uuid) if isinstance(uuid, str) else None


def _scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, int) else value


def _named(value: Any, table: dict[int, str]) -> Any:
    return table.get(value, str(value)) if isinstance(value, int) else value


def _clocks(nvml: Any, handle: Any) -> dict[str, Any]:
    """Clocks in Hz, power in W, temperature in °C."""
    found = {}
    for name, which in (("sm_clock", _GRAPHICS_SM), ("memory_clock", _MEMORY)):
        found[f"{name}_Hz"] = _scaled(number(nvml, "nvmlDeviceGetClockInfo", handle, which), 10**6)
        found[f"{name}_max_Hz"] = _scaled(number(nvml, "nvmlDeviceGetMaxClockInfo", handle, which), 10**6)
    return {
        **found,
        "power_W": _scaled(number(nvml, "nvmlDeviceGetPowerUsage", handle), 1e-3),
        "power_limit_W": _scaled(number(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
        "temperature_C": number(nvml, "nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
        "performance_state": number(nvml, "nvmlDeviceGetPerformanceState", handle),
    }


def _settings(nvml: Any, handle: Any) -> dict[str, Any]:
    def current(name: str) -> Any:
        modes = ask(nvml, name, handle)  # current and pending
        return bool(modes[0]) if isinstance(modes, (list, tuple)) else modes

    def switch(name: str) -> Any:
        value = ask(nvml, name, handle)
        return bool(value) if isinstance(value, int) else value

    return {
        "persistence": switch("nvmlDeviceGetPersistenceMode"),
        "compute_mode": _named(ask(nvml, "nvmlDeviceGetComputeMode", handle), _COMPUTE_MODES),
        "mig": current("nvmlDeviceGetMigMode"),
        "ecc": current("nvmlDeviceGetEccMode"),
        "ecc_corrected": ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _VOLATILE),
    }


def _pcie(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "generation": number(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        "max_generation": number(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "width": number(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        "max_width": number(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
    }


def _fabric(nvml: Any, handle: Any) -> dict[str, Any] | None:
    """The state of a GPU in a fabric of NVLink switches, and its clique; None where it is in none."""
    import ctypes  # every rank loads this module, and few have a GPU

    make = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if make is None:
        return None
    info = make()
    answer = ask(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    if answer is None or isinstance(answer, dict):
        return answer
    return {
        "state": _named(int(info.state), _FABRIC_STATES), "status": int(info.status), "clique": int(info.cliqueId),
        "health_mask": int(info.healthMask),
    } if info.state else None  # fmt: skip


def _degraded_fabric(fabric: dict[str, Any] | None) -> Any:
    """NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW: two bits that say unknown, yes, no."""
    if fabric is None or "health_mask" not in fabric:
        return fabric
    return {1: True, 2: False}.get(fabric["health_mask"] & 0x3)


# -- NVLink --------------------------------------------------------------------------------------------


def link_numbers(nvml: Any, handle: Any) -> list[int]:
    """The NVLinks that the device has, up or down."""
    count = fields(nvml, handle, [(_LINK_COUNT, 0)])[0]
    if isinstance(count, int):
        return list(range(min(count, MAX_LINKS)))
    return [n for n in range(MAX_LINKS) if isinstance(ask(nvml, "nvmlDeviceGetNvLinkState", handle, n), int)]


def _links(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    links = link_numbers(nvml, handle)
    up = links_up(nvml, handle, links)
    errors = link_errors(nvml, handle, links)
    return [
        {
            "link": link,
            "up": up[link],
            "version": _named(number(nvml, "nvmlDeviceGetNvLinkVersion", handle, link), _LINK_VERSIONS),
            "remote": pci_address(ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)),
            "remote_type": _named(ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link), _REMOTE_TYPES),
            "errors": errors[link],
        }
        for link in links
    ]


def links_up(nvml: Any, handle: Any, links: list[int]) -> dict[int, bool | None]:
    """Per link whether it is active; None where nobody tells."""
    states = []
    for link, state in zip(links, fields(nvml, handle, [(_LINK_STATE, link) for link in links]), strict=True):
        states.append(ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) if state is None else state)
    return {n: state in _ACTIVE if isinstance(state, int) else None for n, state in zip(links, states, strict=True)}


def link_errors(
    nvml: Any, handle: Any, links: list[int], names: Collection[str] = LINK_FIELDS.keys()
) -> dict[int, dict[str, int]]:
    """Per link the counters of errors that it has, of these of ``LINK_FIELDS``."""
    wanted = [(name, link) for link in links for name in names]
    values = fields(nvml, handle, [(LINK_FIELDS[name], link) for name, link in wanted])
    found: dict[int, dict[str, int]] = {link: {} for link in links}
    for (name, link), value in zip(wanted, values, strict=True):
        if isinstance(value, int):
            found[link][name] = value
    for link in links:
        if not found[link]:
            found[link] = _old_link_errors(nvml, handle, link)
    return found


def _old_link_errors(nvml: Any, handle: Any, link: int) -> dict[str, int]:
    found = {}
    for name, counters in _LINK_COUNTERS.items():
        values = [ask(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, counter) for counter in counters]
        if all(isinstance(value, int) for value in values):
            found[name] = sum(values)
    return found


# -- what may change under a measurement ---------------------------------------------------------------


def device_state(
    nvml: Any, handle: Any, links: list[int], counters: Collection[str] = LINK_FIELDS.keys()
) -> dict[str, Any]:
    """What bears on whether times of this device can be trusted, and may change any moment; ready for JSON.

    ``reasons`` why clocks are held down now, ``throttled_ns`` for how long they were so far, ``link_errors`` of all
    ``links`` together, as far as they are among ``counters``; the rest is what NVML's calls return.
    """
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    _, _, pending, failed = rows if isinstance(rows, (list, tuple)) else (None,) * 4
    up = links_up(nvml, handle, links)
    errors: dict[str, int] = {}
    for one in link_errors(nvml, handle, links, counters).values():
        for name, count in one.items():
            errors[name] = errors.get(name, 0) + count
    return {
        "monotonic_s": time.monotonic(),
        "reasons": reasons(nvml, handle),
        "throttled_ns": throttled_ns(nvml, handle),
        "ecc_uncorrected": ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        "remap_pending": None if pending is None else bool(pending),
        "remap_failed": None if failed is None else bool(failed),
        "pcie_replays": number(nvml, "nvmlDeviceGetPcieReplayCounter", handle),
        "pcie_width": number(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        "pcie_max_width": number(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        "links_up": sorted(link for link, active in up.items() if active),
        "fabric_degraded": _degraded_fabric(_fabric(nvml, handle)),
        "link_errors": errors,
    }


def reasons(nvml: Any, handle: Any) -> Any:
    """The names of ``REASONS`` that hold now; None where the driver does not tell."""
    bits = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # drivers before 535 have it under its old name
        bits = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if not isinstance(bits, int):
        return bits
    return [name for name, bit in REASONS.items() if bits & bit]


def throttled_ns(nvml: Any, handle: Any) -> dict[str, int]:
    """For how long clocks have been held down since the driver was loaded, by reason; those that the driver knows."""
    values = fields(nvml, handle, [(field, 0) for field in THROTTLE_FIELDS.values()])
    found = {name: value for name, value in zip(THROTTLE_FIELDS, values, strict=True) if isinstance(value, int)}
    for name, policy in _POLICIES.items():
        if name not in found:
            status = ask(nvml, "nvmlDeviceGetViolationStatus", handle, policy)
            if status is not None and not isinstance(status, dict):
                found[name] = int(status.violationTime)
    return found
