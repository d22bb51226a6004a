"""One clock for ranks whose clocks differ: fits every clock to rank 0's by messages there and back, and keeps it fitted.

Clocks are taught in a tree of ceil(log2 n) rounds (HCA3): a child fits its clock to its parent's by exchanges over the
backend's own messages, then gets the parent's model, and teaches others in later rounds. One rank speaks for each clock
and hands the model to the ranks that share it. Rank 0 hears of all models over the control plane.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commbench.measure.clock import (
    SAME_HOST_ERROR_S,
    WRONG,
    CommonClock,
    LocalClock,
    OneClock,
    identity,
    local_clock,
    now_ns,
)
from commbench.measure.clock_model import FAST, NONE, SAME, ClockModel, Exchanges, Fit, Offsets, fit, offsets, tree
from commbench.measure.control import Control
from commbench.measure.operation import Messenger, Post
from commbench.units import format_time

_NEVER = np.iinfo(np.int64).max
OFFSETS = 40  # of a first fit, spread over
WINDOW_S = 0.2  # this long: the drift comes from the ends of it
LATEST = 5  # offsets of a later fit, at once; the drift comes from what was found before
LEAST_EXCHANGES, MOST_EXCHANGES = 3, 30  # an offset takes, until one is nearly as quick as the quickest
OFFSET_S = 0.02  # and no longer than this
ROUND_S = 2.0  # of the tree, at most, on the busiest machine
HISTORY_S, MOST_OFFSETS = 60.0, 200  # what a fit looks back at: drifts change with temperature and time services
# Fitted again when this old. Time services change a clock's rate once a minute or less often; a change by 1 ppm makes
# 5 us before it is seen.
MOST_AGE_S = 5.0
# Sooner where the drift has come to be half of the error, but not sooner than this, nor before ten times as long has
# passed as the last one took.
LEAST_AGE_S, LEAST_AGE_FITS = 0.5, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a clock's speaker tells rank 0 of it, in JSON: its model, how far it may be off at the common time
    ``since_ns`` and by what part of the time from then on; how far it was off where the model before put it (None: there was none), and how far that model and
    this one together may have been off; and the shortest round trip to its parent."""

    reference_ns: int
    offset_ns: int
    slope: float
    since_ns: int
    error_s: float
    drift_error: float
    off_s: float | None
    stated_s: float | None
    round_trip_s: float

    def error_at(self, common_ns: int) -> float:
        return self.error_s + self.drift_error * (common_ns - self.since_ns) * 1e-9

    @property
    def beyond(self) -> float:
        """How far it was off, in parts of what had been stated."""
        return abs(self.off_s) / self.stated_s if self.off_s is not None and self.stated_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


_ROOT = Told(
    reference_ns=0,
    offset_ns=0,
    slope=0.0,
    since_ns=0,
    error_s=0.0,
    drift_error=0.0,
    off_s=None,
    stated_s=None,
    round_trip_s=0.0,
)


