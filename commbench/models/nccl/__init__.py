"""NCCL's own tuning model: what it believes an operation takes, from which it chooses algorithm and protocol.

An estimate of the tuner, neither a bound nor what to expect below some 256 MiB: it knows no launch, no proxy, no
congestion and no slow start. NCCL 2.18.3 to 2.30.7; pure, and standard library only.
"""

from __future__ import annotations

from commbench.models.nccl.constants import Version, parse_version
from commbench.models.nccl.enabling import parse_list
from commbench.models.nccl.estimate import NcclEstimate, nccl_estimate, nccl_times
from commbench.models.nccl.inputs import ALGORITHMS, FUNCTIONS, PROTOCOLS, Graph, NcclInputs
from commbench.models.nccl.search import nccl_inputs, search_graphs
from commbench.models.nccl.table import Cost, nccl_table

__all__ = [
    "ALGORITHMS",
    "FUNCTIONS",
    "PROTOCOLS",
    "Cost",
    "Graph",
    "NcclEstimate",
    "NcclInputs",
    "Version",
    "nccl_estimate",
    "nccl_inputs",
    "nccl_table",
    "nccl_times",
    "parse_list",
    "parse_version",
    "search_graphs",
]
