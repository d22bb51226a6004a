"""Collective algorithms as data: built once, then simulated, counted, priced and executed.

The proof that a schedule computes its collective is in :mod:`commbench.schedules.simulation`, which needs numpy.
"""

from __future__ import annotations

from commbench.schedules.catalogue import ALGORITHMS, HIERARCHICAL, PIPELINED, build, buildable
from commbench.schedules.counting import Counts, count, leaving
from commbench.schedules.placement import Place, element_range, final_blocks, initial_blocks, places
from commbench.schedules.schedule import Block, Message, Schedule, ScheduleError, Transfer, from_rounds

__all__ = [
    "ALGORITHMS",
    "HIERARCHICAL",
    "PIPELINED",
    "Block",
    "Counts",
    "Message",
    "Place",
    "Schedule",
    "ScheduleError",
    "Transfer",
    "build",
    "buildable",
    "count",
    "element_range",
    "final_blocks",
    "from_rounds",
    "initial_blocks",
    "leaving",
    "places",
]
