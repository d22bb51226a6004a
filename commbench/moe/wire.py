"""What commbench's own data path sends beside the tokens themselves: sizes alone, for whoever counts bytes.

Each copy of a token is a *record*: its values and scales, then numbers of 4 bytes: the rank and index that it comes from,
for each selection the slot (-1 where it is another rank's) and its weight. Before records, every rank of a group is told
how many come, in 8 bytes. What comes back for a record is one row of 2 H bytes, without numbers.
"""

from __future__ import annotations

from commbench.workloads import Workload

NUMBER_BYTES = 4
COUNT_BYTES = 8


def record_bytes(workload: Workload, dtype: str) -> int:
    """Of one copy of a token in a dispatch."""
    return workload.token_bytes(dtype) + NUMBER_BYTES * (2 + 2 * workload.topk)
