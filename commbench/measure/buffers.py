"""How many sets of buffers a measurement rotates through, so that the cache does not flatter it."""

from __future__ import annotations

TOTAL_BYTES = 64 << 20  # what the sets take together: twice a large last-level cache
MOST = 32


def buffer_sets(set_bytes: int, cache: str, *, most: int = MOST, least: int = 1) -> int:
    """Sets of ``set_bytes`` each: as many as fill TOTAL_BYTES, within ``least`` and ``most``; ``least`` when the cache
    is to be ``warm``."""
    if cache == "warm":
        return least
    return max(least, min(most, TOTAL_BYTES // max(1, set_bytes)))
