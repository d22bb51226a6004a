"""Live progress of a run: a line that moves on a terminal, a line a point elsewhere. Goes to standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from commbench.records import size_title
from commbench.units import format_bandwidth, format_time


class Progress:
    """Hears a run's events and shows how far it is."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._launch = ""  # which one this is, before what it does
        self._pausing = False
        self._bar: Any = None
        self._task: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
                auto_refresh=False,  # a thread that draws would take a core from a rank that is being timed
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=total)
            self._bar.start()

    def hear(self, event: dict[str, Any]) -> None:
        """One event of ``launch.runner``."""
        if event["kind"] == "end":
            self.close()
            print(f"commbench: {event['line']}", file=sys.stderr, flush=True)
        if event["kind"] == "calibration":
            print(f"{event['backend']}: links calibrated", file=sys.stderr, flush=True)
        if event["kind"] == "note":
            print(event["line"], file=sys.stderr, flush=True)
        if event["kind"] == "launch":
            self._begin_launch(event)
        if event["kind"] == "pause":
            self._pause(f"next launch in {event['left_s']:.0f} s")
        if event["kind"] == "doing" and self._bar is not None:
            self._describe(event["doing"])
        if event["kind"] != "point":
            return
        self._done += 1
        line = describe(event["point"])
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=max(self._total, self._done))
            self._describe(line)
        else:
            seconds = time.monotonic() - self._began
            count = (self._done - 1) % self._total + 1  # a soak goes through the cases again and again
            print(f"[{count:>{len(str(self._total))}}/{self._total} {seconds:4.0f} s] {line}", file=sys.stderr)

    def _begin_launch(self, event: dict[str, Any]) -> None:
        self._pausing = False
        self._total = max(1, event["cases"])
        if event["of"] < 2:
            return
        of = f"about {event['of']}" if event["open"] else str(event["of"])
        self._launch = f"launch {event['number']} of {of}"
        line = f"{self._launch}: {event['title']}"
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, total=max(self._total, self._done))
            self._describe(event["title"])

    def _pause(self, line: str) -> None:
        if self._bar is not None:
            self._launch = ""
            self._describe(line)
        elif not self._pausing:
            print(line, file=sys.stderr, flush=True)
        self._pausing = True

    def _describe(self, doing: str) -> None:
        self._bar.update(self._task, description=f"{self._launch}: {doing}" if self._launch else doing)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(point: dict[str, Any]) -> str:
    """One point in one line."""
    name = f"{point['backend']} {point['collective']} {size_title(point)} {point['timing']}"
    if point["status"] == "skipped":
        return f"{name}: skipped, {point['reason']}"
    if point["status"] != "ok":
        return f"{name}: {point['status']}, {point['wrong'] or 0} wrong elements"
    if point["pass_index"]:
        name = f"pass {point['pass_index'] + 1}: {name}"
    bandwidth, of = (
        (point["algbw_Bps"], point["bytes_convention"]) if point.get("workload") else (point["busbw_Bps"], "bus")
    )
    rate = f", {format_bandwidth(bandwidth)} GB/s {of}" if bandwidth else ""
    return f"{name}: {format_time(point['time_s'])}{rate}"
