"""The tuner's choice for one operation, and the time that it puts on it (ncclTopoGetAlgoTime, topoGetAlgoInfo)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from commbench.collectives import COLLECTIVES
from commbench.models.nccl.constants import Version, constants, parse_version
from commbench.models.nccl.enabling import allowed, fallback, nvls_reduces
from commbench.models.nccl.inputs import ALGORITHMS, FUNCTION_OF, PROTOCOLS, X86, NcclInputs
from commbench.models.nccl.table import Cost, nccl_table
from commbench.registry import unknown_name

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_FP8_PENALTY = 1024.0  # keeps long rings, which lose precision, as the last resort


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclEstimate:
    """``seconds`` is None where NCCL has no estimate, and then ``reason`` says why."""

    seconds: float | None
    algorithm: str | None = None
    protocol: str | None = None
    reason: str | None = None
    version: str

    def bus_bandwidth_Bps(self, collective: str, message_bytes: float, ranks: int) -> float | None:
        """nccl-tests' bus bandwidth that the estimate means; None without one."""
        if not self.seconds:
            return None
        return message_bytes / self.seconds * COLLECTIVES[collective].bus_factor(ranks)


def nccl_estimate(
    collective: str,
    message_bytes: float,
    inputs: NcclInputs,
    *,
    version: str,
    algo: str | None = None,
    proto: str | None = None,
    dtype: str = "float32",
    reduce_op: str | None = "sum",
) -> NcclEstimate:
    """What NCCL's tuner expects for one operation of ``message_bytes`` (nccl-tests' size) and what it would choose.

    ``algo`` and ``proto`` are values of ``NCCL_ALGO`` and ``NCCL_PROTO``. Raises ValueError for an unknown collective,
    a version outside 2.18 to 2.30, and lists that NCCL refuses.
    """
    known = parse_version(version)
    if collective not in COLLECTIVES:
        raise ValueError(unknown_name("collective", collective, COLLECTIVES))
    if collective not in FUNCTION_OF:
        return NcclEstimate(seconds=None, reason=f"NCCL's tuner does not model {collective}", version=version)
    if inputs.ranks < 2:
        return NcclEstimate(seconds=None, reason="one rank has nobody to talk to", version=version)
    if inputs.multi_host_nvlink and known < (2, 20):
        reason = "NCCL before 2.20 does not treat hosts joined by NVLink as one node"
        return NcclEstimate(seconds=None, reason=reason, version=version)
    times = nccl_times(
        collective, message_bytes, inputs, version=version, algo=algo, proto=proto, dtype=dtype, reduce_op=reduce_op
    )
    if not times:
        forced = ", ".join(f"{k}={v}" for k, v in (("NCCL_ALGO", algo), ("NCCL_PROTO", proto)) if v is not None)
        reason = f"no algorithm and protocol are left{' by ' + forced if forced else ''}"
        return NcclEstimate(seconds=None, reason=reason, version=version)
    penalty = _penalties(inputs, known, dtype)
    # NCCL takes the first of equals, in its own order.
    best = min(
        sorted(times, key=lambda pair: (ALGORITHMS.index(pair[0]), PROTOCOLS.index(pair[1]))),
        key=lambda pair: times[pair] * penalty.get(pair[0], 1.0),
    )
    return NcclEstimate(seconds=times[best], algorithm=best[0], protocol=best[1], version=version)


def nccl_times(
    collective: str,
    message_bytes: float,
    inputs: NcclInputs,
    *,
    version: str,
    algo: str | None = None,
    proto: str | None = None,
    dtype: str = "float32",
    reduce_op: str | None = "sum",
) -> dict[tuple[str, str], float]:
    """Seconds of every (algorithm, protocol) that the tuner may choose; the arguments are those of nccl_estimate.

    Empty for collectives that NCCL does not model.
    """
    known = parse_version(version)
    function = FUNCTION_OF.get(collective, "")
    table = nccl_table(inputs, known)
    candidates = _allowed(inputs, known, algo, proto)
    for entries in (candidates, frozenset(fallback(function, proto, inputs, known)) if function else frozenset()):
        times = {
            (algorithm, protocol): _time(algorithm, protocol, table[entry], function, message_bytes, inputs, known)
            for entry in entries
            for of, algorithm, protocol in (entry,)
            if of == function and entry in table and table[entry].bandwidth_Bps > 0
            if _takes(function, algorithm, dtype, reduce_op, known)
        }
        if times:
            return times
    return {}


@lru_cache(maxsize=256)
def _allowed(
    inputs: NcclInputs, version: Version, algo: str | None, proto: str | None
) -> frozenset[tuple[str, str, str]]:
    return frozenset(allowed(inputs, version, algo, proto))


def _takes(function: str, algorithm: str, dtype: str, reduce_op: str | None, version: Version) -> bool:
    """Whether an algorithm can do the reduction. An average of floats is a sum of scaled inputs, which NVLS cannot."""
    if algorithm in ("NVLS", "NVLSTree"):
        return nvls_reduces(function, dtype, reduce_op, version)
    return not (algorithm == "PAT" and function == "ReduceScatter" and reduce_op == "avg")


def _penalties(inputs: NcclInputs, version: Version, dtype: str) -> dict[str, float]:
    lossy = dtype in _FP8 and inputs.ranks > 8 and version >= (2, 24)
    return {"Ring": _FP8_PENALTY} if lossy else {}


def _time(
    algorithm: str, protocol: str, cost: Cost, function: str, size: float, inputs: NcclInputs, version: Version
) -> float:
    """Seconds: latency plus size over bandwidth, with NCCL's corrections by size."""
    latency, bandwidth = cost.latency_s, cost.bandwidth_Bps
    if function == "AllReduce":
        bandwidth *= _correction(algorithm, protocol, size, inputs, version)
        crowded = size / (inputs.channels * inputs.ranks) >= 64
        if (algorithm, protocol) == ("Ring", "Simple") and inputs.nodes > 1 and crowded:
            latency *= 1.9 if inputs.cc_min < 80 else 1.4
    return latency + size / bandwidth


def _correction(algorithm: str, protocol: str, size: float, inputs: NcclInputs, version: Version) -> float:
    """Trees of middle sizes do not follow the model: a factor by powers of two from 64 B."""
    if algorithm == "Tree":
        last = 22
    elif algorithm == "NVLSTree" and version >= (2, 29) and inputs.cc_min >= 100 and inputs.cpu_arch == X86:
        last = 23
    else:
        return 1.0
    index = (int(size) >> 6).bit_length() - 1
    if index < 0:
        if version >= (2, 22):
            return 1.0
        index = 0
    return constants(version).tree_correction[protocol][index] if index <= last else 1.0
