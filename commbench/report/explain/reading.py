"""From a run's directory to its curves, with all that they are judged by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from commbench.cases import Case, Layout, group_members
from commbench.models.links import Links
from commbench.records import LAUNCHES, MANIFEST, STATUS_OK
from commbench.report.explain.evidence import LEAST_SAMPLES, Curve, HostFacts, Port, Setup, Spot
from commbench.report.explain.expected import expected
from commbench.report.frame import summarise

CURVE = (
    "collective", "backend", "algorithm", "group", "ranks", "nodes", "dtype", "reduce_op", "placement", "timing",
    "root", "execution", "cache", "buffers",
)  # fmt: skip
ACTIVE = "ACTIVE"


def read_curves(run: Path, frame: pd.DataFrame) -> list[Curve]:
    """The curves of a run, in the order in which they were measured; ``frame`` is what ``load`` found of the run.

    What a manifest lacks, or a damaged one, is not known: a curve then has fewer setups.
    """
    setups = {(setup.launch, backend): setup for backend, setup in _setups(run)}
    measured = frame[(frame["status"] == STATUS_OK) & frame["time_s"].gt(0)]
    if measured.empty:
        return []
    cases = summarise(measured)
    launches = measured.groupby("case_id")["launch"].agg(lambda numbers: sorted(set(numbers)))
    apart = _over_launches(measured)
    curves = []
    for _, rows in cases.groupby(list(CURVE), sort=False, dropna=False):
        backend = str(rows["backend"].iloc[0])
        numbers = sorted({int(number) for case_id in rows["case_id"] for number in launches[case_id]})
        mine = tuple(setups[number, backend] for number in numbers if (number, backend) in setups)
        spots = tuple(_spot(row, mine, apart) for row in rows.sort_values("bytes").to_dict("records"))
        read_back = tuple(sorted(mine[0].read_back.items())) if mine else ()
        curves.append(Curve(spots=spots, setups=mine, expected=partial(expected, read_back=read_back)))
    return curves


def _over_launches(measured: pd.DataFrame) -> dict[str, float]:
    """Per case the slowest over the fastest median of a launch or pass."""
    medians = measured.groupby(["case_id", "launch", "pass_index"])["time_s"].median().groupby("case_id")
    several = medians.count() > 1
    ratios = (medians.max() / medians.min())[several]
    return {str(case): float(ratio) for case, ratio in ratios.items()}


def _spot(row: Mapping[Any, Any], setups: tuple[Setup, ...], apart: Mapping[str, float]) -> Spot:
    def number(name: str) -> float | None:
        return None if pd.isna(row[name]) else float(row[name])

    case = Case(
        collective=row["collective"], backend=row["backend"], algorithm=row["algorithm"], group=row["group"],
        bytes=int(row["bytes"]), requested_bytes=int(row["requested_bytes"]), dtype=row["dtype"],
        reduce_op=None if pd.isna(row["reduce_op"]) else row["reduce_op"], placement=row["placement"],
        timing=row["timing"], root=int(row["root"]), execution=row["execution"], cache=row["cache"],
        buffers=row["buffers"], ranks=int(row["ranks"]), nodes=int(row["nodes"]),
    )  # fmt: skip
    samples = int(number("samples") or 0)
    # The median of a few is no bound for anything; the least of them is.
    lower = number("time_lo_s" if samples >= LEAST_SAMPLES else "time_min_s")
    return Spot(
        case=case, launch=int(row["launch"]), hosts=_hosts(case, row, setups), seconds=float(row["time_s"]),
        lower=lower if lower is not None else float(row["time_s"]), p25=number("time_p25_s"), p75=number("time_p75_s"),
        samples=samples, predictions={name: s for name, s in row["predictions"].items() if s and s > 0},
        known_s=number("predicted_s"), wire_bytes=number("wire_bytes"),
        oversubscribed=row["oversubscribed"] is True, host_bound=row["host_bound"] is True,
        over_launches=apart.get(str(row["case_id"])),
    )  # fmt: skip


def _hosts(case: Case, row: Mapping[Any, Any], setups: tuple[Setup, ...]) -> tuple[int, ...]:
    """Of the group that was the slowest. Without a manifest, ranks one after the other on as many hosts."""
    ranks_of_hosts = next((setup.ranks for setup in setups if setup.launch == row["launch"]), ())
    if not ranks_of_hosts:
        per_host = -(-case.ranks // case.nodes)
        return tuple(rank // per_host for rank in range(case.ranks))
    layout = Layout(hosts=ranks_of_hosts)
    groups = group_members(case.group, layout)
    index = 0 if pd.isna(row["group_index"]) else int(row["group_index"])
    return tuple(layout.host_of[rank] for rank in groups[min(index, len(groups) - 1)])


def _setups(run: Path) -> Iterator[tuple[str, Setup]]:
    for manifest in sorted((run / LAUNCHES).glob(f"*/{MANIFEST}")):
        try:
            found = json.loads(manifest.read_bytes())
            yield from _setups_of(found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue


def _setups_of(found: dict[str, Any]) -> Iterator[tuple[str, Setup]]:
    ranks = tuple(found["hosts"])
    names = tuple(dict.fromkeys(ranks))
    before, after = found.get("before") or {}, found.get("after") or {}
    shares = _shares(ranks, before, after)
    facts = tuple(_host(name, before.get(name) or {}, shares.get(name, {})) for name in names)
    environment: dict[str, str] = {}
    for name in names:
        environment |= _environment(before.get(name) or {})
    for backend, known in (found.get("backends") or {}).items():
        if not known.get("links"):
            continue
        read_back = {str(key): str(value) for key, value in (known.get("settings") or {}).items()}
        rates = known.get("host_rates_after")
        yield backend, Setup(
            launch=int(found["launch"]), version=str(known.get("version", "")), links=Links.from_dict(known["links"]),
            rates_after=None if rates is None else tuple((float(out), float(into)) for out, into in rates),
            ranks=ranks, names=names, facts=facts, settings=environment | read_back, read_back=read_back,
        )  # fmt: skip


def _environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """Variables, and NCCL's settings files where no variable overrides them (/etc/nccl.conf counts least)."""
    found: dict[str, str] = {}
    for values in (*_part(facts, "nccl_conf").values(), _part(facts, "environment")):
        found |= {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}
    return found