@dataclass(kw_only=True)
class FittedClock:
    """This rank's side of a common clock. ``clocks``: the ranks that read each, the first of which speaks for it.

    ``on_fit`` hears at rank 0 of every fit, in JSON: ``at_ns``, the common time from which on it holds, and of each clock
    what its speaker told.
    """

    control: Control
    messenger: Messenger
    local: LocalClock
    clocks: tuple[tuple[int, ...], ...]
    deadline_s: float
    on_fit: Callable[[dict[str, Any]], None] = lambda fit: None
    several: bool = True
    told: list[Told] = field(default_factory=list)
    at_ns: int = 0
    fits: int = 0
    off: int = 0  # in how many of them a clock was further from its model than was stated
    worst: int | None = None  # which clock was furthest off then
    worst_told: Told = _ROOT
    _model: ClockModel = SAME
    _error_s: float = 0.0
    _drift_error: float = 0.0
    _took_s: float = 0.0
    _learned_ns: int = 0  # on this rank's clock: when the error was that

    def __post_init__(self) -> None:
        rank = self.control.rank
        self._of = {rank: index for index, ranks in enumerate(self.clocks) for rank in ranks}
        mine = self.clocks[self._of[rank]]
        speakers = [ranks[0] for ranks in self.clocks]
        read = self._read = self.local.reader()
        self._parent: _Child | None = None
        self._children: list[_Parent] = []
        for parent, child in (pair for pairs in tree(len(speakers)) for pair in pairs):
            if rank == speakers[child]:
                self._parent = _Child(self.messenger, speakers[parent], read)
            if rank == speakers[parent]:
                self._children.append(_Parent(self.messenger, speakers[child], read))
        others = mine[1:] if rank == mine[0] else ()
        self._to_others = _Words(self.messenger, to=others) if others else None
        self._from_speaker = _Words(self.messenger, source=mine[0]) if rank != mine[0] else None

    def now_ns(self) -> int:
        return int(self.to_common(now_ns()))

    def to_mine(self, common_ns: ArrayLike) -> NDArray[np.int64]:
        return self.local.true(self._model.to_local(common_ns))

    def to_common(self, mine_ns: ArrayLike) -> NDArray[np.int64]:
        return self._model.to_target(self.local.read(mine_ns))

    def error_s(self, members: Sequence[int]) -> float:
        """Errors of the two clocks that are known worst, as independent ones add up."""
        common_ns = self.now_ns()
        clocks = sorted({self._of[rank] for rank in members})
        if len(clocks) == 1:
            return SAME_HOST_ERROR_S
        errors = sorted(self.told[clock].error_at(common_ns) for clock in clocks)
        return float(np.hypot(errors[-1], errors[-2])) + SAME_HOST_ERROR_S

    def due(self) -> bool:
        common_ns = self.now_ns()
        age_s = (common_ns - self.at_ns) * 1e-9
        aged = any(one.error_at(common_ns) > 2 * one.error_s for one in self.told)
        return age_s > max(LEAST_AGE_S if aged else MOST_AGE_S, LEAST_AGE_FITS * self._took_s)

    def refit(self, iteration: int = 0) -> None:
        control = self.control
        control.expect(self.deadline_s + ROUND_S * len(tree(len(self.clocks))), "synchronising clocks")
        control.beat("synchronising", iteration)
        began = time.perf_counter()
        told = None if self._from_speaker is not None else self._learn()
        gathered = control.gather(told and told.to_dict())
        # Until all speakers are done the others wait here, where that takes no core from them.
        control.share(None)
        if self._from_speaker is not None:
            self._model = self._from_speaker.receive()[0]
        if self._to_others is not None:
            self._to_others.send(*self._known_now())
        if gathered is not None:
            self._note([Told(**gathered[ranks[0]][0]) for ranks in self.clocks], began)

    def _note(self, told: list[Told], began: float) -> None:
        self.told = told
        self.at_ns = self.now_ns()
        self._took_s = time.perf_counter() - began if self.fits else 0.0
        self.fits += 1
        found = [(one.beyond, index) for index, one in enumerate(self.told) if one.beyond > 1]
        if found:
            self.off += 1
            if max(found)[0] > self.worst_told.beyond:
                self.worst = max(found)[1]
                self.worst_told = self.told[self.worst]
        self.on_fit({"at_ns": self.at_ns, "clocks": [one.to_dict() for one in self.told]})

    def summary(self, hosts: Sequence[str], when: str = "before") -> dict[str, Any]:
        """For the launch's manifest, at rank 0: the clocks, the last fit under ``when``, and what to tell a person."""
        clocks = [{"host": hosts[ranks[0]], "ranks": list(ranks)} for ranks in self.clocks]
        note = None
        if self.worst is not None and self.worst_told.off_s is not None:
            note = (
                f"clocks: that of {clocks[self.worst]['host']} was {format_time(abs(self.worst_told.off_s))} from where it "
                f"should have been, and {format_time(self.worst_told.stated_s)} had been stated (so in {self.off} of "
                f"{self.fits - 1} checks): isolated times between hosts may be wrong by as much"
            )
        return {
            "source": "CLOCK_MONOTONIC", "wrong": os.environ.get(WRONG), "clocks": clocks, "fits": self.fits, "note": note,
            when: {"at_ns": self.at_ns, "clocks": [one.to_dict() for one in self.told]},
        }  # fmt: skip

    def _learn(self) -> Told:
        """From the parent, then teach; what to tell rank 0 of the clock that this rank speaks for."""
        told = _ROOT
        if self._parent is not None:
            found, (model, error_s, drift_error) = self._parent.learn()
            before, error_before_s, _ = self._known_now()
            at_ns = self._read()
            self._model, self._learned_ns = found.model.then(model), at_ns
            self._error_s = float(np.hypot(found.error_at(at_ns), error_s))
            self._drift_error = float(np.hypot(found.drift_error, drift_error))
            told = self._told(at_ns, found.round_trip_s, before, error_before_s)
        for child in self._children:
            child.teach(self._known_now)
        return told

    def _known_now(self) -> tuple[ClockModel, float, float]:
        """The model, how far it may be off now, and by what part of the time from now on."""
        age_s = (self._read() - self._learned_ns) * 1e-9
        return self._model, self._error_s + self._drift_error * age_s, self._drift_error

    def _told(self, at_ns: int, round_trip_s: float, before: ClockModel, error_before_s: float) -> Told:
        off_s = stated_s = None
        if before is not SAME:
            off_s = int(before.to_target(at_ns) - self._model.to_target(at_ns)) * 1e-9
            stated_s = error_before_s + self._error_s
        return Told(
            reference_ns=self._model.reference_ns, offset_ns=self._model.offset_ns, slope=self._model.slope,
            since_ns=int(self._model.to_target(at_ns)), error_s=self._error_s, drift_error=self._drift_error, off_s=off_s, stated_s=stated_s,
            round_trip_s=round_trip_s,
        )  # fmt: skip


