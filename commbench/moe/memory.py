"""How much memory an operation of a routed case takes, known before its tokens are drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commbench.backends.experts import Place
from commbench.cases import Case
from commbench.moe.routing import Router
from commbench.moe.wire import record_bytes


class Need(NamedTuple):
    """Bytes on the rank that needs most: for each set of tensors, and for a while beside them."""

    kept: int
    work: int


def busiest_rows(router: Router, where: Place) -> float:
    """Rows, one a selection, that the most loaded rank is expected to get."""
    copies = np.array([len(slots) for slots in where.copies])
    of_slot = (router.expected_load() / copies)[np.array(where.expert_of)]
    return float(np.bincount(where.rank_of, weights=of_slot).max())


def need(case: Case, router: Router, where: Place) -> Need:
    """Kept: tokens, expert rows, sums. Beside them: the records of an exchange, twice for what a library may copy, and the
    copies and float32 sums that are made of rows; or what the check makes of rows, if that is more."""
    workload = case.workload
    assert workload is not None
    ranks, hidden, tokens = case.ranks, workload.hidden, workload.tokens
    token, record, plain, wide = (
        workload.token_bytes(case.dtype),
        record_bytes(workload, case.dtype),
        2 * hidden,
        4 * hidden,
    )
    combine = case.collective == "moe_combine"
    rows = busiest_rows(router, where)
    given, taken = tokens * min(workload.topk, ranks), min(rows, tokens * ranks)
    room = rows
    if workload.mode == "low_latency":
        given = taken = tokens * ranks
        room = max(len(where.slots_of(rank)) for rank in range(ranks)) * ranks * tokens
    kept = tokens * (plain + 12 * workload.topk) + room * token + combine * (room + tokens) * plain
    act = 2 * (given + taken) * record + rows * 2 * token
    if combine:
        act = max(act, 2 * (given + taken) * plain + (taken + tokens) * wide)
    check = tokens * (plain + 2 * wide) if combine else rows * (token + plain + wide) + tokens * plain
    return Need(round(kept), round(max(act, check)))
