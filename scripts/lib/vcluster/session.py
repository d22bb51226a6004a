"""Runs commands inside a cluster so that nothing of them stays behind.

A session is a PID namespace. Its first process starts the commands, each on its host, and ends with the process that
the user started, with the keeper, and with the commands; the kernel then kills whatever else is left in the session,
daemons that took a session or a process group of their own included.

    user's process --(pipe: signals to pass on; end of file = end)--> first process --> commands
                                                     keeper <--(socket: end of file = end)--'
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from vcluster import ClusterError, keeper, kernel
from vcluster.registry import Cluster

GRACE_S = 10.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FROM_TERMINAL = 0x80  # SI_KERNEL of siginfo_t: whoever shares the terminal got it too


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run on which host, given by index. Only one command of a session may read the user's input."""

    host: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    reads_input: bool = True


def run(cluster: Cluster, commands: Sequence[Command]) -> int:
    """The exit code of the first command that fails, else 0; 128 + N after signal N.

    When one fails the others have GRACE_S to end, as have all after SIGINT, SIGTERM or SIGHUP; the second signal ends
    them at once. Raises ClusterError.
    """
    # Process ids are the same in every session, and hosts share this machine's files: what a session that was killed has
    # left under its launcher's number would stop the next.
    with tempfile.TemporaryDirectory(prefix="vc-", ignore_cleanup_errors=True) as private:
        mine = [replace(one, environment={**one.environment, "TMPDIR": private}) for one in commands]
        return _run(cluster, mine)


def _run(cluster: Cluster, commands: Sequence[Command]) -> int:
    waited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    sys.stdout.flush()
    sys.stderr.flush()
    orders, giver = os.pipe()
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
    except OSError as error:
        raise ClusterError(f"this root may not make a PID namespace ({error})") from None
    if pid == 0:
        os.close(giver)
        _be_first(cluster, commands, orders)
    os.close(orders)
    try:
        return _wait(pid, giver, waited)
    finally:
        os.close(giver)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(pid: int, giver: int, waited: set[signal.Signals]) -> int:
    deadline: float | None = None
    told = 0
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            os.kill(pid, signal.SIGKILL)
            left = None
        news = signal.sigwaitinfo(waited) if left is None else signal.sigtimedwait(waited, left)
        if news is None:
            continue
        if news.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 + (told or -code)
            continue
        if told:
            os.kill(pid, signal.SIGKILL)
        told = news.si_signo
        deadline = time.monotonic() + GRACE_S
        if news.si_code != _FROM_TERMINAL:
            with contextlib.suppress(OSError):
                os.write(giver, bytes([told]))


def enter(cluster: Cluster, host: int) -> None:
    """Make this process one of a host: its network, name and file systems, and /proc of its own PID namespace.

    Raises ClusterError, OSError.
    """
    here = os.getcwd()
    for descriptor, kind in zip(keeper.namespaces(cluster, host), keeper.HOST_NAMESPACES.values(), strict=True):
        kernel.setns(descriptor, kind)
        os.close(descriptor)
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir(here)


# -- the session's first process -----------------------------------------------------------------------


def _be_first(cluster: Cluster, commands: Sequence[Command], orders: int) -> NoReturn:
    # Not by Python's way out: it would run the exit handlers of the process that this is a copy of.
    try:
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
        code = _First(cluster, orders).run(commands)
    except (ClusterError, OSError) as error:
        print(f"virtual_cluster: {error}", file=sys.stderr)
        code = 2
    finally:
        sys.stderr.flush()
    os._exit(code)


class _First:
    def __init__(self, cluster: Cluster, orders: int) -> None:
        self._cluster = cluster
        self._orders = orders
        self._keeper = keeper.connect(cluster)
        self._keeper.send(json.dumps({"op": "session"}).encode())
        self._keeper.recv(keeper.LONGEST)
        self._children, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(self._children, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def run(self, commands: Sequence[Command]) -> int:
        running = {self._start(command) for command in commands}
        poll = select.poll()
        for descriptor in (self._orders, self._keeper.fileno(), self._children):
            poll.register(descriptor, select.POLLIN)
        code, deadline = 0, None
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = {descriptor for descriptor, _ in poll.poll(left)}
            if not ready:
                break
            if self._keeper.fileno() in ready:
                raise ClusterError(f"{self._cluster.name} went down")
            if self._orders in ready and not self._pass_on(running):
                break
            for pid, status in self._reap():
                if pid in running:
                    running.discard(pid)
                    ended = os.waitstatus_to_exitcode(status)
                    if ended and not code:
                        code = 128 - ended if ended < 0 else ended
                        deadline = time.monotonic() + GRACE_S
        return code

    def _pass_on(self, running: set[int]) -> bool:
        numbers = os.read(self._orders, 16)
        for number in numbers:
            for pid in running:
                os.kill(pid, number)
        return bool(numbers)

    def _reap(self) -> list[tuple[int, int]]:
        """Every child that ended, orphans of the session among them."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._children, 4096)
        ended = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended.append((pid, status))
        return ended

    def _start(self, command: Command) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (*_PASSED_ON, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            enter(self._cluster, command.host)
            if not command.reads_input:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvpe(command.argv[0], list(command.argv), dict(command.environment))
        except (ClusterError, OSError) as error:
            print(f"virtual_cluster: {command.argv[0]}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(2)
