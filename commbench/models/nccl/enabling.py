"""Which algorithms and protocols NCCL may choose from: its defaults, what a communicator cannot do, and what is forced."""

from __future__ import annotations

from commbench.models.nccl.constants import Version
from commbench.models.nccl.inputs import ALGORITHMS, FUNCTIONS, PROTOCOLS, Graph, NcclInputs
from commbench.models.nccl.table import GATHERING
from commbench.registry import unknown_name

OFF, ON, WHERE_SAFE = 0, 1, 2
Switches = dict[str, dict[str, int]]
_COLLNET = ("CollNetDirect", "CollNetChain")
_NVLS_ARITY = 32


def parse_list(text: str | None, kind: str, version: Version) -> Switches:
    """function → name → OFF, ON or WHERE_SAFE, from a value of ``NCCL_ALGO`` (kind "algorithm") or ``NCCL_PROTO``.

    ``Ring,Tree`` allows these alone, ``^LL128`` all others; from 2.24 on ``ring;allreduce:tree`` says so per function.
    None is NCCL's default: everything, LL128 only where it is safe; a list that leaves LL128 in forces it. Case does
    not count. Raises ValueError for what NCCL refuses.
    """
    names = ALGORITHMS if kind == "algorithm" else PROTOCOLS
    default = {name: WHERE_SAFE if name == "LL128" else ON for name in names}
    switches = {function: dict(default) for function in FUNCTIONS}
    if text is None:
        return switches
    for position, part in enumerate(part for part in text.split(";") if part.strip()):
        prefix, colon, listed = part.rpartition(":")
        if not colon and position:
            raise ValueError(f"{text!r}: every part but the first needs a function, such as allreduce:ring")
        if (colon or ";" in text) and version < (2, 24):
            raise ValueError(f"{text!r}: NCCL takes lists per function from 2.24 on")
        functions = FUNCTIONS if not colon else (_one_of(prefix, FUNCTIONS, "NCCL function"),)
        negated = listed.strip().startswith("^")
        chosen = {_one_of(n, names, f"NCCL {kind}") for n in listed.strip().lstrip("^").split(",") if n.strip()}
        for function in functions:
            switches[function] = {name: ON if (name in chosen) != negated else OFF for name in names}
    return switches


def _one_of(text: str, names: tuple[str, ...], kind: str) -> str:
    for name in names:
        if name.lower() == text.strip().lower():
            return name
    raise ValueError(unknown_name(kind, text.strip(), names))


def allowed(inputs: NcclInputs, version: Version, algo: str | None, proto: str | None) -> set[tuple[str, str, str]]:
    """The (function, algorithm, protocol) that are left, before data type and reduce op are looked at."""
    algorithms = parse_list(algo, "algorithm", version)
    protocols = parse_list(proto, "protocol", version)
    left = set()
    for function in FUNCTIONS:
        possible = {name for name in ALGORITHMS if _possible(function, name, inputs, version)}
        wanted = {name for name, on in algorithms[function].items() if on}
        if version < (2, 24):
            wanted |= _besides(function, wanted, inputs, version)
        for algorithm in wanted & possible:
            graph = inputs.graph(algorithm)
            for protocol in PROTOCOLS:
                on = protocols[function][protocol]
                if on == WHERE_SAFE:
                    on = int(graph is not None and ll128_is_safe(graph, inputs, version))
                if on:
                    left.add((function, algorithm, protocol))
    return left


def _besides(function: str, wanted: set[str], inputs: NcclInputs, version: Version) -> set[str]:
    """What versions before 2.24 allow against a list: ring and tree where only SHARP was asked for and there is none,
    and in 2.18 the ring for all but all_reduce."""
    needs_network = {"NVLS"} if inputs.nodes > 1 else {"NVLSTree"}
    if not inputs.collnet and not wanted & {"Ring", "Tree", "NVLS", "NVLSTree"} - needs_network:
        return {"Ring", "Tree"}
    return {"Ring"} if version < (2, 19) and function != "AllReduce" else set()


def fallback(function: str, proto: str | None, inputs: NcclInputs, version: Version) -> set[tuple[str, str, str]]:
    """What is taken when nothing is left: from 2.19 to 2.23 the ring, else nothing (NCCL ends with an error)."""
    if not (2, 19) <= version < (2, 24):
        return set()
    return {entry for entry in allowed(inputs, version, "Ring", proto) if entry[:2] == (function, "Ring")}


def _possible(function: str, algorithm: str, inputs: NcclInputs, version: Version) -> bool:
    if algorithm in _COLLNET:
        if not inputs.collnet or (algorithm == "CollNetDirect" and not inputs.nvswitch):
            return False
        crowded = inputs.ranks_per_node > 8
        limited = {"CollNetDirect": (2, 23), "CollNetChain": (2, 28)}[algorithm]
        return not (crowded and version >= limited)
    if algorithm == "PAT":
        return inputs.cc_min >= 60 and inputs.ranks == inputs.nodes
    if algorithm not in ("NVLS", "NVLSTree"):
        return function == "AllReduce" or algorithm == "Ring"
    if inputs.multi_host_nvlink and version < (2, 21):
        return False
    if algorithm == "NVLSTree":
        return function == "AllReduce" and inputs.nodes > 1
    if inputs.nodes > 1 and not inputs.collnet:
        return False
    if function not in GATHERING:
        return True
    if inputs.nodes > 1 and version < (2, 27):
        return False
    return inputs.ranks_per_node <= _NVLS_ARITY or version < (2, 25)


def ll128_is_safe(graph: Graph, inputs: NcclInputs, version: Version) -> bool:
    """Whether NCCL turns LL128 on by itself: it needs stores of 128 B that arrive whole, over short paths."""
    widest = "PXN" if inputs.cc_min >= 90 else "PXB"
    if not (graph.within(widest, inter=True) and graph.within("NVB", inter=False)):
        return False
    if inputs.cc_min != inputs.cc_max and not (version >= (2, 30) and inputs.cc_min >= 90):
        return False
    if version >= (2, 27):
        return inputs.cc_min >= 70
    return inputs.cc_min in ((70, 80, 90) if version < (2, 25) else (70, 80, 90, 100, 120))


def nvls_reduces(function: str, dtype: str, reduce_op: str | None, version: Version) -> bool:
    """Whether the switches can reduce it; all_gather needs no reduction, but 2.20 and 2.21 ask all the same."""
    if function == "AllGather":
        if (2, 20) <= version < (2, 22):
            reduce_op = "sum"
        else:
            return True
    if dtype in ("float32", "float64"):
        return reduce_op == "sum"
    return dtype in ("int32", "uint32", "int64", "uint64", "float16", "bfloat16") and reduce_op in ("sum", "min", "max")
