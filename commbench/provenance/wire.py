"""Bytes that left this host, as its network interfaces count them: what a library really sent, headers included.

Ethernet: the transmit column of /proc/net/dev. InfiniBand and RoCE bypass it: port_xmit_data, in words of four bytes
(the kernel's ABI document sysfs-class-infiniband).
"""

from __future__ import annotations

from pathlib import Path

from commbench.provenance.counters import TX_BYTES_COLUMN
from commbench.provenance.sources import ROOT, names, read, read_int

LOOPBACK_INTERFACE = "lo"
_NET = "sys/class/net"
_IB = "sys/class/infiniband"
_WORD_BYTES = 4
_TYPE_INFINIBAND = 32  # ARPHRD_INFINIBAND: what IP over InfiniBand sends, the port counts too


class SentBytes:
    """``counter()`` is a number that grows with every byte sent; only differences mean something.

    Counted are the interfaces of hardware, and the job's own where it is not built upon one of these (a bond's members
    count what the bond sends). Loopback is not: it leaves nowhere.
    """

    def __init__(self, job_interface: str, root: Path = ROOT) -> None:
        self._root = root
        self.interfaces = tuple(name for name in names(root, _NET) if self._counts(name, job_interface))
        if not self.interfaces and job_interface != LOOPBACK_INTERFACE:
            self.interfaces = (job_interface,)  # a host without sysfs
        self.ports = tuple(
            f"{_IB}/{device}/ports/{port}/counters/port_xmit_data"
            for device in names(root, _IB)
            for port in names(root, f"{_IB}/{device}/ports")
        )

    def _counts(self, name: str, job_interface: str) -> bool:
        base = f"{_NET}/{name}"
        if name == LOOPBACK_INTERFACE or read_int(self._root, f"{base}/type") == _TYPE_INFINIBAND:
            return False
        if (self._root / base / "device").exists():
            return True
        return name == job_interface and not any(entry.startswith("lower_") for entry in names(self._root, base))

    def __call__(self) -> int:
        total = 0
        for line in (read(self._root, "proc/net/dev") or "").splitlines()[2:]:
            name, _, values = line.partition(":")
            if name.strip() in self.interfaces:
                total += int(values.split()[TX_BYTES_COLUMN])
        return total + _WORD_BYTES * sum(read_int(self._root, port) or 0 for port in self.ports)
