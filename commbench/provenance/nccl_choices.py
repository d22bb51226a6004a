"""Which algorithm and protocol NCCL took for each call, from the lines that it writes with ``NCCL_DEBUG=INFO``.

``NCCL_DEBUG_SUBSYS`` must have TUNING. Lines may carry any prefix (rank tags of a launcher, timestamps) and may cut
others in the middle; what stands after ``NCCL INFO`` is read.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from commbench.models.nccl import ALGORITHMS, PROTOCOLS
from commbench.provenance.nccl_tuner import nccl_variable

_INFO = re.compile(r"(?:([^\s\[\]<>:]+:\d+:\d+) +\[\d+\] .{0,80}?)?NCCL INFO ")
_CHOICE = re.compile(r"(?:(\w+)\s*:\s+)?(\d+) Bytes -> Algo (\w+) proto (\w+)(?: time ([\d.]+))?(.*)")
_CHANNEL_RANGE = re.compile(r"channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
# From here on NCCL reads its log's variables again behind a lock, with the next message (src/debug.cc).
_SAFE_RESET = 22703
_LEVELS_WITHOUT_FILE = ("", "VERSION")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One call's algorithm and protocol.

    ``logged_bytes`` is the message up to 2.23 and, from 2.24 on (where ``predicted_s`` is None), count × element size:
    one rank's part of an AllGather or ReduceScatter. ``function`` is None before 2.23. ``channels`` is (first, last).
    """

    source: str
    function: str | None
    logged_bytes: int
    algorithm: str
    protocol: str
    predicted_s: float | None = None
    channels: tuple[int, int] | None = None

    @property
    def channel_count(self) -> int | None:
        return None if self.channels is None else self.channels[1] - self.channels[0] + 1

    def message_bytes(self, ranks: int) -> int:
        """nccl-tests' size in a communicator of ``ranks``."""
        parts = self.predicted_s is None and self.function in ("AllGather", "ReduceScatter")
        return self.logged_bytes * ranks if parts else self.logged_bytes


def messages(line: str) -> Iterable[tuple[str, str]]:
    """(source, text) of each message in a line; where output of several ranks met there is more than one.

    ``source`` is host:pid:tid, empty if not given.
    """
    starts = list(_INFO.finditer(line))
    ends = [match.start() for match in starts[1:]] + [len(line)]
    for match, end in zip(starts, ends, strict=False):
        yield match[1] or "", line[match.end() : end].rstrip()


def is_choice(text: str) -> bool:
    """Whether a message is about a choice, whatever it names."""
    return _CHOICE.match(text) is not None


def read_choice(source: str, text: str) -> Choice | None:
    """The choice that a message tells of; None for another message, or one that names what is not known."""
    match = _CHOICE.match(text)
    if not match:
        return None
    algorithm, protocol = _name(match[3], ALGORITHMS), _name(match[4], PROTOCOLS)
    if not (algorithm and protocol):
        return None
    used = _CHANNEL_RANGE.search(match[6])
    return Choice(
        source=source, function=match[1], logged_bytes=int(match[2]), algorithm=algorithm, protocol=protocol,
        predicted_s=float(match[5]) * 1e-6 if match[5] else None,
        channels=(int(used[1]), int(used[2])) if used else None,
    )  # fmt: skip


def read_choices(lines: Iterable[str]) -> list[Choice]:
    """Every choice in some lines, in their order."""
    found = (read_choice(source, text) for line in lines for source, text in messages(line))
    return [choice for choice in found if choice is not None]


class NcclLogFile:
    """What NCCL tells of its choices, in a private file of this rank's; must be there before NCCL reads its variables.

    ``environment`` is changed: a log file of the user's own is not written in such a run.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="commbench-nccl-")
        path = os.path.join(self._directory.name, "log")
        environment["NCCL_DEBUG_FILE"] = path
        if environment.get("NCCL_DEBUG", "").upper() != "TRACE":
            environment["NCCL_DEBUG"] = "INFO"
        subsystems = environment.get("NCCL_DEBUG_SUBSYS", "")
        if subsystems.upper() != "ALL":
            environment["NCCL_DEBUG_SUBSYS"] = f"{subsystems},TUNING" if subsystems else "TUNING"
        self._path = path
        self._read = 0

    def choices(self) -> list[Choice]:
        """Those that were made since the last call."""
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                file.seek(self._read)
                lines = file.readlines()
                self._read = file.tell()
        except FileNotFoundError:
            return []
        return read_choices(lines)

    def close(self) -> None:
        self._directory.cleanup()


class NcclLogSwitch:
    """Turns NCCL's log on for single calls: in all others NCCL runs as the user has set it, and writes nothing of ours.

    ``ncclResetDebugInit`` makes NCCL read its log's variables again. It is exported from 2.24.3 on, in nccl.h called no
    part of the API since 2.28, so it may be missing one day; before 2.27 it closes the file under the feet of other
    threads. ``environment`` is the process's.
    """

    def __init__(self, environment: MutableMapping[str, str], reset: Callable[[], object]) -> None:
        self._environment = environment
        self._reset = reset
        self._directory = tempfile.TemporaryDirectory(prefix="commbench-nccl-")
        self._path = os.path.join(self._directory.name, "log")
        self._settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": self._path}

    def choices(self, call: Callable[[], object]) -> list[Choice]:
        """Those that are made in ``call``, which must return when NCCL has decided."""
        before = {name: nccl_variable(name) for name in self._settings}
        self._set(self._settings)
        try:
            call()
        finally:
            self._set(before)
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                found = read_choices(file)
            os.unlink(self._path)
        except FileNotFoundError:
            return []
        return found

    def close(self) -> None:
        self._directory.cleanup()

    def _set(self, values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value
        self._reset()


def log_reset(version: int) -> Callable[[], object] | None:
    """What makes the NCCL that is loaded, of this version (as a number), read its log's variables again.

    None where it cannot, and where the user has named a log file, which NCCL would begin anew.
    """
    level = (nccl_variable("NCCL_DEBUG") or "").upper()
    if version < _SAFE_RESET or (nccl_variable("NCCL_DEBUG_FILE") and level not in _LEVELS_WITHOUT_FILE):
        return None
    try:
        function = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclResetDebugInit
    except (OSError, AttributeError):
        return None
    function.restype = None
    return function


def _name(text: str, names: tuple[str, ...]) -> str | None:
    """An algorithm or protocol by its number (up to 2.23) or its name in any case (since); None for an unknown one."""
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else None
    return next((name for name in names if name.replace("_", "").lower() == text.replace("_", "").lower()), None)
