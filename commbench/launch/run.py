"""A run in progress: what is heard of it, and what its directory says of it as a whole."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import commbench
from commbench.cases import Layout, Sweep
from commbench.launch.judge import Outcome
from commbench.launch.order import Launches
from commbench.launch.variants import Variant, overridden
from commbench.provenance.env import collect_env
from commbench.provenance.git import collect_git
from commbench.records import END, MANIFEST
from commbench.store.calibration import CALIBRATION, Calibration, write_calibration
from commbench.store.writer import StoreError, reserve, utc_now, write_json


def new_seed() -> int:
    return secrets.randbits(31)


def broken() -> Outcome:
    """Until a launch says otherwise: an error of our own, or a second Ctrl-C, must not pass for a good end."""
    return Outcome.failed("commbench itself failed")


@dataclass(kw_only=True)
class Run:
    """A run in progress, and afterwards what came of it. ``points`` are kept here as well as on disk."""

    sweep: Sweep
    directory: Path
    on_event: Callable[[dict[str, Any]], None]
    points: list[dict[str, Any]] = field(default_factory=list)
    given: Calibration | None = None  # links from a file; else each launch measures its own
    thorough: bool = False  # whether links are what is being measured
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # backend -> its calibration
    links: dict[str, Any] = field(default_factory=dict)  # backend -> its links as they were last measured
    layout: Layout | None = None
    outcome: Outcome = field(default_factory=broken)
    repetitions: int = 0  # how often all sets of processes have been launched
    precise: bool | None = None  # whether the precision over launches was reached, where one was asked for

    def hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "point":
            self.points.append(event["point"])
        if event["kind"] == "calibration":
            self._keep(event["backend"], event["calibration"])
        self.on_event(event)

    def _keep(self, backend: str, calibration: dict[str, Any]) -> None:
        """The first launch's links, in a file that other commands take."""
        assert self.layout is not None
        self.links[backend] = calibration["links"]
        if self.found.setdefault(backend, calibration) is calibration:
            write_calibration(self.directory / CALIBRATION, hosts=self.layout.hosts, backends=self.found)

    def begin(
        self, layout: Layout, launcher: str, *, sets: int, cases: int, launches: Launches, variants: Sequence[Variant],
        spread_s: float | None = None, bind: str = "none",
    ) -> None:  # fmt: skip
        """The manifest, on disk before the first timing. ``sets`` and ``cases`` are those of one repetition."""
        self.layout = layout
        reserve(self.directory / END)
        write_json(
            self.directory / MANIFEST,
            {
                "run_id": self.directory.name, "started_utc": utc_now(), "commbench": commbench.__version__,
                "git": collect_git(), "argv": sys.argv, "launcher": launcher, "launches": launches.most * sets,
                "cases": launches.most * cases, "launches_asked": str(launches), "spread_s": spread_s, "bind": bind,
                "variants": {v.name: collect_env(v.settings) for v in variants if v.name},
                "overridden": overridden(variants, os.environ),
                "sweep": self.sweep.to_dict(), "label": self.sweep.label, "seed": self.sweep.seed,
                "world": layout.world, "hosts": list(layout.hosts), "environment": collect_env(os.environ),
            },
        )  # fmt: skip

    def end(self) -> None:
        """How it ended: said at once, since a launcher may be about to kill this process, and then written, last of all
        and into space that was reserved for it."""
        if self.outcome.line:
            kept = f"{len(self.points)} points kept in {self.directory}"
            self.on_event({"kind": "end", "line": f"{self.outcome.line}; {kept}"})
        counts: dict[str, int] = {}
        for point in self.points:
            counts[point["status"]] = counts.get(point["status"], 0) + 1
        try:
            write_json(
                self.directory / END,
                {
                    "status": self.outcome.status, "reason": self.outcome.line, "exit_code": self.exit_code,
                    "ended_utc": utc_now(), "points": counts, "blamed_ranks": list(self.outcome.ranks),
                    "repetitions": self.repetitions, "precise": self.precise,
                },
            )  # fmt: skip
        except StoreError as error:
            print(f"commbench: {error}", file=sys.stderr)

    @property
    def exit_code(self) -> int:
        if self.outcome.code:
            return self.outcome.code
        return 3 if any(point["status"] in ("wrong", "failed") for point in self.points) else 0
