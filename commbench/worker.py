"""What each rank runs: start a backend, calibrate its links, measure its cases, hand every point to the store.

Standard library until the backend is chosen: a thousand ranks load this from one file system.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from commbench.cases import Case, Layout, Sweep, group_members, is_own
from commbench.launch.bind import CORES, bind_rank
from commbench.launch.client import EXIT_FAILED, Client, HubGone
from commbench.launch.heartbeat import Heartbeat
from commbench.launch.place import LaunchError, Place, detect
from commbench.launch.startup import startup_s
from commbench.launch.verify import hello

if TYPE_CHECKING:
    from commbench.algorithms.library import Library
    from commbench.backends.base import Backend
    from commbench.measure.clock import CommonClock
    from commbench.measure.point import Setting
    from commbench.models import Links
    from commbench.moe.library import RoutedLibrary
    from commbench.provenance.gpu_taint import GpuWatch

# A step of the calibration may be one long message over a slow link, whatever deadline the cases have.
CALIBRATION_S = 30.0


def main() -> int:
    """Entry of ranks that commbench started itself: the hub's address and token are in the environment."""
    from commbench.launch.start import die_with_parent

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = _own_place() or detect(os.environ)
    if place is None or "COMMBENCH_HUB" not in os.environ:
        print("commbench.worker is started by `commbench run`, not by hand", file=sys.stderr)
        return 2
    bind_rank(place.local_rank, os.environ.get(CORES))  # before any library, and any thread, starts
    host, _, port = os.environ["COMMBENCH_HUB"].rpartition(":")
    heartbeat = Heartbeat(place.rank, os.environ.get("COMMBENCH_PAGES"))
    client = Client(
        address=(host, int(port)), token=os.environ["COMMBENCH_TOKEN"], hello=hello(place), heartbeat=heartbeat,
        timeout_s=startup_s(),
    )  # fmt: skip
    return work(client, place)


