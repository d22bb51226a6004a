"""Runs that never were: times from the models on links that are known, stored as a run stores them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from commbench.cases import Case, Layout
from commbench.models import Link, Links, predict
from commbench.records import Point
from commbench.report.explain import Diagnosis, diagnose, read_curves
from commbench.report.explain.writing import verdict
from commbench.report.frame import load
from commbench.schedules import leaving
from commbench.schedules.catalogue import build
from commbench.store.writer import LaunchWriter, create_run, write_json

SIZES = (64, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
MEMORY = Link(latency_s=1.5e-6, seconds_per_byte=1.2e-10)
NETWORK = Link(latency_s=40e-6, seconds_per_byte=4e-8, exchange_factor=1.1)
LINKS = Links(same_host=MEMORY, other_host=NETWORK, reduce_seconds_per_byte=3e-11)


@dataclass(kw_only=True)
class Made:
    """What a run is made of. ``hosts[rank]`` names a rank's host; times follow ``truth``, predictions ``links``.

    ``choose(case)``: the library's algorithm; ``change(point)`` has the last word. ``others``, ``busy``: shares of the
    hosts' processors.
    """

    hosts: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    links: Links = LINKS
    truth: Links | None = None
    backend: str = "mpi"
    collectives: Sequence[str] = ("all_reduce", "all_gather")
    sizes: Sequence[int] = SIZES
    algorithm: str = "library"
    timing: str = "isolated"
    choose: Callable[[Case], str] = lambda case: "ring"
    change: Callable[[Point], None] = lambda point: None
    rates_after: tuple[tuple[float, float], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    others: float = 0.05
    busy: float = 0.6
    stolen: float = 0.0
    infiniband: Mapping[str, Any] = field(default_factory=dict)
    launches: int = 1
    jitter: random.Random | None = None
    noise: float = 0.03  # relative; upwards threefold below 64 KiB, where a scheduler's delays count


def facts(made: Made, *, after: bool) -> dict[str, Any]:
    """A host of two processors during 50 s. Our ranks use what is busy and not the others'."""
    time = {"busy_s": made.busy * 100, "idle_s": (1 - made.busy - made.stolen) * 100, "steal_s": made.stolen * 100}
    per_host = len(made.hosts) / len(set(made.hosts))
    ours = max(0.0, made.busy - made.others) * 100 / per_host
    counters = {
        "machine": {name: 1000.0 + seconds * after for name, seconds in time.items()},
        "process": {"cpu_s": 1.0 + ours * after},
    }
    found: dict[str, Any] = {"counters": counters, "host": {"load": {}}}
    if not after:
        found["host"] = {"cpu": {"logical": 2}}
        found["environment"] = dict(made.environment)
        found["network"] = {"infiniband": dict(made.infiniband)}
    return found


def _points(made: Made, launch: int) -> list[Point]:
    layout = Layout(hosts=made.hosts)
    hosts = tuple(layout.host_of)
    found = []
    for collective in made.collectives:
        for size in made.sizes:
            case = Case(
                collective=collective, backend=made.backend, algorithm=made.algorithm, bytes=size,
                requested_bytes=size, reduce_op="sum" if collective in ("all_reduce", "reduce_scatter") else None,
                timing=made.timing, ranks=len(hosts), nodes=len(set(hosts)),
            )  # fmt: skip
            found.append(_point(made, case, hosts, launch))
    return found


def _point(made: Made, case: Case, hosts: tuple[int, ...], launch: int) -> Point:
    predicted = predict(case.collective, case.bytes, hosts, made.links, case.timing)
    name = made.choose(case)
    real = predict(case.collective, case.bytes, hosts, made.truth or made.links, case.timing)
    seconds, quartiles = real.times[name], (0.98, 1.03)
    if made.jitter is not None:
        upwards = 3 * made.noise if case.bytes < 1 << 16 else made.noise
        seconds *= 1 + made.jitter.uniform(-made.noise, upwards)
        quartiles = (1 - made.noise * made.jitter.random(), 1 + upwards * made.jitter.random())
    point = Point(
        run_id="synthetic", launch=launch, collective=case.collective, backend=case.backend, algorithm=case.algorithm,
        ranks=case.ranks, nodes=case.nodes, ranks_per_node=case.ranks / case.nodes, dtype=case.dtype,
        reduce_op=case.reduce_op, placement=case.placement, bytes=case.bytes, requested_bytes=case.requested_bytes,
        timing=case.timing, case_id=case.case_id, world=case.ranks, group_index=0, samples=40, time_s=seconds,
        time_lo_s=seconds * 0.98, time_hi_s=seconds * 1.03, time_min_s=seconds * 0.95,
        time_p25_s=seconds * quartiles[0], time_p75_s=seconds * quartiles[1], interval_of="iterations",
        interval_level=0.979, ring_s=predicted.ring_s, tree_s=predicted.tree_s, bound_s=predicted.bound_s,
        efficiency=predicted.bound_s / seconds, predictions=predicted.times, oversubscribed=False,
    )  # fmt: skip
    if len(set(hosts)) > 1:
        schedule = build(case.collective, name, len(hosts), 0, 1, hosts)
        point.wire_bytes = 1.02 * case.bytes * float(sum(leaving(schedule, hosts).values()))
    if case.algorithm != "library":
        point.predicted_s = predicted.times[name]
    made.change(point)
    return point


def store(made: Made, out: Path) -> Path:
    """The run's directory."""
    run = create_run(out)
    write_json(run / "manifest.json", {"run_id": run.name})
    for launch in range(made.launches):
        writer = LaunchWriter(run, launch, {"hosts": list(made.hosts), "backends": {}})
        names = dict.fromkeys(made.hosts)
        writer.host_facts("before", {name: facts(made, after=False) for name in names})
        known = {"version": "1", "settings": {}, "links": made.links.to_dict()}
        if len(names) > 2:
            known["host_rates_after"] = [list(pair) for pair in made.rates_after]
        writer.update(backends={made.backend: known})
        for point in _points(made, launch):
            writer.write(point)
        writer.host_facts("after", {name: facts(made, after=True) for name in names})
        writer.close()
    return run


def judge(made: Made, out: Path) -> tuple[list[Diagnosis], str]:
    """Every curve's diagnosis and the run's verdict."""
    run = store(made, out)
    diagnoses = [diagnose(curve) for curve in read_curves(run, load(run))]
    assert len(diagnoses) == len(made.collectives)
    return diagnoses, verdict(diagnoses)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Makes and judges runs: ``lab.verdict(hosts=...)``, ``lab.diagnoses(...)``, ``lab.store(...)``."""

    out: Path

    def diagnoses(self, **made: Any) -> list[Diagnosis]:
        return judge(Made(**made), self.out)[0]

    def verdict(self, **made: Any) -> str:
        return judge(Made(**made), self.out)[1]

    def store(self, **made: Any) -> Path:
        return store(Made(**made), self.out)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(out=tmp_path)


@pytest.fixture(scope="session")
def links() -> Links:
    """A network of 25 MB/s and 40 us, beside memory of 8 GB/s."""
    return LINKS
