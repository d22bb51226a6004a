"""Questions to NVIDIA's management library (NVML), each of which may have no answer.

Through nvidia-ml-py (module ``pynvml``), loaded when the first question is asked. Numbers below are those of ``nvml.h``,
whose ABI keeps them; nvidia-ml-py does not name all of them in every release (and has its NVML_P2P_CAPS_INDEX_READ as
a tuple, which its own call refuses).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_NOT_SUPPORTED, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND, _DRIVER_NOT_LOADED = 3, 12, 13, 9
# What a device, driver or user does not have is no failure: an argument that is invalid is a link that does not exist.
_INVALID_ARGUMENT, _NO_PERMISSION, _NOT_FOUND, _NO_DATA, _DEPRECATED = 2, 4, 6, 20, 26
_ABSENT = {
    _NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _INVALID_ARGUMENT, _NO_PERMISSION, _NOT_FOUND, _NO_DATA, _DEPRECATED,
}  # fmt: skip
# c_nvmlValue_t's member by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@contextmanager
def session() -> Iterator[Any]:
    """The module ``pynvml``, initialised; None where it, the library or the driver is missing.

    Raises pynvml's NVMLError where they are there and do not work, as after a driver's update.
    """
    nvml = start()
    try:
        yield nvml
    finally:
        if nvml is not None:
            stop(nvml)


def start() -> Any:
    """As ``session``, to be ended by ``stop``. NVML counts its users: starts may nest."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) in (_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED):
            return None
        raise
    return pynvml


def stop(nvml: Any) -> None:
    """The end of what ``start`` began; what cannot be ended is left."""
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """What an NVML call returns; None where device, driver or module have no such thing, ``{"error": ...}`` where the
    call fails."""
    call = getattr(nvml, name, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a strange driver does, it is written down
        if getattr(error, "value", None) in _ABSENT:
            return None
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def number(nvml: Any, name: str, *arguments: Any) -> Any:
    """``ask`` for what must be one whole number, not negative; NVML's "no such value" (all bits set) is None."""
    value = ask(nvml, name, *arguments)
    return None if isinstance(value, int) and value >= 0xFFFFFFFF else value


def text(nvml: Any, name: str, *arguments: Any) -> Any:
    """``ask`` for a text: early releases of the module return bytes."""
    value = ask(nvml, name, *arguments)
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def fields(nvml: Any, handle: Any, wanted: Sequence[tuple[int, int]]) -> list[Any]:
    """Values of (field, scope) in one call, in order; None for each that is not known. The scope is a link's number."""
    if not wanted:
        return []
    found = ask(nvml, "nvmlDeviceGetFieldValues", handle, list(wanted))
    if found is None or isinstance(found, dict):
        return [None] * len(wanted)
    return [_value(one) for one in found]


def _value(one: Any) -> Any:
    if one.nvmlReturn != 0 or not 0 <= one.valueType < len(_MEMBERS):
        return None
    return getattr(one.value, _MEMBERS[one.valueType])


def pci_address(info: Any) -> str | None:
    """As sysfs writes it, such as ``0000:1b:00.0``, of an nvmlPciInfo_t; None for an error and for no address."""
    if info is None or isinstance(info, dict) or info.domain == info.bus == info.device == 0xFFFFFFFF:
        return None
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def find(nvml: Any, identity: str) -> Any:
    """The handle of the device of this UUID (as NVML, torch or cupy writes it) or PCI address; None for no such device.

    For a MIG device, that of the GPU that it is a part of: clocks, errors and links are the whole GPU's.
    """
    if ":" in identity:
        return _handle(ask(nvml, "nvmlDeviceGetHandleByPciBusId", identity))
    uuid = re.sub(r"^(gpu|mig)-", "", identity.lower())
    if re.fullmatch(r"[0-9a-f]{32}", uuid):
        uuid = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
    whole = _handle(ask(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}"))
    if whole is not None:
        return whole
    part = _handle(ask(nvml, "nvmlDeviceGetHandleByUUID", f"MIG-{uuid}"))
    return None if part is None else _handle(ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part))


def _handle(found: Any) -> Any:
    return None if isinstance(found, dict) else found


def handles(nvml: Any) -> list[Any]:
    """Of every device that NVML shows, in its order; an error in the place of one that is lost."""
    count = ask(nvml, "nvmlDeviceGetCount")
    return [] if not isinstance(count, int) else [ask(nvml, "nvmlDeviceGetHandleByIndex", n) for n in range(count)]
