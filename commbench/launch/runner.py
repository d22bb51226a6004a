"""Runs a sweep from its head: the process that the user started, or rank 0 under somebody else's launcher.

The head makes the run's directory, holds the control plane's hub, hears of every point, and writes how it ended.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commbench.backends import BACKENDS
from commbench.cases import Layout, Sweep
from commbench.launch.bind import BindError, assign, short, to_environment, why_not_bound
from commbench.launch.client import EXIT_FAILED, Client
from commbench.launch.heartbeat import Heartbeat, read_beats
from commbench.launch.hub import Hub
from commbench.launch.interrupt import Interrupts
from commbench.launch.judge import Outcome
from commbench.launch.meet import meet
from commbench.launch.network import LOOPBACK, listen
from commbench.launch.order import ONCE, Launches, launch_seed, sets_in_order, shuffled
from commbench.launch.place import Place, WorldError
from commbench.launch.repetitions import Repetitions
from commbench.launch.run import Run, broken
from commbench.launch.runnable import NotRunnable, forced_alone
from commbench.launch.sets import ProcessSet, process_sets
from commbench.launch.start import Children, child_environment, find_mpirun, start_local, start_mpirun
from commbench.launch.startup import startup_s
from commbench.launch.variants import Variant
from commbench.launch.verify import hello, verify
from commbench.store.calibration import Calibration
from commbench.store.writer import StoreError, create_run

SECONDS_A_CASE = 0.3
# With tokens to be made and dispatched before what is timed, and a plain all_to_all beside it.
SECONDS_A_ROUTED_CASE = 1.0


# -- the ranks are ours ----------------------------------------------------------------------------


def run_local(
    sweep: Sweep, *, ranks: int, out: Path, on_event: Callable[[dict[str, Any]], None],
    launches: Launches = ONCE, variants: Sequence[Variant] = (Variant(),), spread_s: float | None = None,
    bind: str = "none", given: Calibration | None = None, thorough: bool = False,
) -> Run:  # fmt: skip
    """Start ``ranks`` processes on this host for every launch of every set of processes, one after the other.

    Links are ``given`` or measured first; a sweep without collectives measures nothing else, ``thorough``ly if asked.
    Raises NotRunnable where ranks cannot be bound as asked, or ``given`` links do not fit them.
    """
    layout = Layout(hosts=(socket.gethostname(),) * ranks)
    if given is not None:
        _given_links(given, sweep.backends, layout)
    cases = sweep.expand(layout)
    patience = startup_s()
    sets = process_sets(sweep.backends, cases, variants)
    try:
        cores = assign(bind, ranks, os.sched_getaffinity(0))
    except BindError as error:
        raise NotRunnable(str(error)) from None
    run = Run(sweep=sweep, directory=create_run(out), on_event=on_event, given=given, thorough=thorough)
    total = sum(len(one.cases) for one in sets)
    run.begin(
        layout, "commbench", sets=len(sets), cases=total, launches=launches, variants=variants, spread_s=spread_s,
        bind=bind,
    )  # fmt: skip
    with Interrupts() as interrupts:
        try:
            repetitions = Repetitions(launches, spread_s=spread_s)
            _Launcher(run, sets, repetitions, interrupts, bind, cores, patience).carry_out()
        finally:
            run.end()
    return run


class _Launcher:
    """Launches all sets of processes again and again."""

    def __init__(
        self, run: Run, sets: Sequence[ProcessSet], repetitions: Repetitions, interrupts: Interrupts, bind: str,
        cores: tuple[tuple[int, ...], ...], patience_s: float,
    ) -> None:  # fmt: skip
        self._run = run
        self._sets = sets
        self._repetitions = repetitions
        self._interrupts = interrupts
        self._bind = bind
        self._cores = cores
        self._cases = sum(len(one.cases) for one in sets)
        self._patience_s = patience_s
        self._began = time.monotonic()
        self._made = 0

    def carry_out(self) -> None:
        """Until there were enough, or one has failed, or somebody asks to end; the run then has the outcome."""
        run, repetitions = self._run, self._repetitions
        more = True
        while more:
            self._pause()
            repetitions.start(time.monotonic())
            links: dict[str, dict[str, Any]] = {}  # by variant: each repetition measures its own
            for number in sets_in_order(len(self._sets), repetitions.done):
                one = self._sets[number]
                run.links = links.setdefault(one.variant.name, {})
                run.outcome = broken()
                run.outcome = self._launch_next(one)
                if run.outcome.code:
                    return
            more = repetitions.finish(run.points, lambda line: run.on_event({"kind": "note", "line": line}))
            run.repetitions, run.precise = repetitions.done, repetitions.precise

    def _pause(self) -> None:
        while self._interrupts.reason is None:
            left = self._repetitions.pause_s(time.monotonic())
            if left <= 0:
                return
            self._run.on_event({"kind": "pause", "left_s": left})
            self._interrupts.sleep(min(left, 1.0))

    def _launch_next(self, one: ProcessSet) -> Outcome:
        if self._interrupts.reason is not None:
            where = "between launches" if self._made else "before the first launch"
            return Outcome(status="interrupted", code=EXIT_FAILED, line=f"{self._interrupts.reason} {where}")
        launches, index = self._repetitions.launches, self._made
        self._made += 1
        self._run.on_event(
            {
                "kind": "launch", "number": index + 1, "of": self._repetitions.expected * len(self._sets),
                "cases": self._repetitions.expected * self._cases, "title": one.title,
                "open": launches.precision is not None,
            }
        )  # fmt: skip
        seed = self._run.sweep.seed
        if launches.several:
            seed = launch_seed(seed, index)
            one = shuffled(one, seed)
        launch = Launch(
            index=index, of=one, repetition=self._repetitions.done, seed=seed, began_s=time.monotonic() - self._began,
            share=len(one.cases) / max(1, self._cases) / launches.most, bind=self._bind, cores=self._cores,
        )  # fmt: skip
        outcome = _launch(self._run, launch, self._interrupts, self._patience_s)
        if outcome.line and one.variant.name:
            return replace(outcome, line=f"variant {one.variant.name}: {outcome.line}")
        return outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One set of processes that is to be started. ``share``: its part of the budget and of a soak; ``began_s``: since
    the run began; ``cores``: per rank the processors that it is bound to, empty where ``bind`` is ``none``."""

    index: int = 0
    of: ProcessSet
    repetition: int = 0
    seed: int
    began_s: float = 0.0
    share: float = 1.0
    bind: str = "none"
    cores: tuple[tuple[int, ...], ...] = ()


