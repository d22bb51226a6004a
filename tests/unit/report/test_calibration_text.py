"""A calibration in words: constants with their intervals, and slow hosts by name."""

from __future__ import annotations

from typing import Any

from commbench.models.links import Link, Links
from commbench.report.calibration import describe_calibration

MIB = 1 << 20
LINK = Link(
    latency_s=2e-5, seconds_per_byte=4e-8, overhead_s=5e-6, table=((8, 2e-5), (MIB, 0.042)),
    exchange=((8, 3e-5), (MIB, 0.063)), shift=((8, 3e-5), (MIB, 0.05)), fan_in=((8, 1e-5), (MIB, 0.0525)),
)  # fmt: skip


def window(pattern: str, size: int, *seconds: float, **more: Any) -> dict[str, Any]:
    return {"link": "other_host", "pattern": pattern, "bytes": size, "seconds": list(seconds), **more}


def test_every_constant_with_its_interval() -> None:
    windows = [
        window("stream", MIB, 0.01, hosts=[0, 1]),  # of a pair of hosts: not this link's
        window("one_way", 8, 3.8e-5, 4e-5, 4.2e-5, 4.1e-5, 3.9e-5, 4e-5, 4e-5),
        window("exchange", MIB, 0.060, 0.066, 0.063, 0.064, 0.062, 0.061, 0.065),
        window("stream", MIB, 0.042, 0.044, 0.043),
    ]
    links = Links(other_host=LINK, reduce_seconds_per_byte=1e-10)
    said = describe_calibration("mpi", links, windows, ["a", "b", "c"])
    text = "\n".join(said)
    assert said[0] == "mpi: 3 ranks on 3 hosts"
    # Half of a ping-pong; of seven values the range covers the median at 1 - 2/2^7.
    assert "latency       20.0 us  [19.0 us, 21.0 us] at 98%" in text
    assert "one way       0.0250 GB/s: 1M in 41.9 ms  [41.9 ms, 44.0 ms] at 75%" in text
    assert (
        "exchange      0.0166 GB/s each way: 1M in 63.0 ms  [60.0 ms, 66.0 ms] at 98%, 1.50 x a message alone" in text
    )
    assert "shift         0.0210 GB/s each way: 1M in 50.0 ms, 1.19 x a message alone" in text
    assert "fan-in        0.0200 GB/s into one rank from several" in text
    assert "addition: 10.0 GB/s" in text
    assert "slow host" not in text


def test_slow_hosts_are_named_with_their_rates() -> None:
    links = Links(other_host=LINK, host_rates=((4e-8, 4e-8), (4e-8, 1.6e-7), (4e-8, 4e-8)))
    said = describe_calibration("gloo", links, [], ["node1", "node2", "node2", "node3"])
    slow = [line for line in said if "slow host" in line]
    assert len(slow) == 1
    assert "slow host node2: 0.0250 GB/s out, 0.0063 in, where others have 0.0250" in slow[0]


def test_a_nic_behind_several_ranks() -> None:
    links = Links(other_host=LINK, nic=((MIB, 0.035),), nic_seconds_per_byte=3e-8)
    text = "\n".join(describe_calibration("mpi", links, [], ["a", "a", "b", "b"]))
    assert "NIC behind several ranks: 0.0333 GB/s one way, 0.0300 both ways, 0.0250 for one rank alone" in text
