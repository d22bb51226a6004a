"""A number that was found, beside what it should be."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``found`` against the limits that it should keep to."""

    what: str
    found: float
    least: float = -math.inf
    most: float = math.inf

    @property
    def kept(self) -> bool:
        return self.least <= self.found <= self.most

    def __str__(self) -> str:
        limits = " and ".join(
            text for text, limit in ((f">= {self.least:.3g}", self.least), (f"<= {self.most:.3g}", self.most))
            if abs(limit) != math.inf
        )  # fmt: skip
        verdict = "     " if not limits else "ok   " if self.kept else "MISS "
        return f"{verdict}{self.what:<84} {self.found:8.3f}  {limits}"