# -- two ranks ---------------------------------------------------------------------------------------


class _Words:
    """A model in one message: to some ranks, or from one."""

    def __init__(self, messenger: Messenger, to: Sequence[int] = (), source: int | None = None) -> None:
        memory = messenger.buffer(40)
        self._words = np.asarray(memory).view(np.int64)
        self._floats = self._words.view(np.float64)
        self._step = messenger.step(
            [Post(memory, rank) for rank in to], [] if source is None else [Post(memory, source)]
        )

    def send(self, model: ClockModel, error_s: float, drift_error: float) -> None:
        self._words[:2] = model.reference_ns, model.offset_ns
        self._floats[2:] = model.slope, error_s, drift_error
        self._step()

    def receive(self) -> tuple[ClockModel, float, float]:
        self._step()
        (reference_ns, offset_ns), (slope, error_s, drift_error) = self._words[:2].tolist(), self._floats[2:].tolist()
        return ClockModel(reference_ns=reference_ns, offset_ns=offset_ns, slope=slope), error_s, drift_error


class _Parent:
    """Answers a child with what its own clock says, for as long as it is asked, and then gives it its model."""

    def __init__(self, messenger: Messenger, child: int, read: Callable[[], int]) -> None:
        asked, answer = messenger.buffer(8), messenger.buffer(8)
        self._asked, self._answer = np.asarray(asked).view(np.int64), np.asarray(answer).view(np.int64)
        self._receive = messenger.step([], [Post(asked, child)])
        self._send = messenger.step([Post(answer, child)], [])
        self._words = _Words(messenger, to=(child,))
        self._read = read

    def teach(self, known: Callable[[], tuple[ClockModel, float, float]]) -> None:
        receive, send, read, asked, answer = self._receive, self._send, self._read, self._asked, self._answer
        while True:
            receive()
            answer[0] = read()
            send()
            if not asked[0]:
                break
        self._words.send(*known())


