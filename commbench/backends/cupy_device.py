"""A CUDA device as cupy shows it: one stream, its marks and its graphs, for the loop that times operations on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import cupy
import numpy as np

Call = Callable[[], Any]

# A pause that ends by the device's own nanoseconds, whatever its clock rate.
_SPIN = """
extern "C" __global__ void spin(long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < (unsigned long long)ns);
}
"""


class CupyDevice:
    """Makes the device current in this thread, and a stream of its own that is cupy's current one from then on."""

    def __init__(self, number: int) -> None:
        self._device = cupy.cuda.Device(number)
        self._device.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.properties: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(number)
        self._spin: Any = None
        self.no_pause: str | None = None  # why there are no pauses
        try:
            kernel = cupy.RawKernel(_SPIN, "spin")
            kernel.compile()
            self._spin = kernel
        except Exception as error:  # noqa: BLE001  whatever a missing compiler makes cupy raise
            self.no_pause = next(iter(str(error).splitlines()), type(error).__name__)

    def event(self) -> Any:
        return cupy.cuda.Event()

    def record(self, event: Any) -> None:
        event.record(self.stream)

    def passed(self, event: Any) -> bool:
        return bool(event.done)

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(begin, end))

    def synchronize(self) -> None:
        self.stream.synchronize()

    def idle(self, seconds: float) -> None:
        if self._spin is not None:
            self._spin((1,), (1,), (np.int64(seconds * 1e9),))

    def capture(self, call: Call) -> Call:
        """What launches a graph of what ``call`` enqueues. RuntimeError where that is refused.

        The stream stays usable then: a capture that has begun is ended.
        """
        self.stream.begin_capture()
        try:
            call()
        except BaseException:
            with suppress(RuntimeError):
                self.stream.end_capture()
            raise
        return partial(self.stream.end_capture().launch, self.stream)

    def free_bytes(self) -> int:
        """What new memory may take, that which cupy keeps of earlier cases included."""
        return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())


class TimedDevice:
    """A device with what a round of measuring adds: a ``barrier`` of all ranks, and a cache that is emptied if ``cold``."""

    def __init__(self, device: CupyDevice, barrier: Call, cold: bool) -> None:
        self.barrier = barrier
        self.event, self.record, self.passed = device.event, device.record, device.passed
        self.elapsed_ms, self.synchronize = device.elapsed_ms, device.synchronize
        self.idle, self.capture = device.idle, device.capture
        self.flush: Call = _nothing
        if cold:
            # Twice the cache: half of it may be another part's copy.
            size = 2 * int(device.properties["l2CacheSize"])
            scratch = cupy.cuda.alloc(size)
            self.flush = partial(scratch.memset_async, 0, size, device.stream)


def _nothing() -> None:
    return None
