"""What a dispatch or combine should take: the actual traffic over the links that were calibrated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from commbench.backends.experts import Place
from commbench.cases import Case
from commbench.models import Links
from commbench.models.traffic import exchange_s
from commbench.moe.conventions import traffic
from commbench.moe.exchange import ALGORITHMS
from commbench.moe.wire import COUNT_BYTES


def predict(
    case: Case, where: Place, slots: Sequence[NDArray[np.int64]], links: Links, host_of: Sequence[int]
) -> float | None:
    """Seconds of one iteration whose tokens go to ``slots``; None where the data path is a library's own.

    Stages follow one another, and before each, where counts are exchanged, a message of 8 bytes between all ranks of it.
    Local work (laying out, quantising, packing, adding) comes on top: it has no calibrated rate, and is timed on the very
    operation without its messages (``moe.exchange.local_s``).
    """
    assert case.workload is not None
    if case.algorithm not in ALGORITHMS:
        return None
    stages = traffic(where, slots, case.workload, case.dtype, case.collective, case.algorithm)
    announced = (
        case.collective == "moe_dispatch"
        and case.workload.counts == "exchanged"
        and case.workload.mode != "low_latency"
    )
    seconds = 0.0
    for stage in stages:
        sizes = np.asarray(stage, dtype=np.float64)
        if announced:
            among = np.where(sizes > 0, float(COUNT_BYTES), 0.0)
            seconds += exchange_s(among, host_of, links)
            sizes = np.maximum(sizes - among, 0.0)
        seconds += exchange_s(sizes, host_of, links)
    return seconds
