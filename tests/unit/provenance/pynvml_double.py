"""A double of nvidia-ml-py's module: the functions that commbench asks, over GPUs that a test makes up.

test_gpu_facts.py compares its names and arguments with the installed module.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, NOT_FOUND, INVALID_ARGUMENT, IS_LOST = 3, 6, 2, 15
WORDS = {3: "Not Supported", 6: "Not Found", 2: "Invalid Argument", 9: "Driver Not Loaded",
         13: "Function Not Found", 12: "NVML Shared Library Not Found", 15: "GPU is lost", 18: "RM has detected an NVML/RM version mismatch."}  # fmt: skip


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(WORDS[value])
        self.value = value


class FabricInfo(ctypes.Structure):
    """Of c_nvmlGpuFabricInfo_v2_t what is read."""

    _fields_ = [("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint),
                ("healthMask", ctypes.c_uint32)]  # fmt: skip


class Gpu:
    """What NVML says of one GPU: by call (and arguments after the handle) the answer, or an NVMLError's number in
    ``fails``. ``values`` has fields by (number, scope); a field that is missing is not supported."""

    def __init__(self, number: int, **changes: Any) -> None:
        self.number = number
        self.uuid = f"GPU-{number:08x}-1111-2222-3333-444444444444"
        self.parts: list[str] = []  # UUIDs of its MIG devices
        self.bus = 0x1B + 0x10 * number
        self.values: dict[tuple[int, int], int] = {}
        self.fails: dict[str, int] = {}
        self.links: list[Any] = []  # an index of another GPU, "switch", or None for a link that is down
        self.reasons = 0
        self.peers: dict[tuple[int, int], int] = {}  # by (number of the other, index of the capability)
        self.ancestors: dict[int, int] = {}
        self.fabric: tuple[int, int, int] | None = None  # state, clique, health mask
        self.answers: dict[str, Any] = {
            "Name": "Example GPU", "VbiosVersion": "96.00.89.00.01", "PowerUsage": 123_456,
            "EnforcedPowerLimit": 700_000, "PerformanceState": 0, "PersistenceMode": 1, "ComputeMode": 3,
            "MigMode": [0, 0], "EccMode": [1, 1], "RemappedRows": (1, 0, 0, 0), "CurrPcieLinkGeneration": 4,
            "MaxPcieLinkGeneration": 5, "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16, "PcieReplayCounter": 2,
        }  # fmt: skip
        self.clocks = {1: (1755, 1980), 2: (2619, 2619)}
        self.temperature = 41
        self.ecc = {0: 7, 1: 0}  # corrected, uncorrected
        self.policies: dict[int, int] = {}
        for name, value in changes.items():
            setattr(self, name, value)


class Nvml:
    """The module: put it into sys.modules as ``pynvml``."""

    NVMLError = NVMLError
    c_nvmlGpuFabricInfo_v2_t = FabricInfo

    def __init__(self, *gpus: Gpu, start: int = 0, lost: tuple[int, ...] = ()) -> None:
        self.gpus = list(gpus)
        self.users = 0
        self.calls: list[str] = []
        self._start = start
        self._lost = lost

    def _allow(self, name: str, *gpus: Gpu) -> None:
        self.calls.append(name)
        for gpu in gpus:
            if gpu.number in self._lost:
                raise NVMLError(IS_LOST)
            if name in gpu.fails:
                raise NVMLError(gpu.fails[name])

    def nvmlInit(self) -> None:
        if self._start:
            raise NVMLError(self._start)
        self.users += 1

    def nvmlShutdown(self) -> None:
        assert self.users > 0
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.10"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "12.570.86.10"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        self._allow("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for gpu in self.gpus:
            if uuid == gpu.uuid:
                return gpu
            if uuid in gpu.parts:
                return uuid
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Any) -> Gpu:
        return next(gpu for gpu in self.gpus if migDevice in gpu.parts)

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> Gpu:
        for gpu in self.gpus:
            if pciBusId == f"0000:{gpu.bus:02x}:00.0":
                return gpu
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetPciInfo(self, handle: Gpu) -> Any:
        self._allow("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(domain=0, bus=handle.bus, device=0, busId=f"00000000:{handle.bus:02X}:00.0")

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        self._allow("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def _answer(self, name: str, handle: Gpu) -> Any:
        self._allow(f"nvmlDeviceGet{name}", handle)
        return handle.answers[name]

    def nvmlDeviceGetName(self, handle: Gpu) -> Any:
        return self._answer("Name", handle)

    def nvmlDeviceGetVbiosVersion(self, handle: Gpu) -> Any:
        return self._answer("VbiosVersion", handle)

    def nvmlDeviceGetPowerUsage(self, handle: Gpu) -> Any:
        return self._answer("PowerUsage", handle)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Gpu) -> Any:
        return self._answer("EnforcedPowerLimit", handle)

    def nvmlDeviceGetPerformanceState(self, handle: Gpu) -> Any:
        return self._answer("PerformanceState", handle)

    def nvmlDeviceGetPersistenceMode(self, handle: Gpu) -> Any:
        return self._answer("PersistenceMode", handle)

    def nvmlDeviceGetComputeMode(self, handle: Gpu) -> Any:
        return self._answer("ComputeMode", handle)

    def nvmlDeviceGetMigMode(self, device: Gpu) -> Any:
        return self._answer("MigMode", device)

    def nvmlDeviceGetEccMode(self, handle: Gpu) -> Any:
        return self._answer("EccMode", handle)

    def nvmlDeviceGetRemappedRows(self, device: Gpu) -> Any:
        return self._answer("RemappedRows", device)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Gpu) -> Any:
        return self._answer("CurrPcieLinkGeneration", handle)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Gpu) -> Any:
        return self._answer("MaxPcieLinkGeneration", handle)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Gpu) -> Any:
        return self._answer("CurrPcieLinkWidth", handle)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Gpu) -> Any:
        return self._answer("MaxPcieLinkWidth", handle)

    def nvmlDeviceGetPcieReplayCounter(self, handle: Gpu) -> Any:
        return self._answer("PcieReplayCounter", handle)

    def nvmlDeviceGetClockInfo(self, handle: Gpu, type: int) -> int:
        self._allow("nvmlDeviceGetClockInfo", handle)
        return handle.clocks[type][0]

    def nvmlDeviceGetMaxClockInfo(self, handle: Gpu, type: int) -> int:
        self._allow("nvmlDeviceGetMaxClockInfo", handle)
        return handle.clocks[type][1]

    def nvmlDeviceGetTemperature(self, handle: Gpu, sensor: int) -> int:
        self._allow("nvmlDeviceGetTemperature", handle)
        assert sensor == 0
        return handle.temperature

    def nvmlDeviceGetTotalEccErrors(self, handle: Gpu, errorType: int, counterType: int) -> int:
        self._allow("nvmlDeviceGetTotalEccErrors", handle)
        assert counterType == 0
        return handle.ecc[errorType]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> int:
        self._allow("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return handle.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Gpu) -> int:
        self._allow("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return handle.reasons

    def nvmlDeviceGetViolationStatus(self, device: Gpu, perfPolicyType: int) -> Any:
        self._allow("nvmlDeviceGetViolationStatus", device)
        if perfPolicyType not in device.policies:
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(referenceTime=1, violationTime=device.policies[perfPolicyType])

    def nvmlDeviceGetFieldValues(self, handle: Gpu, fieldIds: list[tuple[int, int]]) -> list[Any]:
        self._allow("nvmlDeviceGetFieldValues", handle)

        def value(field: tuple[int, int]) -> Any:
            known = field in handle.values
            return SimpleNamespace(
                nvmlReturn=0 if known else NOT_SUPPORTED, valueType=3,
                value=SimpleNamespace(ullVal=handle.values.get(field)),
            )  # fmt: skip

        return [value(field) for field in fieldIds]

    def _link(self, gpu: Gpu, link: int) -> Any:
        if link >= len(gpu.links):
            raise NVMLError(INVALID_ARGUMENT)
        return gpu.links[link]

    def nvmlDeviceGetNvLinkState(self, device: Gpu, link: int) -> int:
        self._allow("nvmlDeviceGetNvLinkState", device)
        return int(self._link(device, link) is not None)

    def nvmlDeviceGetNvLinkVersion(self, device: Gpu, link: int) -> int:
        self._link(device, link)
        return 6

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Gpu, link: int) -> Any:
        end = self._link(device, link)
        if end is None:
            raise NVMLError(NOT_SUPPORTED)
        return self.nvmlDeviceGetPciInfo(self.gpus[end]) if isinstance(end, int) else SimpleNamespace(
            domain=0, bus=0xC0 + link, device=0
        )  # fmt: skip

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Gpu, link: int) -> int:
        end = self._link(handle, link)
        if end is None:
            raise NVMLError(NOT_SUPPORTED)
        return 0 if isinstance(end, int) else 2

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Gpu, link: int, counter: int) -> int:
        self._allow("nvmlDeviceGetNvLinkErrorCounter", device)
        self._link(device, link)
        return 10 * link + counter

    def nvmlDeviceGetGpuFabricInfoV(self, device: Gpu, gpuFabricInfo: Any) -> int:
        self._allow("nvmlDeviceGetGpuFabricInfoV", device)
        if device.fabric is None:
            raise NVMLError(NOT_SUPPORTED)
        # The module hands on what it gets: by value, the driver would write nowhere.
        info = ctypes.cast(gpuFabricInfo, ctypes.POINTER(FabricInfo)).contents
        info.state, info.cliqueId, info.healthMask = device.fabric
        return 0

    def nvmlDeviceGetP2PStatus(self, device1: Gpu, device2: Gpu, p2pIndex: int) -> int:
        self._allow("nvmlDeviceGetP2PStatus", device1, device2)
        assert device1 is not device2
        return device1.peers.get((device2.number, p2pIndex), 0)

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: Gpu, device2: Gpu) -> int:
        self._allow("nvmlDeviceGetTopologyCommonAncestor", device1, device2)
        return device1.ancestors[device2.number]
