"""Runs a sweep from its head: the process that the user started, or rank 0 under somebody else's launcher.

The head makes the run's directory, holds the control plane's hub, hears of every point, and writes how it ended.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import commbench
from commbench.backends import BACKENDS
from commbench.backends.forcing import can_force, is_forced
from commbench.cases import Case, Layout, Sweep
from commbench.launch.client import EXIT_FAILED, Client
from commbench.launch.heartbeat import Heartbeat, read_beats
from commbench.launch.hub import Hub, WorldError
from commbench.launch.judge import Outcome
from commbench.launch.meet import meet
from commbench.launch.network import LOOPBACK, listen
from commbench.launch.place import Place
from commbench.launch.start import Children, child_environment, find_mpirun, start_local, start_mpirun
from commbench.launch.startup import startup_s
from commbench.launch.verify import hello, verify
from commbench.measure.prepare import host_memory
from commbench.provenance.env import collect_env
from commbench.provenance.git import collect_git
from commbench.records import END, MANIFEST
from commbench.store.calibration import CALIBRATION, Calibration, write_calibration
from commbench.store.writer import StoreError, create_run, reserve, utc_now, write_json

SECONDS_A_CASE = 0.3
RANK_BYTES = 150_000_000  # what a rank takes at least once torch is loaded


class NotRunnable(ValueError):
    """What was asked for cannot be run here: one line that says why and what to do."""


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
    # Until a launch says otherwise: an error of our own, or a second Ctrl-C, must not pass for a good end.
    outcome: Outcome = field(default_factory=lambda: Outcome.failed("commbench itself failed"))

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

    def begin(self, layout: Layout, launcher: str, launches: int, cases: int) -> None:
        """The manifest, on disk before the first timing."""
        self.layout = layout
        reserve(self.directory / END)
        write_json(
            self.directory / MANIFEST,
            {
                "run_id": self.directory.name, "started_utc": utc_now(), "commbench": commbench.__version__,
                "git": collect_git(), "argv": sys.argv, "launcher": launcher, "launches": launches, "cases": cases,
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
                },
            )  # fmt: skip
        except StoreError as error:
            print(f"commbench: {error}", file=sys.stderr)

    @property
    def exit_code(self) -> int:
        if self.outcome.code:
            return self.outcome.code
        return 3 if any(point["status"] in ("wrong", "failed") for point in self.points) else 0


def new_seed() -> int:
    return secrets.randbits(31)


def check_runnable(sweep: Sweep, *, local_ranks: int | None) -> None:
    """Raises NotRunnable where a backend cannot run here, or cannot be started without a launcher.

    ``local_ranks``: how many this host must hold, None where a launcher holds them.
    """
    if local_ranks is not None and local_ranks * RANK_BYTES > host_memory():
        raise NotRunnable(
            f"{local_ranks} ranks need about {local_ranks * RANK_BYTES / 1e9:.0f} GB on this host and "
            f"{host_memory() / 1e9:.0f} GB is available: ask for fewer with --ranks"
        )
    if local_ranks is None:
        forced_alone(sweep)
    for name in sweep.backends:
        reason = BACKENDS[name].why_unavailable()
        if reason:
            raise NotRunnable(reason)
        if local_ranks is not None and BACKENDS[name].starter == "mpirun" and find_mpirun() is None:
            raise NotRunnable(
                f"backend {name!r} needs mpirun to start its ranks and there is none beside {sys.executable} or on PATH: "
                "pip install 'commbench[mpi]', start commbench under the cluster's mpirun or srun, or ask for "
                "--backend gloo"
            )


def forced_alone(sweep: Sweep) -> str | None:
    """The algorithm that ranks which a launcher has started once are told to use, or None.

    Raises NotRunnable where it is not the only one of the sweep: they cannot be started again for the others.
    """
    forced = [name for name in sweep.algorithms if is_forced(name)]
    if forced and len(sweep.algorithms) > 1:
        raise NotRunnable(
            f"algorithm {forced[0]!r} needs ranks of its own, and the launcher starts them once: run once per forced "
            "algorithm, and once for the others"
        )
    return forced[0] if forced else None


# -- the ranks are ours ----------------------------------------------------------------------------


def run_local(
    sweep: Sweep, *, ranks: int, launches: int, out: Path, on_event: Callable[[dict[str, Any]], None],
    given: Calibration | None = None, thorough: bool = False,
) -> Run:  # fmt: skip
    """Start ``ranks`` processes on this host for every launch and kind of backend, one set after the other.

    Links are ``given`` or measured first; a sweep without collectives measures nothing else, ``thorough``ly if asked.
    """
    layout = Layout(hosts=(socket.gethostname(),) * ranks)
    cases = sweep.expand(layout)
    patience = startup_s()
    run = Run(sweep=sweep, directory=create_run(out), on_event=on_event, given=given, thorough=thorough)
    sets = process_sets(sweep.backends, cases)
    run.begin(layout, "commbench", launches * len(sets), launches * len(cases))
    try:
        for index in range(launches * len(sets)):
            if index % len(sets) == 0:
                run.links.clear()  # each of the user's launches measures its own
            one = sets[index % len(sets)]
            share = len(one.cases) / max(1, len(cases)) / launches
            run.outcome = _launch(run, index, one, layout, share, patience)
            if run.outcome.code:
                break
    finally:
        run.end()
    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSet:
    """What one set of processes is for. ``forced``: the algorithm that the libraries are told to use, if any."""

    backends: tuple[str, ...]
    cases: tuple[Case, ...]
    forced: str | None = None


def process_sets(backends: tuple[str, ...], cases: tuple[Case, ...]) -> list[ProcessSet]:
    """Backends by what starts their ranks, each kind with processes of its own; for every forced algorithm others.

    Libraries read what they are told once, when they start. A case whose algorithm its backend cannot be told to use
    goes to the set without, to be skipped there.
    """
    found = []
    for kind in dict.fromkeys(BACKENDS[name].starter for name in backends):
        mine = tuple(name for name in backends if BACKENDS[name].starter == kind)
        for forced in dict.fromkeys((None, *(_forced(case) for case in cases if case.backend in mine))):
            those = tuple(case for case in cases if case.backend in mine and _forced(case) == forced)
            needed = tuple(name for name in mine if any(case.backend == name for case in those))
            if needed or not cases:
                found.append(ProcessSet(backends=needed or mine, cases=those, forced=forced))
    return found


def _forced(case: Case) -> str | None:
    return case.algorithm if can_force(case.backend, case.collective, case.algorithm) else None


def _launch(run: Run, index: int, of: ProcessSet, layout: Layout, share: float, patience_s: float) -> Outcome:
    listener = listen(LOOPBACK)
    token = secrets.token_hex(16)
    with _pages() as pages:
        oversubscribed = layout.world > len(os.sched_getaffinity(0))
        environment = child_environment(os.environ, hub=listener.getsockname(), token=token, pages=pages)
        children = Children(processes={}, errors={})

        def plan(hellos: list[dict[str, Any]]) -> dict[str, Any]:
            children.watch([said["pid"] for said in hellos])
            found = verify(hellos)
            return make_plan(run, index, found, of, _cores_for_all(hellos), share)

        hub = Hub(
            listener=listener, world=layout.world, token=token, make_plan=plan, on_event=run.hear,
            watch=children.exits, beats=lambda: read_beats(pages), startup_s=patience_s, home=layout.hosts[0],
            patient=True,
        )  # fmt: skip
        try:
            with _interruptible(hub):
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


def make_plan(run: Run, index: int, layout: Layout, of: ProcessSet, spin: bool, share: float) -> dict[str, Any]:
    """What every rank is told; ``share`` is this launch's part of the budget and of a soak."""
    sweep = run.sweep
    budget = sweep.budget_s * share if sweep.budget_s is not None else max(5.0, SECONDS_A_CASE * len(of.cases))
    told = replace(sweep, soak_s=sweep.soak_s * share if sweep.soak_s is not None else None)
    return {
        "run": str(run.directory.resolve()), "run_id": run.directory.name, "launch": index, "hosts": list(layout.hosts),
        "sweep": told.to_dict(), "cases": [case.to_dict() for case in of.cases],
        "titles": [case.title for case in of.cases], "spin": spin, "budget_s": budget, "backends": list(of.backends),
        "links": _given_links(run.given, of.backends, layout) if run.given else run.links, "thorough": run.thorough,
        "forced": of.forced,
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
    """Whether every rank has a core of its own, on every host."""
    cores: dict[str, set[int]] = {}
    ranks: dict[str, int] = {}
    for said in hellos:
        cores.setdefault(said["host"], set()).update(said["cores"])
        ranks[said["host"]] = ranks.get(said["host"], 0) + 1
    return all(ranks[host] <= len(cores[host]) for host in ranks)


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


@contextmanager
def _interruptible(hub: Hub) -> Iterator[None]:
    """Ctrl-C and the signals that ask a process to end do so in order; a second Ctrl-C does what it always did."""

    def ask(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        name = signal.Signals(number).name
        hub.interrupt("interrupted" if number == signal.SIGINT else f"told to end ({name})")

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, ask) for number in asking}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
            run.begin(layout, place.launcher, 1, len(cases))
            everything = ProcessSet(backends=sweep.backends, cases=cases, forced=forced_alone(sweep))
            return make_plan(run, 0, layout, everything, _cores_for_all(hellos), 1.0)
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
    with _interruptible(hub):
        be_rank(client, place)
        thread.join()
    run.end()
    on_end(run)
    return run
