"""Whether a GPU was throttled or degraded while something was measured, from its state before and after.

Every rule is a row of one of the tables below; docs/results.md (`tainted`) says the same in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from commbench.provenance.gpu import device_state, identity, link_errors, link_numbers
from commbench.provenance.gpu_nvml import find, start, stop
from commbench.provenance.sources import attempt

State = dict[str, Any]  # of gpu.device_state

# Below this share of the time a slowdown does not move a median; a device's counters step in milliseconds.
LEAST_SHARE = 0.01
_NAMED = 4  # so many reasons are written out


class Throttle(NamedTuple):
    """Something that holds clocks down: the reasons that NVML gives for it, and its counters of time."""

    text: str
    reasons: tuple[str, ...]
    counters: tuple[str, ...]


# Not here: idle, clocks that the user or a display set, clocks synchronised with another GPU's, and the voltage's limit
# (`reliability`), which every GPU meets at its highest clock.
THROTTLES = (
    Throttle("thermal slowdown", ("sw_thermal", "hw_thermal"), ("thermal", "sw_thermal", "hw_thermal")),
    Throttle("power brake", ("hw_power_brake",), ("hw_power_brake",)),
    Throttle("power cap", ("sw_power_cap",), ("sw_power_cap",)),
    Throttle("board limit", ("board_limit",), ("board_limit",)),
)
# NVML says "hardware slowdown" beside its cause, where that is known.
_HARDWARE = Throttle("hardware slowdown", ("hw_slowdown",), ())
_CAUSES = ("hw_thermal", "hw_power_brake")

# Counters that must not grow, as device_state has them; `link_errors.` has one a kind.
GROWING = {
    "ecc_uncorrected": "uncorrected ECC errors",
    "pcie_replays": "PCIe replays",
    "link_errors.replay": "NVLink replays",
    "link_errors.recovery": "NVLink recoveries",
    "link_errors.crc": "NVLink CRC errors",
    "link_errors.malformed_packets": "malformed NVLink packets",
    "link_errors.buffer_overruns": "NVLink buffer overruns",
    "link_errors.receive": "NVLink receive errors",
    "link_errors.integrity": "NVLink integrity errors",
    "link_errors.link_recovery": "NVLink recoveries",
    "link_errors.symbol": "NVLink symbol errors",
}  # Not `effective`: what forward error correction leaves is sent again, and counted at any load.
# What must not hold.
STANDING = {
    "remap_pending": "memory rows wait to be remapped",
    "remap_failed": "memory rows could not be remapped",
    "fabric_degraded": "reduced bandwidth of the NVLink fabric",
}


def taint(before: State, after: State) -> str | None:
    """Why times between two states of a device are not to be compared with others: a short reason, or None."""
    return ", ".join(_findings(before, after)) or None


def _findings(before: State, after: State) -> Iterator[str]:
    failed = [_error(value) for name, value in after.items() if _error(before.get(name)) is None]
    if error := next(filter(None, failed), None):
        yield f"the driver fails: {error}"
    for throttle in (*THROTTLES, _HARDWARE):
        if throttle is _HARDWARE and _seen(before, after, _CAUSES):
            continue
        if (found := _throttled(throttle, before, after)) is not None:
            yield found
    for name, text in GROWING.items():
        if grown := _grown(before, after, name):
            yield f"{grown} {text}"
    for name, text in STANDING.items():
        if after.get(name) is True:
            yield text
    yield from _narrow(before, after)


def _throttled(throttle: Throttle, before: State, after: State) -> str | None:
    """The counters of time are the evidence; what holds at one moment alone is where there are none."""
    elapsed_ns = 1e9 * (after["monotonic_s"] - before["monotonic_s"])
    times = [_grown(before, after, f"throttled_ns.{name}") for name in throttle.counters]
    known = [time for time in times if time is not None]
    share = min(1.0, max(known) / elapsed_ns) if known and elapsed_ns > 0 else None
    if share is not None and share >= LEAST_SHARE:
        return f"{throttle.text} {100 * share:.0f} % of the time"
    moments = [bool(_holding(state, throttle.reasons)) for state in (before, after)]
    # Counters may lag behind: what holds at both ends held between them.
    return throttle.text if all(moments) or (share is None and any(moments)) else None


def _error(value: Any) -> str | None:
    return value.get("error") if isinstance(value, dict) else None


def _holding(state: State, names: Collection[str]) -> list[str]:
    found = state.get("reasons")
    return [name for name in names if name in found] if isinstance(found, list) else []


def _seen(before: State, after: State, names: Collection[str]) -> bool:
    return bool(_holding(before, names) or _holding(after, names))


def _grown(before: State, after: State, name: str) -> int | None:
    """What a counter (``part.name`` for one in a dictionary) has grown by; None where it was reset or is not known."""
    old, new = (_value(state, name) for state in (before, after))
    return new - old if old is not None and new is not None and new >= old else None


def _value(state: State, name: str) -> int | None:
    found: Any = state
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None


def _narrow(before: State, after: State) -> Iterator[str]:
    """The ways to the device that are not all there."""
    width, greatest = (_value(after, name) for name in ("pcie_width", "pcie_max_width"))
    if width and greatest and width < greatest:
        yield f"PCIe x{width} instead of x{greatest}"
    gone = sorted(set(before.get("links_up") or ()) - set(after.get("links_up") or ()))
    if gone:
        yield f"NVLink {', '.join(map(str, gone))} went down"


class GpuWatch:
    """A rank's own device, by its UUID or PCI address, to be asked between cases. Never raises.

    Where there is no NVML or no such device, its states are None.
    """

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._links: list[int] = []
        self._counters: set[str] = set()
        self.identity: str | None = None  # as collect_gpus has it
        self.why_not: str | None = None  # why its states are None
        failed = attempt(self._open, device)
        if failed is not None:
            self.why_not = failed["error"]
            self.close()

    def _open(self, device: str) -> None:
        self._nvml = start()
        if self._nvml is None:
            self.why_not = "no NVML: install nvidia-ml-py"
            return
        self._handle = find(self._nvml, device)
        if self._handle is None:
            raise LookupError("NVML knows no such device")  # not its UUID, which is stored nowhere
        self.identity = identity(self._nvml, self._handle)
        # Asked once, so that between cases only what this device has is asked for.
        self._links = link_numbers(self._nvml, self._handle)
        every = link_errors(self._nvml, self._handle, self._links)
        self._counters = {name for counters in every.values() for name in counters}

    def state(self) -> State | None:
        """``device_state`` now: some ten calls to the driver, outside timed code."""
        if self._handle is None:
            return None
        found: State = attempt(device_state, self._nvml, self._handle, self._links, self._counters)
        return found if "monotonic_s" in found else None

    def taint(self, before: State | None) -> str | None:
        """``taint`` from ``before`` to now; None where either is not known."""
        after = self.state()
        if before is None or after is None:
            return None
        found = attempt(taint, before, after)
        return found if isinstance(found, str) else None

    def close(self) -> None:
        nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            attempt(stop, nvml)


def degraded(before: dict[str, Any], after: dict[str, Any], used: Collection[str]) -> list[str]:
    """Of a host's facts before and after a run (``collect_before``, ``collect_after``): ``GPU 3: reason`` of each device
    whose hashed UUID is in ``used``."""
    olds, news = (
        {gpu.get("uuid"): gpu for gpu in (facts.get("gpus") or {}).get("devices", ())} for facts in (before, after)
    )
    found = []
    for identity_, old in olds.items():
        if identity_ not in used or not isinstance(old.get("state"), dict):
            continue
        new = news.get(identity_)
        reason = taint(old["state"], new["state"]) if new and "state" in new else "the driver shows it no more"
        if reason:
            found.append(f"GPU {old['index']}: {reason}")
    return found


def joined(reasons: Sequence[str | None], hosts: Sequence[str]) -> str | None:
    """What is said of ranks' devices (``reasons[rank]``) in one text: the first ranks by name, then how many more."""
    found = [f"{reason} (rank {rank} on {hosts[rank]})" for rank, reason in enumerate(reasons) if reason]
    more = [f"and {len(found) - _NAMED} more ranks"] if len(found) > _NAMED else []
    return "; ".join([*found[:_NAMED], *more]) or None
