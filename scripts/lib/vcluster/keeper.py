"""The keeper: the one process that holds a cluster's namespaces, as open descriptors and in no other way.

When it ends, by whatever means, the kernel takes the namespaces, NICs and buckets away. It ends with its owner,
at ``down`` and at SIGTERM. It speaks over a Unix socket in the cluster's directory, one JSON message a packet:

    {"op": "enter", "host": I}            -> descriptors of the host's namespaces, by HOST_NAMESPACES
    {"op": "session"}                     the connection stays; the process at its other end dies with the cluster
    {"op": "slow", "host": I, "rate": R}  {"op": "cut", "host": I}  {"op": "heal"}  {"op": "status"}  {"op": "down"}

Answers are {} or {"error": one line}; ``status`` has {"links": [[rate, cut], ...]}; ``down`` ends in end of file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import selectors
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any, NoReturn

from vcluster import ClusterError, kernel, registry
from vcluster.network import Switch
from vcluster.registry import Cluster

LONGEST = 65536
DEATH_S = 5.0
HOST_NAMESPACES = {
    "net": kernel.CLONE_NEWNET, "uts": kernel.CLONE_NEWUTS, "ipc": kernel.CLONE_NEWIPC, "mnt": kernel.CLONE_NEWNS,
}  # fmt: skip


# -- the other end -------------------------------------------------------------------------------------


def connect(cluster: Cluster) -> socket.socket:
    """A connection to the keeper. Raises ClusterError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(cluster.socket))
    except OSError as error:
        connection.close()
        raise ClusterError(f"{cluster.name} does not answer: {error.strerror}") from None
    return connection


def ask(cluster: Cluster, op: str, **fields: Any) -> dict[str, Any]:
    """One question, one answer. Raises ClusterError where the answer is an error, or none."""
    with connect(cluster) as connection:
        connection.send(json.dumps({"op": op, **fields}).encode())
        return _answer(cluster, connection.recv(LONGEST))


def namespaces(cluster: Cluster, host: int) -> list[int]:
    """Descriptors in the order of HOST_NAMESPACES. Raises ClusterError."""
    with connect(cluster) as connection:
        connection.send(json.dumps({"op": "enter", "host": host}).encode())
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, len(HOST_NAMESPACES))
        _answer(cluster, message)
        return list(descriptors)


def take_down(cluster: Cluster) -> None:
    """End a cluster and wait until its keeper, and with it every process inside, is gone. Raises ClusterError."""
    with contextlib.suppress(ClusterError), connect(cluster) as connection:
        connection.settimeout(2 * DEATH_S)
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"op": "down"}).encode())
            connection.recv(1)
    deadline = time.monotonic() + 1
    while cluster.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    if cluster.is_alive():
        registry.kill(cluster)
    registry.remove(cluster)


def _answer(cluster: Cluster, message: bytes) -> dict[str, Any]:
    if not message:
        raise ClusterError(f"{cluster.name} went down")
    answer: dict[str, Any] = json.loads(message)
    if "error" in answer:
        raise ClusterError(answer["error"])
    return answer


# -- its making ----------------------------------------------------------------------------------------


def start(hosts: int, ranks_per_host: int, rate: int, owner: int | None) -> Cluster:
    """Make a cluster in a process of its own. It ends with the process ``owner``; without one, only when told.

    Raises ClusterError.
    """
    watched = -1
    try:
        if owner is not None:
            watched = os.pidfd_open(owner)
    except (OSError, OverflowError):
        raise ClusterError(f"no process {owner} to own the cluster") from None
    news, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_keeper(hosts, ranks_per_host, rate, owner, watched, ready)
    os.close(ready)
    if watched >= 0:
        os.close(watched)
    with open(news) as said:
        kind, _, text = said.read().partition(" ")
    if kind == "ready":
        return registry.find(text)
    raise ClusterError(text or "the keeper of the cluster ended before the cluster was there")


def _be_keeper(hosts: int, ranks_per_host: int, rate: int, owner: int | None, watched: int, ready: int) -> NoReturn:
    try:
        _daemonise(keep={watched, ready})
        me = (os.getpid(), kernel.start_time(os.getpid()))
        cluster = registry.reserve(hosts, ranks_per_host, me if owner is None else (owner, kernel.start_time(owner)))
    except (ClusterError, OSError) as error:
        os.write(ready, f"error {error}".encode())
        os._exit(1)
    try:
        _keep(cluster, rate, watched, ready)
    except (ClusterError, OSError) as error:
        with contextlib.suppress(OSError):
            os.write(ready, f"error {error}".encode())
    finally:
        registry.remove(cluster)
        os._exit(0)