def _launch(run: Run, launch: Launch, interrupts: Interrupts, patience_s: float) -> Outcome:
    assert run.layout is not None
    of, layout = launch.of, run.layout
    listener = listen(LOOPBACK)
    token = secrets.token_hex(16)
    with _pages() as pages:
        oversubscribed = layout.world > len(os.sched_getaffinity(0))
        base = {**os.environ, **of.variant.settings}
        environment = child_environment(base, hub=listener.getsockname(), token=token, pages=pages)
        environment.update(to_environment(launch.cores))
        children = Children(processes={}, errors={})

        def plan(hellos: list[dict[str, Any]]) -> dict[str, Any]:
            children.watch([said["pid"] for said in hellos])
            found = verify(hellos)
            reason = why_not_bound(launch.cores, [said["cores"] for said in hellos])
            if reason is not None:
                raise WorldError(f"--bind {launch.bind}: {reason}")
            return make_plan(run, launch, found, _cores_for_all(hellos))

        hub = Hub(
            listener=listener, world=layout.world, token=token, make_plan=plan, on_event=run.hear,
            watch=children.exits, beats=lambda: read_beats(pages), startup_s=patience_s, home=layout.hosts[0],
            patient=True,
        )  # fmt: skip
        try:
            with interrupts.reach(hub):
                if BACKENDS[of.backends[0]].starter == "mpirun":
                    start_mpirun(
                        children, find_mpirun() or "mpirun", layout.world, environment, oversubscribed=oversubscribed
                    )
                else:
                    start_local(children, layout.world, environment)
                outcome = hub.run()
            hub.close()
            if outcome.code == 0:
                children.wait(20.0)
            elif os.environ.get("COMMBENCH_DEBUG"):
                sys.stderr.write(children.all_words())
        finally:
            children.end()
    return outcome


def make_plan(run: Run, launch: Launch, layout: Layout, spin: bool) -> dict[str, Any]:
    """What every rank is told."""
    sweep, of, share = run.sweep, launch.of, launch.share
    usual = sum(SECONDS_A_ROUTED_CASE if case.spec.routed else SECONDS_A_CASE for case in of.cases)
    budget = sweep.budget_s * share if sweep.budget_s is not None else max(5.0, usual)
    told = replace(sweep, soak_s=sweep.soak_s * share if sweep.soak_s is not None else None)
    facts = {
        "order": launch.index, "repetition": launch.repetition, "started_s": launch.began_s, "bind": launch.bind,
        "variant": of.variant.name,
    }  # fmt: skip
    return {
        "run": str(run.directory.resolve()), "run_id": run.directory.name, "launch": launch.index,
        "hosts": list(layout.hosts), "sweep": told.to_dict(), "cases": [case.to_dict() for case in of.cases],
        "titles": [case.title for case in of.cases], "spin": spin, "budget_s": budget, "backends": list(of.backends),
        "links": _given_links(run.given, of.backends, layout) if run.given else run.links, "thorough": run.thorough,
        "forced": of.forced, "variant": of.variant.name, "settings": dict(of.variant.settings),
        "repetition": launch.repetition, "order_seed": launch.seed, "bind": launch.bind,
        "bound": [short(one) for one in launch.cores], "facts": facts,
    }  # fmt: skip


