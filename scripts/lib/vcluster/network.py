"""The wires: one NIC a host, a switch between them, and a token bucket at both ends of every wire.

The token bucket at a host's NIC limits what it sends, the one at the switch's port what it receives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vcluster import ClusterError, kernel

NIC = "eth0"
MTU = 9000
FRAME_BYTES = MTU + 14  # with the Ethernet header; a bucket that is smaller than that passes nothing
# What a full bucket holds passes at memory speed. It must last while the kernel's timer is late, and no longer: a
# 32 kB one made an exchange of 512 KiB at 100 Mbit/s 4 % faster than the rate, this one 1 %.
LATENESS_S = 0.0002
# Before a packet is dropped: TCP waits 0.2 s for the last one of a message, far longer than the queue.
QUEUE_S = 0.05
QUEUE_BYTES = 256_000
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit", re.IGNORECASE)
_SCALE = {"k": 10**3, "m": 10**6, "g": 10**9}
SLOWEST, FASTEST = 10**6, 10**11


def parse_rate(text: str) -> int:
    """Bits a second of ``200mbit``, decimal as tc has it. Raises ClusterError."""
    match = _RATE.fullmatch(text.strip())
    if not match:
        raise ClusterError(f"{text!r} is not a rate: write a number with kbit, mbit or gbit, such as 200mbit")
    rate = round(float(match[1]) * _SCALE[match[2].lower()])
    if not SLOWEST <= rate <= FASTEST:
        raise ClusterError(f"rate {text!r} is outside 1mbit to 100gbit")
    return rate


def format_rate(rate: int) -> str:
    """The shortest exact form, which parse_rate reads."""
    scale, letter = next((s, k) for k, s in reversed(_SCALE.items()) if rate >= s)
    return f"{rate / scale:.12g}{letter}bit"


def program(name: str) -> str:
    """The path of ``ip`` or ``tc``, also where PATH lacks the administrator's folders. Raises ClusterError."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise ClusterError(f"no {name}: install iproute2 (Debian, Ubuntu: apt-get install iproute2)")
    return path


@dataclass(kw_only=True)
class Link:
    """A host's wire: its NIC's namespace, its port at the switch, and its state."""

    netns: int
    port: str
    rate: int
    cut: bool = False


@dataclass(kw_only=True)
class Switch:
    """The bridge in a namespace of its own, and a link to each host. For one process, which visits the namespaces."""

    home: int
    netns: int
    rate: int
    links: list[Link] = field(default_factory=list)

    def build(self, addresses: Sequence[str], prefix: int, hosts: Sequence[int]) -> None:
        """Wire up ``hosts`` (descriptors of their network namespaces). Raises ClusterError."""
        self.links = [Link(netns=h, port=f"port{i}", rate=self.rate) for i, h in enumerate(hosts)]
        lines = [f"link add name switch mtu {MTU} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
        for link in self.links:
            end = f"/proc/{os.getpid()}/fd/{link.netns}"
            lines += [
                f"link add name {link.port} mtu {MTU} type veth peer name {NIC} mtu {MTU} netns {end}",
                f"link set {link.port} master switch up",
            ]
        self._in_switch("ip", [*lines, "link set switch up"])
        with self._inside(self.netns):
            for link in self.links:
                kernel.offloads_off(link.port)
        self._in_switch("tc", [_bucket(link.port, self.rate) for link in self.links])
        for link, address in zip(self.links, addresses, strict=True):
            with self._inside(link.netns):
                _no_ipv6()
                kernel.offloads_off(NIC)
                _batch("tc", [_bucket(NIC, self.rate)])
                _batch("ip", ["link set lo up", f"addr add {address}/{prefix} dev {NIC}", f"link set {NIC} up"])

    def slow(self, index: int, rate: int) -> None:
        """Another rate for both directions of a host's wire, from now on; what is under way stays under way."""
        link = self.links[index]
        self._in_switch("tc", [_bucket(link.port, rate)])
        with self._inside(link.netns):
            _batch("tc", [_bucket(NIC, rate)])
        link.rate = rate

    def cut(self, index: int) -> None:
        """Pull a host's wire: the port is dead, nothing is said to anyone."""
        self._in_switch("ip", [f"link set {self.links[index].port} down"])
        self.links[index].cut = True

    def heal(self) -> None:
        """Every wire plugged in and at its first rate."""
        for index, link in enumerate(self.links):
            if link.cut:
                self._in_switch("ip", [f"link set {link.port} up"])
                link.cut = False
            if link.rate != self.rate:
                self.slow(index, self.rate)

    def _in_switch(self, name: str, lines: Sequence[str]) -> None:
        with self._inside(self.netns):
            _batch(name, lines)

    @contextmanager
    def _inside(self, netns: int) -> Iterator[None]:
        kernel.setns(netns, kernel.CLONE_NEWNET)
        try:
            yield
        finally:
            kernel.setns(self.home, kernel.CLONE_NEWNET)


def _bucket(interface: str, rate: int) -> str:
    bytes_per_s = rate / 8
    burst = FRAME_BYTES + round(bytes_per_s * LATENESS_S)
    queue = burst + max(round(bytes_per_s * QUEUE_S), QUEUE_BYTES)
    return f"qdisc replace dev {interface} root handle 1: tbf rate {rate}bit burst {burst} limit {queue}"


def _no_ipv6() -> None:
    # Only so that nobody picks a link-local address.
    for group in ("all", "default"):
        switch = Path(f"/proc/sys/net/ipv6/conf/{group}/disable_ipv6")
        if switch.exists():
            switch.write_text("1")


def _batch(name: str, lines: Sequence[str]) -> None:
    done = subprocess.run(
        [program(name), "-batch", "-"], input="".join(f"{line}\n" for line in lines), capture_output=True, text=True,
        check=False, timeout=30,
    )  # fmt: skip
    if done.returncode == 0:
        return
    said = [line for line in done.stderr.splitlines() if not line.startswith("Command failed")]
    why = said[0].strip().removeprefix("Error: ") if said else f"exit code {done.returncode}"
    if "qdisc kind is unknown" in why:
        raise ClusterError("this kernel has no tbf, the token bucket queue: modprobe sch_tbf")
    if "Unknown device type" in why:
        raise ClusterError("this kernel has no veth or no bridge: modprobe veth bridge")
    raise ClusterError(f"{name} failed: {why}")
