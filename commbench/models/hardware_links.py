"""A preset's links, as predictions take them."""

from __future__ import annotations

from commbench.models.hardware import Hardware
from commbench.models.links import Link, Links


def hardware_links(hardware: Hardware, ranks_per_node: int) -> Links:
    """The links among ranks with a GPU each, ``ranks_per_node`` of a node's; the GPUs bring their share of its NICs.

    All links are full duplex at the preset's rates: no protocol, launch or copy is in them. A rank uses one NIC, the
    ranks of a node all of theirs. Raises ValueError for more ranks than GPUs.
    """
    if not 1 <= ranks_per_node <= hardware.gpus_per_node:
        raise ValueError(
            f"{hardware.name} has {hardware.gpus_per_node} GPUs a node, too few for {ranks_per_node} ranks on one"
        )
    nics = max(1, -(-hardware.nics_per_node * ranks_per_node // hardware.gpus_per_node))
    return Links(
        same_host=Link(latency_s=hardware.link_latency_s, seconds_per_byte=1 / hardware.link_Bps),
        other_host=Link(latency_s=hardware.nic_latency_s, seconds_per_byte=1 / hardware.nic_Bps),
        reduce_seconds_per_byte=1 / hardware.reduce_Bps,
        nic_seconds_per_byte=1 / (nics * hardware.nic_Bps),
    )
