"""The clock that stamps iterations, and the wait for an agreed start.

``time.perf_counter_ns`` is CLOCK_MONOTONIC on Linux: one clock for all processes of a host.
"""

from __future__ import annotations

import os
import time

now_ns = time.perf_counter_ns
# How far two ranks' readings of one host's clock can be apart: a pass through the spin loop, measured 0.1-0.2 us.
SAME_HOST_ERROR_S = 2e-7


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def wait_until(start_ns: int, spin: bool) -> None:
    """Return at ``start_ns`` or at once if it has passed. Ranks without a core of their own sleep: a spinning one
    would hold the core that its peer needs to get ready."""
    if not spin:
        left = start_ns - now_ns()
        if left > 0:
            time.sleep(left / 1e9)
        return
    while now_ns() < start_ns:
        pass
