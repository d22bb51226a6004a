"""Forks ranks from a process that has loaded torch, which takes a rank of its own two seconds of a core.

The program of the fixture ``forked_ranks``. On the socket that it is given, one request a datagram: what to start, its
environment and the file for its words, answered by a pid; or the pid of one it has started, answered by its exit code,
None while it runs. It ends with the socket.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback

import torch
import torch.distributed


def become_rank(environment: dict[str, str], words: int) -> None:
    """As if Python had been started with this environment, for ``-m commbench.worker``."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, words, words)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment, COMMBENCH_PARENT=str(os.getppid()))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    code = importlib.import_module("commbench.worker").main()
    sys.stderr.flush()
    os._exit(code)


def start(environment: dict[str, str], words: int) -> int:
    pid = os.fork()
    if pid:
        os.close(words)
        return pid
    try:
        become_rank(environment, words)
    except BaseException:  # noqa: BLE001  nothing may return to the loop that answers requests
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def serve(requests: socket.socket) -> None:
    codes: dict[int, int] = {}
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 18, 1)
        if not message:
            return
        asked = json.loads(message)
        if files:
            answer: int | None = start(asked, files[0])
        else:
            if asked not in codes:
                pid, status = os.waitpid(asked, os.WNOHANG)
                if pid:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            answer = codes.get(asked)
        requests.send(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
