"""The system calls and ioctls that Python (before 3.12) does not have, and what a process is known by."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

from vcluster import ClusterError

# linux/sched.h, sys/mount.h, linux/sockios.h, linux/ethtool.h
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
SIOCETHTOOL = 0x8946
ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO = 0x1F, 0x24, 0x2C

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """A new namespace of each kind in ``flags`` for this process (a PID namespace: for its next child). OSError."""
    _check(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Enter the namespace that ``descriptor`` stands for. Raises OSError."""
    _check(_libc.setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2). Raises OSError."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def detach(target: str) -> None:
    """umount2(2), once the last user is gone. Raises OSError."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def offloads_off(interface: str) -> None:
    """No segmentation or receive offload on an interface of this network namespace, as ``ethtool -K`` does it.

    A token bucket charges what passes it: with offloads on that would be bundles of 64 kB, without headers.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for setting in (ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO):
            value = array.array("I", [setting, 0])  # struct ethtool_value: command, data
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            try:
                fcntl.ioctl(probe.fileno(), SIOCETHTOOL, request)
            except OSError as error:
                raise ClusterError(f"cannot turn offloads of {interface} off: {error.strerror}") from None


def start_time(pid: int) -> str:
    """When a process started, in the kernel's words, because a pid alone may since belong to another; "" if it is gone.

    Field 22 of /proc/PID/stat (proc(5)); a zombie counts as gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
