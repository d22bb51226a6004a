"""Shapes of well-known models' layers of experts, with where each number is from.

A profile is named as its model, or with ``-prefill`` or ``-decode``: how many tokens a rank has and in which mode. Without
either it is the prefill.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from commbench.registry import unknown_name
from commbench.workloads import Workload

DATA = Path(__file__).with_name("profiles.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """``dtype``: what a dispatch sends. ``source``: files and papers of the numbers."""

    name: str
    tokens: int
    hidden: int
    experts: int
    topk: int
    routing: str
    mode: str
    dtype: str
    source: str

    @property
    def workload(self) -> Workload:
        return Workload(
            tokens=self.tokens,
            hidden=self.hidden,
            experts=self.experts,
            topk=self.topk,
            routing=self.routing,
            mode=self.mode,
        )


@lru_cache(maxsize=1)
def profiles() -> dict[str, Profile]:
    """All of them, by name."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    found: dict[str, Profile] = {}
    for model, shape in data["models"].items():
        found[model] = _profile(model, shape, data["phases"]["prefill"])
        for phase, of_phase in data["phases"].items():
            name = f"{model}-{phase}"
            found[name] = _profile(name, shape, of_phase)
    return found


def profile(name: str) -> Profile:
    """The profile of that name. Raises ValueError with the nearest name for an unknown one."""
    known = profiles()
    if name not in known:
        raise ValueError(unknown_name("profile", name, known))
    return known[name]


def _profile(name: str, shape: dict[str, Any], phase: dict[str, Any]) -> Profile:
    source = f"{shape['source']}; tokens and mode: {phase['source']}"
    return Profile(name=name, tokens=phase["tokens"], mode=phase["mode"], **{**shape, "source": source})
