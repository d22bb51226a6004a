"""Everything about one host in two calls: before the first timing and after the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from commbench.provenance.counters import snapshot
from commbench.provenance.env import collect_env, collect_nccl_conf
from commbench.provenance.gpu import collect_gpus
from commbench.provenance.gpu_topology import collect_topology
from commbench.provenance.host import collect_host, collect_load
from commbench.provenance.libraries import collect_libraries
from commbench.provenance.network import collect_network, collect_port_counters
from commbench.provenance.sources import ROOT, attempt


def collect_before(root: Path = ROOT) -> dict[str, Any]:
    """The host, its network, the settings, the loaded libraries, the counters, and its GPUs with the ways between them.
    Ready for JSON; never raises.

    File reads, some milliseconds on a small machine, and calls to the driver of GPUs: call it outside timed code.
    """
    return {
        "host": attempt(collect_host, root),
        "network": attempt(collect_network, root),
        "libraries": attempt(collect_libraries, root),
        "environment": attempt(collect_env, os.environ),
        "nccl_conf": attempt(collect_nccl_conf, root, os.environ.get("HOME")),
        "counters": snapshot(root),
        "port_counters": attempt(collect_port_counters, root),
        "gpus": attempt(collect_gpus, root),
        "gpu_topology": attempt(collect_topology, root),
    }


def collect_after(root: Path = ROOT) -> dict[str, Any]:
    """What may have changed since ``collect_before``, under the same keys (``host`` has only ``load``).

    Libraries are asked again, for backends load theirs late.
    """
    return {
        "host": {"load": attempt(collect_load, root)},
        "network": attempt(collect_network, root),
        "libraries": attempt(collect_libraries, root),
        "counters": snapshot(root),
        "port_counters": attempt(collect_port_counters, root),
        "gpus": attempt(collect_gpus, root),
    }
