"""Which schedule a library's operation is known to be."""

from __future__ import annotations

from dataclasses import dataclass

from commbench.schedules.catalogue import build
from commbench.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A schedule of the catalogue, and who plays which of its ranks.

    ``collective`` may be another than what was asked for. ``order[r]`` is the rank of the group that plays rank r of
    the schedule, the first being its root; empty where every rank plays itself.
    """

    collective: str
    algorithm: str
    pieces: int = 1
    order: tuple[int, ...] = ()

    def played(self, hosts: tuple[int, ...], root: int = 0) -> tuple[Schedule, tuple[int, ...]]:
        """The schedule for a group whose ranks are on these hosts, and the hosts of the schedule's own ranks."""
        players = self.order or tuple(range(len(hosts)))
        in_order = tuple(hosts[rank] for rank in players)
        return (
            build(self.collective, self.algorithm, len(hosts), 0 if self.order else root, self.pieces, in_order),
            in_order,
        )