def _keep(cluster: Cluster, rate: int, watched: int, ready: int) -> None:
    cluster.write()
    switch, hosts = _make(cluster, rate)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(str(cluster.socket))
        except OSError as error:
            raise ClusterError(f"cannot listen at {cluster.socket}: {error}") from None
        listener.listen(128)
        os.write(ready, f"ready {cluster.name}".encode())
        os.close(ready)
        Keeper(listener=listener, watched=watched, switch=switch, hosts=hosts).serve()


def _daemonise(keep: set[int]) -> None:
    """Out of the caller's session, terminal and pipes: who reads those waits for the last writer."""
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def _make(cluster: Cluster, rate: int) -> tuple[Switch, list[list[int]]]:
    """The switch, and per host its namespaces' descriptors, all made by visiting them one after the other."""
    home = _own_namespaces()
    try:
        kernel.unshare(kernel.CLONE_NEWNET)
        switch = Switch(home=home["net"], netns=_own_namespaces()["net"], rate=rate)
        hosts = []
        for name in cluster.hosts:
            kernel.setns(home["mnt"], kernel.CLONE_NEWNS)
            kernel.unshare(sum(HOST_NAMESPACES.values()))
            socket.sethostname(name)
            _furnish(cluster)
            hosts.append(_own_namespaces())
        for name, kind in HOST_NAMESPACES.items():
            kernel.setns(home[name], kind)
    except OSError as error:
        raise ClusterError(f"this root may not make hosts ({error})") from None
    switch.build(cluster.addresses, ipaddress.ip_network(cluster.subnet).prefixlen, [host["net"] for host in hosts])
    return switch, [list(host.values()) for host in hosts]


def _own_namespaces() -> dict[str, int]:
    """Open descriptors, which hold the namespaces."""
    return {name: os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in HOST_NAMESPACES}


def _furnish(cluster: Cluster) -> None:
    """What a host sees of its own: names, shared memory, and under /sys its NICs. Nothing of it shows outside."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount(str(cluster.hosts_file), "/etc/hosts", "", kernel.MS_BIND)
    kernel.mount("shm", "/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")
    # sysfs shows the network namespace that it was mounted from. The rest of /sys, such as cgroups, stays as it is.
    mine = cluster.directory / "sys"
    mine.mkdir(exist_ok=True)
    kernel.mount("sysfs", str(mine), "sysfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for part in ("class/net", "devices/virtual/net"):
        if Path("/sys", part).is_dir():
            kernel.mount(str(mine / part), f"/sys/{part}", "", kernel.MS_BIND)
    kernel.detach(str(mine))


# -- its work ------------------------------------------------------------------------------------------


class Keeper:
    """Serves until it is told to end, its owner ends, or SIGTERM comes; then ends every session and waits for that."""

    def __init__(self, *, listener: socket.socket, watched: int, switch: Switch, hosts: list[list[int]]) -> None:
        self._listener = listener
        self._switch = switch
        self._hosts = hosts
        self._sessions: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._watched = watched
        self._alarm, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        for descriptor in (self._alarm, watched):
            if descriptor >= 0:
                self._selector.register(descriptor, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd in (self._alarm, self._watched):
                    return self._end()
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and not self._hear(key.fileobj):
                    return self._end()

    def _hear(self, connection: socket.socket) -> bool:
        """Answer; false where the request is to end."""
        try:
            message = connection.recv(LONGEST)
            request = json.loads(message) if message else None
            if request is None:
                self._forget(connection)
            elif request["op"] == "down":
                return False
            elif request["op"] == "session":
                self._sessions[connection] = os.pidfd_open(_peer(connection))
                connection.send(b"{}")
            elif request["op"] == "enter":
                socket.send_fds(connection, [b"{}"], self._hosts[request["host"]])
            else:
                connection.send(json.dumps(self._do(request)).encode())
        except (OSError, ValueError, LookupError, TypeError):
            self._forget(connection)
        return True

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "slow":
                self._switch.slow(request["host"], request["rate"])
            elif request["op"] == "cut":
                self._switch.cut(request["host"])
            elif request["op"] == "heal":
                self._switch.heal()
            elif request["op"] != "status":
                return {"error": f"the keeper knows no {request['op']!r}"}
        except ClusterError as error:
            return {"error": str(error)}
        return {"links": [[link.rate, link.cut] for link in self._switch.links]}

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        descriptor = self._sessions.pop(connection, None)
        if descriptor is not None:
            os.close(descriptor)
        connection.close()

    def _end(self) -> None:
        waiting = select.poll()
        for descriptor in self._sessions.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            waiting.register(descriptor, select.POLLIN)
        left = set(self._sessions.values())
        deadline = time.monotonic() + DEATH_S
        while left and time.monotonic() < deadline:
            for descriptor, _ in waiting.poll(100):
                waiting.unregister(descriptor)
                left.discard(descriptor)


def _peer(connection: socket.socket) -> int:
    """The process that connected (unix(7), SO_PEERCRED)."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