def _given_links(given: Calibration, backends: tuple[str, ...], layout: Layout) -> dict[str, Any]:
    """Per backend the links of a file, for the hosts of this job. Raises NotRunnable where they do not fit it."""
    found = {}
    for name in backends:
        try:
            found[name] = given.links_for(name, layout.hosts).to_dict()
        except ValueError as error:
            raise NotRunnable(str(error)) from None
    return found


def _cores_for_all(hellos: list[dict[str, Any]]) -> bool:
    """Whether every rank has a core of its own, on every machine: several hosts may be namespaces of one."""
    cores: dict[str, set[int]] = {}
    ranks: dict[str, int] = {}
    for said in hellos:
        machine = said.get("machine", said["host"])
        cores.setdefault(machine, set()).update(said["cores"])
        ranks[machine] = ranks.get(machine, 0) + 1
    return all(ranks[machine] <= len(cores[machine]) for machine in ranks)


@contextmanager
def _pages() -> Iterator[str]:
    """A private directory in memory for the heartbeats; COMMBENCH_HEARTBEATS names one that stays."""
    chosen = os.environ.get("COMMBENCH_HEARTBEATS")
    if chosen:
        Path(chosen).mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in Path(chosen).glob("rank-*"):
            file.unlink()
        yield chosen
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    for left in Path(memory).glob("commbench-*-*"):
        # A command that was killed with -9 could not tidy up.
        owner = left.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    directory = tempfile.mkdtemp(prefix=f"commbench-{os.getpid()}-", dir=memory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# -- the ranks are somebody else's -----------------------------------------------------------------


def run_as_head(
    sweep: Sweep, *, place: Place, out: Path, nodes: int | None, on_event: Callable[[dict[str, Any]], None],
    on_end: Callable[[Run], None], be_rank: Callable[[Client, Place], int], given: Calibration | None = None,
    thorough: bool = False,
) -> Run:  # fmt: skip
    """Rank 0 under a launcher: hold the hub in a thread, and be a rank. ``on_end`` prints what came of it.

    A fault ends this process from the thread, because the main thread may be stuck inside a library.
    """
    patience = startup_s()
    meeting = meet(place)
    assert meeting.listener is not None
    run = Run(sweep=sweep, directory=create_run(out), on_event=on_event, given=given, thorough=thorough)

    def plan(hellos: list[dict[str, Any]]) -> dict[str, Any]:
        layout = verify(hellos, nodes)
        try:
            cases = sweep.expand(layout)
            run.begin(layout, place.launcher, sets=1, cases=len(cases), launches=ONCE, variants=())
            everything = ProcessSet(backends=sweep.backends, cases=cases, forced=forced_alone(sweep))
            return make_plan(run, Launch(of=everything, seed=sweep.seed), layout, _cores_for_all(hellos))
        except (ValueError, StoreError) as error:
            raise WorldError(str(error)) from None

    heartbeat = Heartbeat(place.rank)
    hub = Hub(
        listener=meeting.listener, world=place.world, token=meeting.token, make_plan=plan, on_event=run.hear,
        beats=lambda: {place.rank: heartbeat.read()}, startup_s=patience,
        home=socket.gethostname(),
    )  # fmt: skip

    def serve() -> None:
        code = EXIT_FAILED
        try:
            run.outcome = hub.run()
            run.repetitions = 1
            code = run.outcome.code
            if code:
                run.end()
                on_end(run)
        except Exception:  # noqa: BLE001  a defect of ours must not leave the other ranks waiting
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Only now: when the other ranks end, their launcher ends this process.
        hub.close()
        if code:
            os._exit(code)

    thread = threading.Thread(target=serve, name="commbench-hub", daemon=True)
    thread.start()
    client = Client(
        address=meeting.address, token=meeting.token, hello=hello(place), heartbeat=heartbeat, timeout_s=patience,
        obeys_stop=False,
    )  # fmt: skip
    with Interrupts() as interrupts, interrupts.reach(hub):
        be_rank(client, place)
        thread.join()
    run.end()
    on_end(run)
    return run
