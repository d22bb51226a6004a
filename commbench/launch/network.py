"""Addresses and interfaces of this host, without a resolver where that can be helped. Standard library only."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s16x8x")


def interfaces() -> dict[str, str]:
    """IPv4 address by interface name, for those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _IFREQ.pack(name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def job_address(all_on_one_host: bool) -> str:
    """The address that other ranks reach this host by: loopback where all share it.

    ``COMMBENCH_INTERFACE`` names the interface to use; else the one that the host name resolves to, else the first
    that is not loopback. Raises ValueError for an interface that has no address.
    """
    if all_on_one_host:
        return LOOPBACK
    known = interfaces()
    wanted = os.environ.get("COMMBENCH_INTERFACE")
    if wanted:
        if wanted not in known:
            raise ValueError(
                f"COMMBENCH_INTERFACE={wanted} has no IPv4 address here: interfaces are {', '.join(known) or 'none'}"
            )
        return known[wanted]
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = ""
    if resolved in known.values() and not resolved.startswith("127."):
        return resolved
    return next((address for address in known.values() if not address.startswith("127.")), LOOPBACK)


def interface_of(address: str) -> str:
    """The interface that has ``address``; ``lo`` for any loopback address."""
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in interfaces().items() if own == address), "lo")


def listen(address: str, port: int = 0, backlog: int = 1024) -> socket.socket:
    """A listening socket on one address only, never on all interfaces."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(backlog)
    return listener
