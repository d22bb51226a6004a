"""A CUDA device as torch shows it, for the loop that times operations on it.

Everything goes to torch's current stream. From torch 2.8 on a collective without ``async_op`` is a kernel on that
stream itself (pytorch#148590 and its second landing, #150398); before, and for batched messages in every version, it is
one on a stream of the process group, which waits for the current stream and which the current stream then waits for. In
both cases a mark before the call is passed before the kernel starts, and one after it when the kernel is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

_USUAL_HZ = 1.5e9
_LARGEST_CACHE = 128 << 20  # of devices whose properties do not tell (B200: 126 MiB)


class TorchDevice:
    """``barrier`` enqueues a wait for all ranks; ``cold``: whether ``flush`` does something."""

    def __init__(self, device: torch.device, barrier: Call, cold: bool) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self.barrier = barrier
        self._stream = torch.cuda.current_stream(device)
        self._scratch: torch.Tensor | None = None
        if cold:
            # Twice the cache: half of it may be another part's copy.
            cache = getattr(properties, "L2_cache_size", 0) or _LARGEST_CACHE
            self._scratch = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        # The rate is the highest one: a slower clock makes a pause longer, never shorter.
        self._hz = getattr(properties, "clock_rate", 0) * 1e3 or _USUAL_HZ
        self._sleep: Callable[[int], Any] | None = getattr(torch.cuda, "_sleep", None)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, event: Any) -> None:
        event.record(self._stream)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def flush(self) -> None:
        if self._scratch is not None:
            self._scratch.zero_()

    def idle(self, seconds: float) -> None:
        if self._sleep is not None:
            self._sleep(int(seconds * self._hz))

    def capture(self, call: Call) -> Call:
        return capture(call)


def capture(call: Call) -> Call:
    """What launches, on the current stream, a graph of what ``call`` enqueues. RuntimeError where that is refused.

    ``call`` must have run before: NCCL connects ranks in the first call of each kind. torch's watchdog asks for events
    from another thread, which only the thread's own mode lets it do during a capture.
    """
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        # torch leaves its own stream in place where the end of a capture fails.
        torch.cuda.set_stream(before)
        raise
    return graph.replay
