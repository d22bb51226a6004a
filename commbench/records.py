"""What a run leaves behind: the point, and the names of its files.

A point is one JSON object a line, in SI units; missing means not known. Columns may be added, never renamed;
``SCHEMA`` goes up when a reader of the old one would be misled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from commbench.units import format_size

SCHEMA = 1

STATUS_OK = "ok"
STATUS_SKIPPED = "skipped"  # cannot be run here; `reason` says why
STATUS_FAILED = "failed"  # was run and did not finish
STATUS_WRONG = "wrong"  # finished with wrong data: no bandwidth

MANIFEST = "manifest.json"
END = "end.json"
POINTS = "points.jsonl"
HOSTS = "hosts"
LAUNCHES = "launches"
SAMPLES = "samples"
CLOCK = "clock.jsonl"


@dataclass(kw_only=True, slots=True)
class Point:
    """The measured result of one case in one launch. Times in seconds, rates in bytes a second.

    ``time_s`` is the median; ``time_lo_s`` and ``time_hi_s`` its interval at ``interval_level``, over what
    ``interval_of`` names. A model that does not exist for the collective is None.
    """

    run_id: str = ""
    launch: int = 0
    started_utc: str = ""
    label: str = ""
    collective: str
    backend: str
    algorithm: str = "library"
    protocol: str | None = None
    group: str = "world"
    ranks: int
    nodes: int
    ranks_per_node: float | None = None
    dtype: str
    reduce_op: str | None
    placement: str
    bytes: int
    requested_bytes: int
    timing: str
    execution: str = "eager"
    cache: str = "rotate"
    status: str = STATUS_OK
    reason: str | None = None
    wrong: int | None = None
    verified: int | None = None
    samples: int | None = None
    discarded: int | None = None
    stop: str | None = None
    time_s: float | None = None
    time_lo_s: float | None = None
    time_hi_s: float | None = None
    time_min_s: float | None = None
    time_p05_s: float | None = None
    time_p25_s: float | None = None
    time_p75_s: float | None = None
    time_p95_s: float | None = None
    time_p99_s: float | None = None
    time_max_s: float | None = None
    time_mean_s: float | None = None
    algbw_Bps: float | None = None
    busbw_Bps: float | None = None
    slowest_rank: int | None = None
    slowest_host: str | None = None
    skew_s: float | None = None
    ring_s: float | None = None
    tree_s: float | None = None
    bound_s: float | None = None
    ring_busbw_Bps: float | None = None
    tree_busbw_Bps: float | None = None
    efficiency: float | None = None
    nearest_model: str | None = None
    wire_bytes: float | None = None
    tainted: str | None = None
    host_bound: bool | None = None
    schema: int = SCHEMA
    case_id: str = ""
    seed: int = 0
    root: int = 0
    world: int = 0
    group_index: int | None = None
    backend_settings: dict[str, str] = field(default_factory=dict)
    calibration_id: str | None = None
    predictions: dict[str, float] = field(default_factory=dict)
    nearest_error: float | None = None
    interval_of: str | None = None
    interval_level: float | None = None
    time_first_s: float | None = None
    oversubscribed: bool | None = None
    steal_s: float | None = None
    beyond_bound: bool | None = None
    late_starts: bool | None = None
    start: str | None = None  # how iterations were started together: "clock", "barrier", "stream"
    note: str | None = None
    batch: int | None = None  # operations that one sample times: 1 isolated, many streamed
    predicted_s: float | None = None  # the model of the very algorithm that was carried out, where it is known
    prediction_error: float | None = None  # measured / predicted - 1
    schedule_bytes: float | None = None  # what that algorithm sends between hosts; wire_bytes is what left them
    nccl_estimate_s: float | None = None  # NCCL's own tuner's: neither a bound nor a prediction
    host_s: float | None = None  # host's time an operation: the loop's own, or of starting it where a device does it
    time_shortest_s: float | None = None  # of the rank that was inside the shortest, where devices keep the time
    variant: str = ""  # the settings of --variant that its launch ran under, by name
    clock_error_s: float | None = None  # how far two ranks' clocks may be apart, where hosts' clocks were fitted
    preemptions: int | None = None  # times that a rank was put off its core while the case was measured, all ranks
    used_algorithm: str | None = (
        None  # that the library says it took, with `protocol`; `algorithm` is what was asked for
    )
    channels: int | None = None  # over how many, as it says
    buffers: str = "plain"  # what the library knows of the memory: "registered" or "symmetric" too
    pass_index: int = 0  # soak runs measure the same case again and again
    # Of a routed collective alone (docs/moe.md).
    tokens: int | None = None  # per rank
    hidden: int | None = None
    experts: int | None = None
    topk: int | None = None
    mode: str | None = None
    routing: str | None = None
    experts_on: str | None = None
    workload: dict[str, Any] = field(default_factory=dict)  # all of what it was asked to send
    bytes_convention: str | None = None  # which of `convention_bytes` the algorithm bandwidth is of
    convention_bytes: dict[str, float] = field(default_factory=dict)  # a rank's mean over iterations and ranks, by name
    load: dict[str, Any] = field(default_factory=dict)  # how evenly ranks and experts are loaded
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each, on the rank that was done last
    rank_times: list[float] = field(default_factory=list)  # per rank the median from the common start to its end
    straggler: dict[str, Any] = field(default_factory=dict)  # the slowest rank, and whether its load explains it
    matched: dict[str, float] = field(default_factory=dict)  # a plain all_to_all of the same bytes, beside it
    quantise_error: float | None = None  # relative, of the values that were sent in 8 bits

    def to_json(self) -> str:
        """One line of JSON, without NaN or infinity (which JSON has not: they become null)."""
        return json.dumps(finite(asdict(self)), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        """A point from a stored line; keys of later versions are dropped here and kept by the reader."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Point))


def size_title(point: Mapping[str, Any]) -> str:
    """What a line calls the size of a point: its bytes, or its tokens and how they are sent."""
    if not point.get("workload"):
        return format_size(int(point["bytes"] or point["requested_bytes"]))
    way = str(point["algorithm"]).removeprefix("own:")
    placed = "" if point["experts_on"] == "contiguous" else f" {point['experts_on']}"
    return f"{point['tokens']} tokens {point['routing']}{placed} {point['dtype']} {point['mode']} {way}"


def finite(value: Any) -> Any:
    """The same structure with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
