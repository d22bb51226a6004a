"""Who is to blame: from what the hub saw of every rank to one line that names rank, host and case.

Causes are told from effects: a killed rank leaves without a word while its peers report broken connections, are
terminated by the launcher, or simply wait; so a rank that left without a word is blamed first, then one that
did not answer, then one that lags behind, and a rank that reports an error only when nobody else explains it.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench.launch.heartbeat import PHASES, Beat

EXIT_FAILED = 3
# Open MPI's last words on a rank that was killed before it could reach the hub.
_LAUNCHER_SAYS = re.compile(r"process rank (\d+) .*exited on signal (\d+)")


@dataclass(kw_only=True, slots=True)
class Evidence:
    """What is known of every rank. Ranks in ``lost`` are in the order in which their connections closed; ``home`` is
    where a rank is that has not said so itself."""

    world: int
    home: str = "an unknown host"
    hellos: dict[int, dict[str, Any]] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)
    started: bool = False
    doing: str = "starting"
    lost: list[int] = field(default_factory=list)
    failed: dict[int, tuple[str, int]] = field(default_factory=dict)
    terminated: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    beats: dict[int, Beat] = field(default_factory=dict)
    exits: dict[int, tuple[int, str]] = field(default_factory=dict)
    launcher_exit: tuple[int, str] | None = None

    def arrive(self, rank: int, hello: dict[str, Any]) -> None:
        self.hellos[rank] = hello

    def lose(self, rank: int) -> bool:
        """A connection closed; whether that is a sign of a fault."""
        if rank in self.left or rank in self.failed or rank in self.terminated:
            return False
        self.lost.append(rank)
        return True

    def fail(self, rank: int, reason: str, code: int, beat: dict[str, Any]) -> None:
        self.failed[rank] = (reason, code)
        self.beats[rank] = Beat(**beat)

    def terminate(self, rank: int, beat: dict[str, Any]) -> None:
        self.terminated.add(rank)
        self.beats[rank] = Beat(**beat)

    def leave(self, rank: int) -> None:
        self.left.add(rank)

    def end(self, rank: int | None, code: int, words: str) -> bool:
        """A child process ended; whether that is a sign of a fault."""
        if rank is None:
            self.launcher_exit = (code, words)
            return not self.all_left()
        self.exits[rank] = (code, words)
        return rank not in self.left

    def ask(self) -> None:
        self.answered.clear()

    def answer(self, rank: int, beat: dict[str, Any]) -> None:
        self.answered.add(rank)
        self.beats[rank] = Beat(**beat)

    def all_left(self) -> bool:
        return len(self.left) == self.world

    def stopped(self) -> tuple[int, ...]:
        """Ranks on this host that the kernel holds stopped. A rank inside a library that keeps the interpreter to itself
        cannot answer either: this tells the two apart."""
        here = [rank for rank, said in self.hellos.items() if said.get("host") == self.home]
        return tuple(rank for rank in sorted(here) if _state(self.hellos[rank].get("pid")) in ("T", "t"))

    def host(self, rank: int) -> str:
        return str(self.hellos.get(rank, {}).get("host", self.home))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a launch ended: ``status`` for end.json, the exit code, and one line for a person."""

    status: str
    code: int
    line: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def ok(cls) -> Outcome:
        return cls(status="ok", code=0)

    @classmethod
    def failed(cls, line: str, *, code: int = EXIT_FAILED, ranks: tuple[int, ...] = ()) -> Outcome:
        return cls(status="failed", code=code, line=line, ranks=ranks)

    @classmethod
    def interrupted(cls, reason: str, evidence: Evidence, beats: dict[int, Beat]) -> Outcome:
        where = _where(evidence, {**evidence.beats, **beats}, 0)
        ranks = f"ranks 0-{evidence.world - 1} on {_hosts(evidence)}"
        return cls(status="interrupted", code=EXIT_FAILED, line=f"{reason} {where}, {ranks}")


def judge_startup(evidence: Evidence, seconds: float) -> Outcome:
    """Not everyone arrived in time."""
    missing = tuple(rank for rank in range(evidence.world) if rank not in evidence.hellos)
    here = ", ".join(f"{rank} on {evidence.host(rank)}" for rank in sorted(evidence.hellos)) or "none"
    return Outcome(
        status="timeout",
        code=EXIT_FAILED,
        ranks=missing,
        line=f"{_name(missing)} did not arrive within {seconds:.0f} s (arrived: {here}): "
        "check that the launcher started every rank and that all can reach rank 0",
    )


