"""How many bytes a dispatch or a combine moves, by every convention under which such numbers are published.

A bandwidth can be set beside another only where both are of the same bytes, and projects differ by factors: whether a
token is counted once for each expert, rank or host, whether what stays on the own rank or host counts, whether scales and
headers do. Of H values, a token weighs 2 H bytes in bfloat16 and H + 4 H/128 in FP8 (``Workload.token_bytes``), which is
what DeepEP's ``fp8_factor = (1 + 4 / 128) / 2`` makes of 2 H. A combine goes the dispatch's ways back, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from commbench.backends.experts import Place
from commbench.moe.load import Counts, count
from commbench.moe.wire import COUNT_BYTES, record_bytes
from commbench.workloads import Workload

CONVENTIONS: dict[str, str] = {
    "wire": "commbench's own data path hands over for other ranks, in all stages: tokens, indices, weights, counts",
    "wire_host": "of wire, what is for ranks of other hosts",
    "logical": "a token for every valid selection of the rank's tokens, wherever its expert is",
    "dedup_rank": "a token for each rank that has an expert of it, the own rank included",
    "dedup_host": "a token for each host that has an expert of it, the own host included",
    "deepep_normal": "tokens that the rank receives, one from each token with an expert there, its own included: "
    "recv_x of DeepEP tests/legacy/test_intranode.py, and what internode prints as NVL",
    "deepep_internode_rdma": "tokens that the rank sends, one for each host, the own host included: "
    "num_rdma_token_sent of DeepEP tests/legacy/test_internode.py (DeepEP#51: more than leaves the host)",
    "deepep_low_latency": "every valid selection, of H + 4 H/128 + 16 bytes in FP8 and 2 H in bfloat16: "
    "DeepEP tests/legacy/test_low_latency.py",
    "ep_bench": "low latency: a token for every valid selection; else tokens that the rank receives, one from each token "
    "with an expert there, its own included: total_recv of NCCL contrib/nccl_ep/ep_bench.cu",
    "ep_bench_rdma": "tokens that the rank sends to other hosts, one for each: rdma_send of the same file",
}
"""What counts as a rank's bytes. ``ep_bench`` is NCCL's, of which numbers are published; nccl-extensions' counts low
latency once for each destination rank, as ``dedup_rank`` does."""
LOW_LATENCY_HEADER = 16  # bytes of a message beside an FP8 token, as DeepEP's test counts them


def default_convention(mode: str, backend: str, hosts: int = 1) -> str:
    """Which bytes a bandwidth is of: those that the library's own test divides by, DeepEP's for what has none.

    None of them depends on how a backend moves the tokens, so bandwidths of one workload compare as times do.
    """
    if backend == "nccl_ep":
        return "ep_bench"
    if mode == "low_latency":
        return "deepep_low_latency"
    return "deepep_internode_rdma" if hosts > 1 else "deepep_normal"


def convention_bytes(
    place: Place, slots_of_all_ranks: Sequence[NDArray[np.int64]], workload: Workload, dtype: str, collective: str,
    algorithm: str,
) -> dict[str, NDArray[np.float64]]:  # fmt: skip
    """[ranks] bytes of every convention in one iteration. ``dtype``: what a dispatch sends; a combine is in bfloat16.

    ``wire`` is left out where the data path is a library's, whose buffers are its own.
    """
    counts = count(place, slots_of_all_ranks)
    host_of = np.array(place.host_of, dtype=np.int64)
    token = workload.token_bytes(_sent(dtype, collective))
    header = LOW_LATENCY_HEADER if _sent(dtype, collective).startswith("float8") else 0
    selections = counts.selections.sum(axis=1)
    received = counts.rank_copies.sum(axis=0)
    to_hosts = counts.host_copies.sum(axis=1)
    abroad = to_hosts - counts.host_copies[np.arange(len(host_of)), host_of]
    found = {
        "logical": selections * token,
        "dedup_rank": counts.rank_copies.sum(axis=1) * token,
        "dedup_host": to_hosts * token,
        "deepep_normal": received * token,
        "deepep_internode_rdma": to_hosts * token,
        "deepep_low_latency": selections * (token + header),
        "ep_bench": (selections if workload.mode == "low_latency" else received) * token,
        "ep_bench_rdma": abroad * token,
    }
    if algorithm.startswith("own:"):
        most = max(len(slots) for slots in slots_of_all_ranks)
        sent = _traffic(place, counts, most, workload, dtype, collective, algorithm).sum(axis=0)
        found["wire"] = sent.sum(axis=1) - np.diag(sent)
        found["wire_host"] = (sent * (host_of[:, None] != host_of)).sum(axis=1)
    return {name: found[name].astype(np.float64) for name in CONVENTIONS if name in found}


def traffic(
    place: Place, slots_of_all_ranks: Sequence[NDArray[np.int64]], workload: Workload, dtype: str, collective: str,
    algorithm: str,
) -> NDArray[np.int64]:  # fmt: skip
    """[stages, n, n] bytes that every rank (row) hands over for every rank (column, itself too) in each stage, in order.

    What commbench's own data path sends, as commbench/moe/wire.py says it does: one stage straight to the experts' ranks,
    or with ``own:hierarchical`` one along the rails and one inside hosts, for a combine the other way round.
    """
    most = max(len(slots) for slots in slots_of_all_ranks)
    return _traffic(place, count(place, slots_of_all_ranks), most, workload, dtype, collective, algorithm)


def _traffic(
    place: Place, counts: Counts, most_tokens: int, workload: Workload, dtype: str, collective: str, algorithm: str
) -> NDArray[np.int64]:
    dispatch = collective == "moe_dispatch"
    size = record_bytes(workload, dtype) if dispatch else workload.token_bytes("bfloat16")
    ranks = len(place.host_of)
    if workload.mode == "low_latency":
        return np.full((1, ranks, ranks), most_tokens * size, dtype=np.int64)
    if algorithm == "own:hierarchical":
        stages, groups = _hierarchical(place, counts)
    else:
        stages, groups = counts.rank_copies[None], np.ones((1, ranks, ranks), dtype=np.int64)
    if not dispatch:
        return stages[::-1].transpose(0, 2, 1) * size
    return stages * size + (groups * COUNT_BYTES if workload.counts == "exchanged" else 0)


def _hierarchical(place: Place, counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[2, n, n] copies along rails and then inside hosts, and whether two ranks are of one rail, or host: 0 or 1."""
    host_of = np.array(place.host_of, dtype=np.int64)
    ranks = np.arange(len(host_of))
    local = np.array([(host_of[:rank] == host_of[rank]).sum() for rank in ranks], dtype=np.int64)
    rail = local[:, None] == local
    node = host_of[:, None] == host_of
    along = np.where(rail, counts.host_copies[:, host_of], 0)
    # Rank r hands on to the ranks of its host what all ranks of its rail have for them.
    inside = np.where(node, rail.astype(np.int64) @ counts.rank_copies, 0)
    return np.stack([along, inside]), np.stack([rail, node]).astype(np.int64)


def _sent(dtype: str, collective: str) -> str:
    return dtype if collective == "moe_dispatch" else "bfloat16"
