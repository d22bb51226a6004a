"""One clock for ranks whose clocks differ: fits every clock to rank 0's by messages there and back, and keeps it fitted.

Clocks are taught in a tree of ceil(log2 n) rounds (HCA3): a child fits its clock to its parent's by exchanges over the
backend's own messages, then gets the parent's model, and teaches others in later rounds. One rank speaks for each clock
and hands the model to the ranks that share it. Rank 0 hears of all models over the control plane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commbench.measure.clock import SAME_HOST_ERROR_S, LocalClock, identity, local_clock, now_ns
from commbench.measure.clock_model import FAST, NONE, SAME, ClockModel, Exchanges, Fit, Offsets, fit, offsets, tree
from commbench.measure.control import Control
from commbench.measure.operation import Messenger, Post

OFFSETS = 40  # of a first fit, spread over
WINDOW_S = 0.2  # this long: the drift comes from the ends of it
LATEST = 5  # offsets of a later fit, at once; the drift comes from what was found before
LEAST_EXCHANGES, MOST_EXCHANGES = 3, 30  # an offset takes, until one is nearly as quick as the quickest
OFFSET_S = 0.02  # and no longer than this
HISTORY_S, MOST_OFFSETS = 60.0, 200  # what a fit looks back at: drifts change with temperature and time services
# Fitted again when this old. Time services change a clock's rate every 16 s to 17 min; what that does to a time within
# 5 s is found at the next fit.
MOST_AGE_S = 5.0
LEAST_AGE_S = 0.5  # but sooner than that where the drift is not known well enough, though not sooner than this
STATED = 1.0  # a clock further than this many stated errors from its model is counted


class CommonClock(Protocol):
    """What measuring knows of time on several ranks. Readings are ns as 64-bit integers; ``mine``: CLOCK_MONOTONIC, as
    loops read it on this rank; common: what is the same on all ranks.
    """

    several: bool  # whether there is more than one clock

    def now_ns(self) -> int:
        """Common."""

    def to_mine(self, common_ns: ArrayLike) -> NDArray[np.int64]: ...

    def to_common(self, mine_ns: ArrayLike) -> NDArray[np.int64]: ...

    def error_s(self, members: Sequence[int]) -> float:
        """How far the common clock may be apart on two of these ranks now. At rank 0."""

    def due(self) -> bool:
        """Whether clocks ought to be fitted again. At rank 0."""

    def refit(self) -> None:
        """Fit them again: a call of all ranks."""


class OneClock:
    """Of ranks that all read the same."""

    several = False

    def now_ns(self) -> int:
        return now_ns()

    def to_mine(self, common_ns: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(common_ns, dtype=np.int64)

    def to_common(self, mine_ns: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(mine_ns, dtype=np.int64)

    def error_s(self, members: Sequence[int]) -> float:
        return SAME_HOST_ERROR_S

    def due(self) -> bool:
        return False

    def refit(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a clock's speaker tells rank 0 of it, in JSON: its model, how far it may be off at its reference and by what
    part of the time since; how far it was off where the model before put it (None: there was none), how far that model
    and this one together may have been off; and the shortest round trip to its parent."""

    reference_ns: int
    offset_ns: int
    slope: float
    error_s: float
    drift_error: float
    off_s: float | None
    stated_s: float | None
    round_trip_s: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(kw_only=True)
class FittedClock:
    """This rank's side of a common clock. ``clocks``: the ranks that read each, the first of which speaks for it.

    ``on_fit`` hears at rank 0 of every fit: the common time from which on it holds, and what each clock's speaker told.
    """

    control: Control
    messenger: Messenger
    local: LocalClock
    clocks: tuple[tuple[int, ...], ...]
    deadline_s: float
    on_fit: Callable[[int, list[Told]], None] = lambda at_ns, told: None
    several: bool = True
    told: list[Told] = field(default_factory=list)
    at_ns: int = 0
    fits: int = 0
    off: int = 0  # how often a clock was further from its model than was stated
    _model: ClockModel = SAME
    _error_s: float = 0.0
    _drift_error: float = 0.0

    def __post_init__(self) -> None:
        rank = self.control.rank
        self._of = {rank: index for index, ranks in enumerate(self.clocks) for rank in ranks}
        mine = self.clocks[self._of[rank]]
        speakers = [ranks[0] for ranks in self.clocks]
        read = self.local.reader()
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
        age_s = (self.now_ns() - self.at_ns) * 1e-9
        clocks = sorted({self._of[rank] for rank in members})
        if len(clocks) == 1:
            return SAME_HOST_ERROR_S
        errors = sorted(self.told[clock].error_s + self.told[clock].drift_error * age_s for clock in clocks)
        return float(np.hypot(errors[-1], errors[-2])) + SAME_HOST_ERROR_S

    def due(self) -> bool:
        age_s = (self.now_ns() - self.at_ns) * 1e-9
        aged = any(one.drift_error * age_s > one.error_s for one in self.told)
        return age_s > MOST_AGE_S or (aged and age_s > LEAST_AGE_S)

    def refit(self) -> None:
        control = self.control
        control.expect(self.deadline_s, "synchronising clocks")
        control.beat("synchronising")
        told = self._learn()
        gathered = control.gather(told and told.to_dict())
        if gathered is None:
            return
        self.told = [Told(**gathered[ranks[0]][0]) for ranks in self.clocks]
        self.at_ns = self.now_ns()
        self.fits += 1
        self.off += sum(is_off(one) for one in self.told)
        self.on_fit(self.at_ns, self.told)

    def _learn(self) -> Told | None:
        """From the parent, then teach; what to tell rank 0 where this rank speaks for a clock."""
        told = None
        if self._from_speaker is not None:
            self._take(*self._from_speaker.receive())
            return None
        before = self._model, self._error_s, self._drift_error
        if self._parent is None:
            told = Told(
                reference_ns=0, offset_ns=0, slope=0.0, error_s=0.0, drift_error=0.0, off_s=None, stated_s=None,
                round_trip_s=0.0,
            )  # fmt: skip
        else:
            found, (model, error_s, drift_error) = self._parent.learn()
            reference = found.model.reference_ns
            self._take(found.model.then(model), _hypot(found.error_s, error_s), _hypot(found.drift_error, drift_error))
            told = self._compare(reference, found, before)
        words = (self._model, self._error_s, self._drift_error)
        for child in self._children:
            child.teach(*words)
        if self._to_others is not None:
            self._to_others.send(*words)
        return told

    def _take(self, model: ClockModel, error_s: float, drift_error: float) -> None:
        self._model, self._error_s, self._drift_error = model, error_s, drift_error

    def _compare(self, at_ns: int, found: Fit, before: tuple[ClockModel, float, float]) -> Told:
        model, error_s, drift_error = before
        off_s = stated_s = None
        if model is not SAME:
            off_s = int(model.to_target(at_ns) - self._model.to_target(at_ns)) * 1e-9
            stated_s = error_s + drift_error * abs(at_ns - model.reference_ns) * 1e-9 + self._error_s
        return Told(
            reference_ns=self._model.reference_ns, offset_ns=self._model.offset_ns, slope=self._model.slope,
            error_s=self._error_s, drift_error=self._drift_error, off_s=off_s, stated_s=stated_s,
            round_trip_s=found.round_trip_s,
        )  # fmt: skip


