"""What measuring needs from the control plane; ``launch.client`` provides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Control(Protocol):
    """Agreement among ranks, outside timed code and never over the backend. Values are JSON.

    Every rank makes the same calls in the same order.
    """

    rank: int
    world: int

    def gather(self, value: Any, blob: bytes = b"") -> list[tuple[Any, bytes]] | None:
        """Every rank's (value, blob) in rank order at rank 0, None elsewhere."""

    def share(self, value: Any = None) -> Any:
        """Rank 0's value on every rank."""

    def agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What ``decide`` makes, at rank 0, of every rank's value; told to all."""

    def expect(self, seconds: float, doing: str) -> None:
        """From rank 0: every rank will come forward within ``seconds``, or it is named."""

    @property
    def beat_address(self) -> int:
        """Where ``beat`` keeps the iteration, 8 bytes; 0: nowhere."""

    def beat(self, phase: str, iteration: int = 0, case: int | None = None) -> None:
        """Note where this rank is."""
