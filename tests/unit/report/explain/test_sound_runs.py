"""Runs without a fault have no cause, whatever machine, algorithm and noise: a false alarm is as bad as a miss."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commbench.models import Link, Links
from commbench.schedules import ALGORITHMS
from commbench.schedules.catalogue import buildable

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(2, 5))
    hosts = draw(st.sampled_from([tuple(f"n{rank}" for rank in range(count)), ("n0",) * count]))
    rng = random.Random(draw(st.integers(0, 10**6)))
    rate = 10 ** rng.uniform(7, 10)
    other = Link(
        latency_s=10 ** rng.uniform(-5.5, -4), seconds_per_byte=1 / rate, exchange_factor=rng.uniform(1.0, 1.5)
    )
    same = Link(latency_s=10 ** rng.uniform(-6, -4.5), seconds_per_byte=10 ** rng.uniform(-10, -9), exchange_factor=1.3)
    truth = Links(same_host=same, other_host=other, reduce_seconds_per_byte=3e-11)
    # What is calibrated is a tenth off.
    off = [rng.uniform(0.9, 1.1) for _ in range(2)]
    links = replace(
        truth,
        same_host=replace(same, latency_s=same.latency_s * off[0]),
        other_host=replace(other, seconds_per_byte=other.seconds_per_byte * off[1]),
    )
    collective = draw(st.sampled_from(COLLECTIVES))
    places = tuple(int(host[1:]) for host in hosts)
    names = [name for name in ALGORITHMS[collective] if not buildable(collective, name, places)]
    name = draw(st.sampled_from(names))
    rates = ()
    if len(set(hosts)) > 2 and rng.random() < 0.5:
        usual = links.of(crossing=True).seconds_per_byte
        rates = tuple((usual * rng.uniform(1, 1.3), usual * rng.uniform(1, 1.3)) for _ in hosts)
    return {
        "hosts": hosts, "links": links, "truth": truth, "collectives": (collective,), "choose": lambda case: name,
        "rates_after": rates, "jitter": rng, "noise": 0.15, "others": rng.uniform(0, 0.2), "busy": rng.uniform(0.3, 1),
        "timing": draw(st.sampled_from(["isolated", "streamed"])), "backend": draw(st.sampled_from(["mpi", "gloo"])),
        "sizes": (64, 1 << 13, 1 << 16, 1 << 19, 1 << 22),
    }  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=machines())
def test_a_sound_run_with_noise_has_no_cause(lab: Any, made: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir=lab.out) as folder:
        said = replace(lab, out=Path(folder)).verdict(**made)
    assert said.startswith("none"), said
