"""Which sets of processes a sweep needs: libraries read what they are told once, when they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from commbench.backends import BACKENDS
from commbench.backends.forcing import can_force
from commbench.cases import Case
from commbench.launch.variants import Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSet:
    """What one set of processes is for. ``forced``: the algorithm that the libraries are told to use, if any."""

    backends: tuple[str, ...]
    cases: tuple[Case, ...]
    forced: str | None = None
    variant: Variant = field(default_factory=Variant)

    @property
    def title(self) -> str:
        """What a message to a person calls it."""
        forced = f" by {self.forced}" if self.forced else ""
        return f"{', '.join(self.backends)}{forced}" + (f", variant {self.variant.name}" if self.variant.name else "")


def process_sets(
    backends: tuple[str, ...], cases: tuple[Case, ...], variants: Sequence[Variant] = (Variant(),)
) -> list[ProcessSet]:
    """Backends by what starts their ranks, each kind with processes of its own; for every forced algorithm others, and
    all of them for every variant (for one of certain backends, theirs).

    A case whose algorithm its backend cannot be told to use goes to the set without, to be skipped there.
    """
    found = []
    for variant in variants:
        meant = tuple(name for name in backends if not variant.backends or name in variant.backends)
        for kind in dict.fromkeys(BACKENDS[name].starter for name in meant):
            mine = tuple(name for name in meant if BACKENDS[name].starter == kind)
            for forced in dict.fromkeys((None, *(_forced(case) for case in cases if case.backend in mine))):
                those = tuple(case for case in cases if case.backend in mine and _forced(case) == forced)
                needed = tuple(name for name in mine if any(case.backend == name for case in those))
                if needed or not cases:
                    found.append(ProcessSet(backends=needed or mine, cases=those, forced=forced, variant=variant))
    return found


def _forced(case: Case) -> str | None:
    return case.algorithm if can_force(case.backend, case.collective, case.algorithm) else None