def is_off(one: Told) -> bool:
    """Whether a clock was further from where its model put it than had been stated."""
    return one.off_s is not None and one.stated_s is not None and abs(one.off_s) > STATED * one.stated_s


def _hypot(a: float, b: float) -> float:
    return float(np.hypot(a, b))


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

    def teach(self, model: ClockModel, error_s: float, drift_error: float) -> None:
        receive, send, read, asked, answer = self._receive, self._send, self._read, self._asked, self._answer
        while True:
            receive()
            answer[0] = read()
            send()
            if not asked[0]:
                break
        self._words.send(model, error_s, drift_error)


class _Child:
    """Asks its parent for the time and knows, from what has been found so far, how its own clock goes against it."""

    def __init__(self, messenger: Messenger, parent: int, read: Callable[[], int]) -> None:
        more, answer = messenger.buffer(8), messenger.buffer(8)
        self._more, self._answer = np.asarray(more).view(np.int64), np.asarray(answer).view(np.int64)
        self._exchange = messenger.step([Post(more, parent)], [Post(answer, parent)])
        self._words = _Words(messenger, source=parent)
        self._read = read
        self._known: Offsets = NONE
        self._fit: Fit | None = None
        self._shortest = np.iinfo(np.int64).max

    def learn(self) -> tuple[Fit, tuple[ClockModel, float, float]]:
        """The clock against the parent's, and the parent's against the common one."""
        self._more[0] = 1
        latest = self._offsets(LATEST, 0.0)
        if self._fit is None or self._contradicts(latest):
            self._known, self._shortest = NONE, np.iinfo(np.int64).max
            self._known = self._offsets(OFFSETS, WINDOW_S)
            latest = self._offsets(LATEST, 0.0)
        self._more[0] = 0
        self._exchange()
        self._known = self._known.followed_by(latest)
        self._known = self._known.last(int(self._known.at[-1]) - round(HISTORY_S * 1e9), MOST_OFFSETS)
        found = fit(self._known, len(latest.at))
        # Where this time no message was quick, what was known may still be surer.
        now = int(self._known.at[-1])
        if self._fit is None or found.error_at(now) <= self._fit.error_at(now):
            self._fit = found
        return self._fit, self._words.receive()

    def _contradicts(self, latest: Offsets) -> bool:
        """Whether the clock has left its line: it was set, or a time service has changed its rate."""
        assert self._fit is not None
        alone = self._known.followed_by(latest)
        found = fit(alone, len(latest.at))
        at = found.model.reference_ns
        off_ns = abs(found.model.offset_ns - (at - int(self._fit.model.to_target(at))))
        return bool(off_ns * 1e-9 > self._fit.error_at(at) + found.error_s)

    def _offsets(self, count: int, window_s: float) -> Offsets:
        """So many, spread over the window."""
        read, exchange, answer = self._read, self._exchange, self._answer
        rows: list[tuple[int, int, int, int]] = []
        began = time.perf_counter()
        for number in range(count):
            left = began + window_s * number / max(1, count - 1) - time.perf_counter()
            if left > 0:
                time.sleep(left)
            until = time.perf_counter() + OFFSET_S
            for tried in range(MOST_EXCHANGES):
                sent = read()
                exchange()
                received = read()
                rows.append((sent, int(answer[0]), received, number))
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
    on_fit: Callable[[int, list[Told]], None] = lambda at_ns, told: None,
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