def _part(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = facts.get(name)
    return part if isinstance(part, dict) and "error" not in part else {}


def _host(name: str, facts: Mapping[str, Any], shares: Mapping[str, Any]) -> HostFacts:
    ports = []
    for device, found in _part(_part(facts, "network"), "infiniband").items():
        for port, values in _part(found, "ports").items():
            if values.get("state") == ACTIVE and values.get("rate_bps"):
                ports.append(Port(name=f"{device}/{port}", rate_bps=float(values["rate_bps"])))
    return HostFacts(name=name, ports=tuple(ports), **shares)


def _shares(ranks: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per host what its processors' time went to during the launch.

    Hosts that were booted as one (containers, the virtual cluster) share processors: then all their ranks are ours.
    What our ranks used is known of one a host, and taken to be the same for the others.
    """
    machines: dict[str, list[str]] = {}
    for name in before:
        if name in after:
            boot = _part(before[name], "host").get("boot_id") or name
            machines.setdefault(boot, []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for names in machines.values():
        counted = {name: _counted(before[name], after[name]) for name in names}
        if any(values is None for values in counted.values()):
            continue
        ours = sum(values["ours"] * ranks.count(name) for name, values in counted.items() if values)
        for name, values in counted.items():
            if values and values["all"] > 0:
                processors = _part(_part(before[name], "host"), "cpu").get("logical")
                found[name] = {
                    "processors": processors if isinstance(processors, int) else None,
                    "others": max(0.0, values["busy"] - ours) / values["all"],
                    "busy": (values["busy"] + values["stolen"]) / values["all"],
                    "stolen": values["stolen"] / values["all"],
                }
    return found


def _counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds of processor time between the two: all there were, busy, stolen, and of one of our ranks."""
    try:
        old, new = before["counters"], after["counters"]
        busy, idle, stolen = (
            float(new["machine"][name]) - float(old["machine"][name]) for name in ("busy_s", "idle_s", "steal_s")
        )
        ours = float(new["process"]["cpu_s"]) - float(old["process"]["cpu_s"])
    except (KeyError, TypeError, ValueError):
        return None
    return {"all": busy + idle + stolen, "busy": busy, "stolen": stolen, "ours": ours}
