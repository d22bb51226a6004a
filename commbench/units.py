"""Sizes, times and bandwidths: parsing what a user types, and printing it back.

On the command line K, M and G are 1024-based, as in nccl-tests; bandwidths are printed
in GB/s with GB = 1e9 bytes. Everything inside commbench is in SI base units.
"""

from __future__ import annotations

import re

_SIZE = re.compile(r"^(\d+)([KMGT]?)(?:i?B)?$", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|m|h|d)?$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_SIZES = 10_000


def parse_size(text: str) -> int:
    """A message size in bytes: ``8``, ``1K``, ``64M``, ``2G`` (1024-based).

    Raises ValueError with a sentence a user can act on.
    """
    match = _SIZE.match(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size: write bytes as a whole number with K, M, G or T, such as 64K or 16M")
    value: int = int(match[1]) * 1024 ** _POWER[match[2].upper()]
    if value < 1:
        raise ValueError(f"size {text!r} is below one byte")
    return value


def parse_sizes(text: str) -> tuple[int, ...]:
    """Message sizes in bytes, ascending for a range and in the given order for a list.

    ``8:64M:4x`` multiplies by 4, ``1M:8M:+1M`` adds 1 MiB, ``8:64M`` doubles, ``8,1K,1M`` lists.
    Raises ValueError.
    """
    sizes: list[int] = []
    for part in text.split(","):
        sizes.extend(_range(part) if ":" in part else [parse_size(part)])
        if len(sizes) > MAX_SIZES:
            raise ValueError(f"sizes {text!r} make more than {MAX_SIZES} sizes: use a larger step")
    return tuple(dict.fromkeys(sizes))


def _range(text: str) -> list[int]:
    fields = text.strip().split(":")
    if len(fields) not in (2, 3):
        raise ValueError(f"{text!r} is not a size range: write FIRST:LAST:STEP, such as 8:64M:4x or 1M:8M:+1M")
    first, last = parse_size(fields[0]), parse_size(fields[1])
    if last < first:
        raise ValueError(f"size range {text!r} ends below its start: write the smaller size first")
    step = fields[2] if len(fields) == 3 else "2x"
    factor = re.fullmatch(r"(\d+)x", step.strip(), re.IGNORECASE)
    if factor:
        times = int(factor[1])
        if times < 2:
            raise ValueError(f"size step {step!r} never ends: use a factor of 2x or more, or +SIZE to add")
        return _grow(first, last, lambda size: size * times, text)
    if step.startswith("+"):
        add = parse_size(step[1:])
        return _grow(first, last, lambda size: size + add, text)
    raise ValueError(f"size step {step!r} is neither a factor such as 4x nor an increment such as +1M")


def _grow(first: int, last: int, step, text: str) -> list[int]:  # type: ignore[no-untyped-def]
    sizes = []
    size = first
    while size <= last:
        sizes.append(size)
        if len(sizes) > MAX_SIZES:
            raise ValueError(f"size range {text!r} makes more than {MAX_SIZES} sizes: use a larger step")
        size = step(size)
    return sizes


def parse_duration(text: str) -> float:
    """A duration in seconds: ``5s``, ``10m``, ``2h``, ``300ms``; a bare number is seconds. Raises ValueError."""
    match = _DURATION.match(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a duration: write a number with us, ms, s, m, h or d, such as 5s or 10m")
    value = float(match[1]) * _SECONDS[match[2] or "s"]
    if value <= 0:
        raise ValueError(f"duration {text!r} must be more than zero")
    return value


def parse_fraction(text: str) -> float:
    """A relative amount: ``2%`` or ``0.02`` gives 0.02. Raises ValueError unless it lies in (0, 1)."""
    body = text.strip()
    try:
        value = float(body[:-1]) / 100 if body.endswith("%") else float(body)
    except ValueError:
        raise ValueError(f"{text!r} is not a percentage: write for example 2%") from None
    if not 0 < value < 1:
        raise ValueError(f"{text!r} must lie between 0% and 100%")
    return value


def format_size(size: int) -> str:
    """The shortest exact form: 16777216 gives ``16M``, 1000 gives ``1000``."""
    for unit in ("T", "G", "M", "K"):
        power = 1024 ** _POWER[unit]
        if size >= power and size % power == 0:
            return f"{size // power}{unit}"
    return str(size)


def format_time(seconds: float | None) -> str:
    """Three to four significant digits with a unit from ns to s; ``-`` for None."""
    if seconds is None or seconds != seconds:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale * 0.9995:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def format_bandwidth(bytes_per_s: float | None) -> str:
    """GB/s (1e9) with enough digits to compare; ``-`` for None."""
    if bytes_per_s is None or bytes_per_s != bytes_per_s:
        return "-"
    value = bytes_per_s / 1e9
    if value >= 0.1:
        return _digits(value)
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def _digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