def judge_fault(evidence: Evidence, pages: dict[int, Beat], deadline_s: float | None = None) -> Outcome:
    """One line for a fault that shows in ``evidence``; ``pages`` are heartbeats read without asking."""
    beats = {**evidence.beats, **pages}
    told = _LAUNCHER_SAYS.search(evidence.launcher_exit[1]) if evidence.launcher_exit else None
    if told and int(told[1]) not in evidence.lost:
        evidence.exits.setdefault(int(told[1]), (-int(told[2]), ""))
        evidence.terminated.discard(int(told[1]))
    if evidence.launcher_exit is not None and not evidence.hellos and not told:
        code, words = evidence.launcher_exit
        return Outcome.failed(f"the launcher ended with code {code} before any rank arrived: {words or 'no message'}")
    killed = [rank for rank, (code, _) in evidence.exits.items() if code < 0 and rank not in evidence.terminated]
    for ranks in (killed, evidence.lost, [r for r in evidence.exits if r not in evidence.failed]):
        if ranks:
            rank = ranks[0]
            return _blame(evidence, beats, rank, _how_it_ended(evidence, rank))
    if deadline_s is not None:
        return _judge_silence(evidence, beats, deadline_s)
    stopped = evidence.stopped()
    if stopped:
        return _blame(evidence, beats, stopped[0], "is stopped (SIGSTOP or a debugger), and its peers gave up")
    missing = tuple(rank for rank in range(evidence.world) if rank not in evidence.hellos)
    if missing and not evidence.failed:
        return Outcome.failed(f"{_name(missing)} on {evidence.home} ended before arriving", ranks=missing)
    if evidence.failed:
        rank = min(evidence.failed, key=lambda r: (_progress(beats.get(r)), r))
        reason, code = evidence.failed[rank]
        return _blame(evidence, beats, rank, f"failed: {reason}", code)
    first = min(evidence.terminated, default=0)
    return _blame(evidence, beats, first, "was told to end by its launcher (SIGTERM)")


def _judge_silence(evidence: Evidence, beats: dict[int, Beat], deadline_s: float) -> Outcome:
    silent = tuple(rank for rank in range(evidence.world) if rank not in evidence.answered)
    stopped = evidence.stopped()
    if silent or stopped:
        silent = stopped or silent
        what = "did not answer (stopped, frozen or unreachable)"
        late = silent
    else:
        least = min(_progress(beats.get(rank)) for rank in range(evidence.world))
        late = tuple(rank for rank in range(evidence.world) if _progress(beats.get(rank)) == least)
        what = "did not arrive" if len(late) < evidence.world else "are all waiting inside the library"
    hosts = ", ".join(dict.fromkeys(evidence.host(rank) for rank in late))
    where = _where(evidence, beats, late[0])
    return Outcome(
        status="timeout",
        code=EXIT_FAILED,
        ranks=late,
        line=f"{_name(late)} on {hosts} {what} within {deadline_s:.0f} s {where}",
    )


def _blame(evidence: Evidence, beats: dict[int, Beat], rank: int, what: str, code: int = EXIT_FAILED) -> Outcome:
    line = f"rank {rank} on {evidence.host(rank)} {what} {_where(evidence, beats, rank)}"
    return Outcome.failed(line, code=code, ranks=(rank,))


def _how_it_ended(evidence: Evidence, rank: int) -> str:
    code, words = evidence.exits.get(rank, (None, ""))
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name})"
    if code is not None:
        return f"ended with code {code}" + (f": {words}" if words else "")
    return "ended without a word (killed, or its host is gone)"


def _where(evidence: Evidence, beats: dict[int, Beat], rank: int) -> str:
    beat = beats.get(rank)
    if beat is None or not 0 <= beat.case < len(evidence.titles):
        return f"while {evidence.doing}"
    place = f", iteration {beat.iteration}" if beat.phase == "inside" else f" ({beat.phase})"
    return f"during {evidence.titles[beat.case]}{place}"


def _progress(beat: Beat | None) -> tuple[int, int, int]:
    if beat is None:
        return (-2, 0, 0)
    return (beat.case, beat.iteration, PHASES.index(beat.phase))


def _name(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _state(pid: Any) -> str:
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, TypeError, ValueError, IndexError):
        return ""


def _hosts(evidence: Evidence) -> str:
    return ", ".join(dict.fromkeys(evidence.host(rank) for rank in sorted(evidence.hellos))) or "no host"