def follow(place: Place) -> int:
    """Entry of ranks other than the first under somebody else's launcher; returns this rank's exit code."""
    from commbench.launch.meet import meet

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears of Ctrl-C and tells everyone
    heartbeat = Heartbeat(place.rank)

    def mourn() -> None:
        # One survivor speaks for all: the first after rank 0.
        if place.rank == 1:
            host = client.plan["hosts"][0] if client.plan else "its host"
            where = client.where()
            print(f"commbench: rank 0 on {host} ended without a word (killed, or its host is gone) {where}; "
                  "every point that had finished is in its results directory", file=sys.stderr, flush=True)  # fmt: skip

    try:
        meeting = meet(place)
        client = Client(
            address=meeting.address, token=meeting.token, hello=hello(place), heartbeat=heartbeat,
            timeout_s=startup_s(), on_hub_gone=mourn,
        )  # fmt: skip
    except (LaunchError, HubGone) as error:
        print(f"commbench: rank {place.rank}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return work(client, place)


def _own_place() -> Place | None:
    if "COMMBENCH_RANK" not in os.environ:
        return None
    rank, world = int(os.environ["COMMBENCH_RANK"]), int(os.environ["COMMBENCH_WORLD"])
    return Place(rank=rank, world=world, local_rank=rank, local_world=world, launcher="commbench")


def work(client: Client, place: Place) -> int:
    """From arrival to farewell. Whatever goes wrong reaches the hub as one line."""
    from commbench.launch.meet import part

    plan = client.welcome()
    try:
        _Worker(client, place, plan).run()
    except Exception as error:  # noqa: BLE001  whatever a library may raise ends this run in order
        if os.environ.get("COMMBENCH_DEBUG"):
            traceback.print_exc()
        client.fail(_one_line(error))
    part()
    client.finish()
    return 0


def _first_of_each(rows: list[list[str | None]]) -> list[str | None]:
    """Per column the first that is not None."""
    return [next((one for one in column if one is not None), None) for column in zip(*rows, strict=True)]


def _one_line(error: BaseException) -> str:
    from commbench.store.writer import StoreError

    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    plain = isinstance(error, (StoreError, LaunchError)) or type(error).__name__ == "BackendError"
    return text if plain else f"{type(error).__name__}: {text}"


class _Worker:
    """One rank's way through the plan; ``self.writer`` exists at rank 0 only."""

    def __init__(self, client: Client, place: Place, plan: dict[str, Any]) -> None:
        self.client = client
        self.place = place
        self.plan = plan
        self.layout = Layout(hosts=tuple(plan["hosts"]))
        self.sweep = Sweep.from_dict(plan["sweep"])
        self.cases = [Case.from_dict(case) for case in plan["cases"]]
        self.spin: bool = plan["spin"]
        self.launched: dict[str, dict[str, Any]] = {}  # what is known of each backend that was started
        self.clock: CommonClock | None = None  # the common one of all ranks
        self.clocks: dict[str, dict[str, Any]] = {}  # how it was fitted, by backend
        self.unforced: dict[str, str | None] = {}  # by collective, why the backend does not do as it was told
        self.writer: Any = None
        self.watch: GpuWatch | None = None  # of this rank's own GPU
        self.gpus: dict[str, set[str]] = {}  # at rank 0: by host the identities of those that ranks have
        self.unwatched: list[str] = []  # at rank 0: whose GPU cannot be asked
        self.ends = 0.0
        self.left = 0
        self.pass_index = 0

    def run(self) -> None:
        from commbench.launch.facts import gather_facts, see_settings
        from commbench.provenance.collect import collect_after, collect_before

        before = self._host_facts(collect_before)
        facts = {**self.plan["facts"], **gather_facts(self.client, self.layout)}
        see_settings(self.client, self.plan["settings"], self.plan["variant"])
        if self.client.rank == 0:
            self._open_store(before, facts)
        for backend in self.plan["backends"]:
            self._run_backend(backend)
        after = self._host_facts(collect_after)
        facts |= gather_facts(self.client, self.layout, "_end")
        if self.client.rank == 0:
            self.writer.update(tainted=self._degraded(before, after), unwatched=self.unwatched)
            self._close_store(after, facts)

    # -- the store -----------------------------------------------------------------------------

    @property
    def _speaks(self) -> bool:
        """Whether this is its host's first rank."""
        return self.client.rank in {ranks[0] for ranks in self.layout.by_host()}

    def _host_facts(self, collect: Any) -> dict[str, Any]:
        """At rank 0: what the first rank of every host finds, by host."""
        gathered = self.client.gather(collect() if self._speaks else None) or []
        return {self.layout.hosts[rank]: facts for rank, (facts, _) in enumerate(gathered) if facts is not None}

    def _degraded(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        """What has happened to the GPUs of this launch between the two collections, each with its host."""
        from commbench.provenance.gpu_taint import degraded

        used = [(host, identities) for host, identities in self.gpus.items() if host in before and host in after]
        return [
            f"{host}: {reason}"
            for host, identities in used
            for reason in degraded(before[host], after[host], identities)
        ]

    def _open_store(self, before: dict[str, Any], facts: dict[str, Any]) -> None:
        from pathlib import Path

        from commbench.store.writer import LaunchWriter, utc_now

        self.writer = LaunchWriter(
            Path(self.plan["run"]), self.plan["launch"],
            {"seed": self.plan["order_seed"], "order": [case.case_id for case in self.cases], "started_utc": utc_now(),
             "hosts": list(self.layout.hosts), "backends": {}, "repetition": self.plan["repetition"],
             "variant": self.plan["variant"], "forced": self.plan["forced"], "bind": self.plan["bind"],
             "bound": self.plan["bound"], "facts": facts},
        )  # fmt: skip
        self.writer.host_facts("before", before)

    def _close_store(self, after: dict[str, Any], facts: dict[str, Any]) -> None:
        from commbench.store.writer import utc_now

        self.writer.host_facts("after", after)
        self.writer.update(ended_utc=utc_now(), facts=facts)
        self.writer.close()

    def _record(self, point: Any, stamps: Any = None) -> None:
        """On disk first, then told; what the disk does not take is told all the same."""
        from dataclasses import asdict

        from commbench.records import finite

        try:
            self.writer.write(point, stamps)
        finally:
            self.client.event("point", point=finite(asdict(point)))

    # -- a backend -----------------------------------------------------------------------------

    @property
    def _patience_s(self) -> float:
        """For a library's start or end. Loading torch takes a core a second or two, and ranks may share cores."""
        most = max(len(ranks) for ranks in self.layout.by_host())
        return startup_s() + 2.0 * most / len(os.sched_getaffinity(0))

    def _run_backend(self, name: str) -> None:
        from commbench.backends import REGISTRY
        from commbench.backends.base import Context
        from commbench.launch.network import interface_of

        client = self.client
        client.beat("starting", case=-1)
        client.expect(self._patience_s, f"starting {name}")
        client.gather(None)
        forced = self._forced(name)
        backend: Backend = REGISTRY.load(name)()
        backend.start(
            Context(
                rank=client.rank,
                world=client.world,
                local_rank=self.place.local_rank,
                hosts=self.layout.hosts,
                address=client.address,
                interface=interface_of(client.address),
                share=client.share,
                agree=client.agree,
                expect=client.expect,
                forced=forced,
            )
        )
        self.watch = self._watch(backend.gpu())
        # What one rank's library does otherwise, all must leave out.
        reasons = client.agree([backend.why_not_forced(collective) for collective in forced], _first_of_each)
        self.unforced = dict(zip(forced, reasons, strict=True))
        cases = [(index, case) for index, case in enumerate(self.cases) if case.backend == name]
        # Before links are calibrated: clocks that are looked at again some seconds later tell their drift.
        self._synchronise(name, backend, bool(cases))
        setting = self._setting(name, backend)
        self._measure_all(backend, cases, setting)
        self._check_clock(name)
        self._check_links(name, backend, setting)
        client.expect(self._patience_s, f"stopping {name}")
        client.gather(None)
        if self.watch is not None:
            self.watch.close()
        backend.stop()

    def _watch(self, uuid: str | None) -> GpuWatch | None:
        watch = None
        if uuid is not None:
            from commbench.provenance.gpu_taint import GpuWatch

            watch = GpuWatch(uuid)
        told = self.client.gather([watch.identity, watch.why_not] if watch else None) or []
        for rank, (found, _) in enumerate(told):
            identity, why_not = found or (None, None)
            host = self.layout.hosts[rank]
            if identity is not None:
                self.gpus.setdefault(host, set()).add(identity)
            if why_not is not None:
                self.unwatched.append(f"rank {rank} on {host}: {why_not}")
        return watch

    def _forced(self, name: str) -> dict[str, str]:
        """What this launch is to make a backend use: the algorithm by collective."""
        from commbench.backends.forcing import can_force

        algorithm = self.plan["forced"]
        mine = dict.fromkeys(
            case.collective for case in self.cases if (case.backend, case.algorithm) == (name, algorithm)
        )
        return {collective: algorithm for collective in mine if can_force(name, collective, algorithm)}

    def _setting(self, name: str, backend: Backend) -> Setting:
        from commbench.measure.point import Setting
        from commbench.provenance.mpi_variables import read_settings

        links, windows = self._links(name, backend)
        settings = {**read_settings(self.plan["settings"]), **backend.settings()}
        if self.writer is not None:
            known = {"version": backend.version(), "settings": settings, "links": links.to_dict()}
            self.launched[name] = known
            self.writer.update(backends=self.launched)
            if windows:
                self.client.event("calibration", backend=name, calibration={**known, "windows": windows})
        return Setting(
            run_id=self.plan["run_id"], launch=self.plan["launch"], label=self.sweep.label, seed=self.sweep.seed,
            layout=self.layout, backend_settings=settings, links=links, oversubscribed=not self.spin,
            variant=self.plan["variant"], tainted=backend.tainted(),
        )  # fmt: skip

    def _links(self, name: str, backend: Backend) -> tuple[Links, list[dict[str, Any]]]:
        """Those that were given, or those that are found now, with what they were found from."""
        from commbench.measure.calibrate import calibrate
        from commbench.models import Links

        if name in self.plan["links"]:
            return Links.from_dict(self.plan["links"][name]), []
        found = calibrate(
            backend.messenger(tuple(range(self.client.world))), self.client, self.layout, cache=self.sweep.cache,
            deadline_s=max(CALIBRATION_S, self.sweep.deadline_s), thorough=self.plan["thorough"],
        )  # fmt: skip
        return found.links, found.windows

    def _check_links(self, name: str, backend: Backend, setting: Setting) -> None:
        """Whether a host's rate has changed under the sweep, kept for whoever asks why it was slow."""
        from commbench.measure.calibrate import host_rates

        if not self.cases or len(self.layout.by_host()) < 3 or setting.links is None:
            return
        after = host_rates(
            backend.messenger(tuple(range(self.client.world))), self.client, self.layout, setting.links,
            cache=self.sweep.cache, deadline_s=max(CALIBRATION_S, self.sweep.deadline_s),
        )  # fmt: skip
        if self.writer is not None:
            self.launched[name]["host_rates_after"] = [list(pair) for pair in after]
            self.writer.update(backends=self.launched)

    def _synchronise(self, name: str, backend: Backend, needed: bool) -> None:
        """One clock for all ranks, or none where that cannot be had over this backend."""
        from commbench.measure.clock_sync import FittedClock, common_clock

        everyone = tuple(range(self.client.world))
        messenger = None if backend.device_memory() is not None else lambda: backend.messenger(everyone)
        host = self.layout.hosts[self.client.rank]

        def keep(fit: dict[str, Any]) -> None:
            self.writer.clock_fit({"backend": name, **fit})

        if not needed:
            return
        self.clock = common_clock(messenger, self.client, host, deadline_s=self.sweep.deadline_s, on_fit=keep)
        if self.writer is not None and isinstance(self.clock, FittedClock):
            self.clocks[name] = self.clock.summary(self.layout.hosts)
            self.writer.update(clock=self.clocks)

    def _check_clock(self, name: str) -> None:
        """Whether clocks have gone as was said, kept with the launch; told where they have not."""
        from commbench.measure.clock_sync import FittedClock

        clock, self.clock = self.clock, None
        if not isinstance(clock, FittedClock):
            return
        clock.refit()
        if self.writer is not None:
            self.clocks[name] |= clock.summary(self.layout.hosts, "after")
            self.writer.update(clock=self.clocks)
            if note := self.clocks[name]["note"]:
                self.client.event("note", line=note)

    def _measure_all(self, backend: Backend, cases: list[tuple[int, Case]], setting: Setting) -> None:
        """All cases once, or again and again until a soak's time is over."""
        share = len(cases) / max(1, len(self.cases))
        until = time.monotonic() + (self.sweep.soak_s or 0.0) * share
        self.pass_index = 0
        while True:
            self.ends = time.monotonic() + self.plan["budget_s"] * share
            self.left = len(cases)
            for index, case in cases:
                self._measure_one(backend, index, case, setting)
                self.left -= 1
            self.pass_index += 1
            if not self.client.share(self.sweep.soak_s is not None and time.monotonic() < until):
                break

    # -- a case --------------------------------------------------------------------------------

    def _measure_one(self, backend: Backend, index: int, case: Case, setting: Setting) -> None:
        from commbench.algorithms.model import model
        from commbench.backends.forcing import Chosen, read_back
        from commbench.launch.facts import gather_disturbances
        from commbench.measure.loop import measure
        from commbench.measure.point import measured_point, skipped
        from commbench.measure.prepare import Prepared
        from commbench.provenance.counters import disturbances
        from commbench.store.writer import utc_now

        client = self.client
        client.beat("preparing", 0, index)
        client.expect(self.sweep.deadline_s, f"preparing {case.title}")
        started = utc_now()
        groups = group_members(case.group, self.layout)
        library = self._library(backend, case, setting)
        reason = case.skip or library.why_not(case, groups)
        backend.chosen(case, None)  # what was chosen before is not this case's
        prepared = Prepared(operations=[], refusal=reason) if reason else library.prepare(case, groups)
        if prepared.refusal is not None:
            if client.rank == 0:
                self._record(skipped(case, prepared.refusal, setting, started))
            return
        before = disturbances(of_host=self._speaks)
        gpu = self.watch.state() if self.watch else None
        found = measure(
            prepared.operations, prepared.pattern, client, self._settings(library, case), groups, case.title
        )
        disturbed = gather_disturbances(client, before, self.watch.taint(gpu) if self.watch else None)
        # Operations may be run once or twice more for that.
        took = found.summary.median if found is not None else 0.0
        client.expect(max(self.sweep.deadline_s, 100 * took), f"asking what was chosen for {case.title}")
        chosen = library.chosen(case, prepared.operations)
        if found is not None:
            used, otherwise = (Chosen(), None) if chosen is None else read_back(case.algorithm, chosen)
            note = "; ".join(filter(None, (otherwise, library.note(case), found.note))) or None
            point = measured_point(
                case, found, self._tainted(setting, disturbed["tainted"]), started_utc=started, note=note, used=used,
                model=None if case.spec.routed else model(case, setting.backend_settings),
                steal_s=disturbed["steal_s"], preemptions=disturbed["preemptions"], pass_index=self.pass_index,
                nccl_estimate_s=None if is_own(case.algorithm) else backend.estimate(case, groups[0]),
            )  # fmt: skip
            client.expect(self.sweep.deadline_s, f"describing {case.title}")
            library.describe(point, case, found)
        matched = library.matched(case)
        if matched is not None:
            plain = self._time_plain(backend, matched, setting)
            if found is not None and plain is not None:
                library.compare(point, matched, plain)
        if found is not None:
            self._record(point, found.stamps)

    def _library(self, backend: Backend, case: Case, setting: Setting) -> Library | RoutedLibrary:
        """What carries a case out on a backend."""
        if case.spec.routed:
            from commbench.moe.library import RoutedLibrary

            return RoutedLibrary(
                case=case,
                backend=backend,
                control=self.client,
                layout=self.layout,
                seed=self.sweep.seed,
                links=setting.links,
            )
        from commbench.algorithms.library import Library

        return Library(
            backend=backend, control=self.client, layout=self.layout, seed=self.sweep.seed, unforced=self.unforced
        )

    def _time_plain(self, backend: Backend, case: Case, setting: Setting) -> float | None:
        """Seconds of a case that stands beside another one, at rank 0; None where it cannot be done. It takes a third of the
        time that a case may."""
        from dataclasses import replace

        from commbench.measure.loop import measure

        groups = group_members(case.group, self.layout)
        library = self._library(backend, case, setting)
        self.client.expect(self.sweep.deadline_s, f"preparing {case.title}")
        if library.why_not(case, groups):
            return None
        prepared = library.prepare(case, groups)
        if prepared.refusal is not None:
            return None
        settings = self._settings(library, case)
        rule = replace(settings.rule, limit_s=settings.rule.limit_s / 3)
        found = measure(
            prepared.operations, prepared.pattern, self.client, replace(settings, rule=rule), groups, case.title
        )
        return None if found is None or found.wrong else found.summary.median

    def _tainted(self, setting: Setting, reasons: list[str | None]) -> Setting:
        """With what every rank says of its own GPU (``reasons[rank]``) beside what the backend says."""
        if not any(reasons):
            return setting
        from dataclasses import replace

        from commbench.provenance.gpu_taint import joined

        both = filter(None, (setting.tainted, joined(reasons, self.layout.hosts)))
        return replace(setting, tainted="; ".join(both))

    def _settings(self, library: Library | RoutedLibrary, case: Case) -> Any:
        from commbench.measure.loop import Settings
        from commbench.measure.stopping import StoppingRule
        from commbench.measure.timed import PythonLoop

        left = max(0.0, self.ends - time.monotonic()) / max(1, self.left)
        limit, name = min((self.sweep.max_time_s, "max_time"), (left, "budget"))
        one_host = len(set(self.layout.hosts)) == 1
        return Settings(
            streamed=case.timing == "streamed",
            rule=StoppingRule(
                precision=self.sweep.precision, limit_s=limit, limit_name=name, iterations=self.sweep.iterations
            ),
            deadline_s=self.sweep.deadline_s, spin=self.spin, clock=self.clock, between_hosts=not one_host,
            barrier=library.barrier(case) if self.clock is None or self.clock.several else None,
            loop=library.loop(case) or PythonLoop(), count_sent=not one_host,
            sent_bytes=None if one_host else self._sent_bytes(),
        )  # fmt: skip

    def _sent_bytes(self) -> Any:
        """At the first rank of every host: what it has sent so far."""
        from commbench.launch.network import interface_of
        from commbench.provenance.wire import LOOPBACK_INTERFACE, SentBytes

        interface = interface_of(self.client.address)
        return SentBytes(interface) if self._speaks and interface != LOOPBACK_INTERFACE else None


if __name__ == "__main__":
    sys.exit(main())