class _Child:
    """Asks its parent for the time and knows, from what has been found so far, how its own clock goes against it."""

    def __init__(self, messenger: Messenger, parent: int, read: Callable[[], int]) -> None:
        asks, answer = messenger.buffer(8), messenger.buffer(8)
        self._asks, self._answer = np.asarray(asks).view(np.int64), np.asarray(answer).view(np.int64)
        # One after the other, as the parent has to: what a library needs for a message then counts on both ways alike.
        self._send = messenger.step([Post(asks, parent)], [])
        self._receive = messenger.step([], [Post(answer, parent)])
        self._words = _Words(messenger, source=parent)
        self._read = read
        self._known: Offsets = NONE
        self._fit: Fit | None = None
        self._shortest = _NEVER

    def learn(self) -> tuple[Fit, tuple[ClockModel, float, float]]:
        """The clock against the parent's, and the parent's against the common one."""
        latest = self._offsets(LATEST, 0.0)  # of a first fit, what makes connections
        if self._fit is None or self._fit.contradicts(latest):
            self._known, self._shortest = NONE, _NEVER
            latest = self._offsets(OFFSETS, WINDOW_S).followed_by(self._offsets(LATEST, 0.0))
        self._exchange(0)
        known = self._known.followed_by(latest)
        self._known = known.last(int(known.at[-1]) - round(HISTORY_S * 1e9), MOST_OFFSETS)
        self._fit = fit(self._known)
        return self._fit, self._words.receive()

    def _exchange(self, more: int) -> tuple[int, int, int]:
        """When it was asked, when the parent answered, and when that was there."""
        read, asks, send, receive = self._read, self._asks, self._send, self._receive
        sent = read()
        asks[0] = more
        send()
        receive()
        received = read()
        return sent, int(self._answer[0]), received

    def _offsets(self, count: int, window_s: float) -> Offsets:
        """So many, spread over the window."""
        rows: list[tuple[int, int, int, int]] = []
        began = time.perf_counter()
        for number in range(count):
            left = began + window_s * number / max(1, count - 1) - time.perf_counter()
            if left > 0:
                time.sleep(left)
            until = time.perf_counter() + OFFSET_S
            for tried in range(MOST_EXCHANGES):
                sent, answered, received = self._exchange(1)
                rows.append((sent, answered, received, number))
                enough = received - sent <= FAST * self._shortest or time.perf_counter() > until
                self._shortest = min(self._shortest, received - sent)
                if tried + 1 >= LEAST_EXCHANGES and enough:
                    break
        found = Exchanges(*np.array(rows, dtype=np.int64).T)
        return offsets(found, self._fit.model.slope if self._fit is not None else 0.0)


# -- all ranks ---------------------------------------------------------------------------------------


def find_clocks(control: Control, host: str, local: LocalClock) -> tuple[tuple[int, ...], ...]:
    """The ranks that read each clock, in order of their first; the same on every rank."""
    names: list[str] = control.agree(identity(control.rank, host, local), list)
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return tuple(map(tuple, found.values()))


def common_clock(
    messenger: Callable[[], Messenger] | None, control: Control, host: str, *, deadline_s: float,
    on_fit: Callable[[dict[str, Any]], None] = lambda fit: None,
) -> CommonClock | None:  # fmt: skip
    """The common clock of the world; a call of all ranks. None where there are several clocks, and no messages between
    hosts' memories (``messenger`` None) to fit them by.

    ``messenger`` makes the whole world's. Takes about a quarter of a second for two hosts, and as long again each time
    that their number doubles.
    """
    local = local_clock(control.rank)
    clocks = find_clocks(control, host, local)
    if len(clocks) == 1:
        return OneClock()
    if messenger is None:
        return None
    found = FittedClock(
        control=control, messenger=messenger(), local=local, clocks=clocks, deadline_s=deadline_s, on_fit=on_fit
    )
    found.refit()
    return found
