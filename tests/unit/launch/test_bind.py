"""Which processors ranks are bound to, on machines that are made of files, and really."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.launch.bind import (
    CORES,
    BindError,
    assign,
    parse_processors,
    short,
    to_environment,
    why_not_bound,
)


def machine(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for node, processors in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    for processor, threads in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(threads + "\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Four cores of two threads each, two on each node: 0 and 4 are one core, 1 and 5, ..."""
    threads = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}
    return machine(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}, threads)


def test_every_rank_gets_a_core_before_any_shares_one(two_sockets: Path) -> None:
    assert assign("core", 4, range(8), two_sockets) == ((0,), (1,), (2,), (3,))
    assert assign("core", 6, range(8), two_sockets) == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert assign("core", 3, {1, 3, 5, 6}, two_sockets) == ((1,), (3,), (5,))
    assert assign("none", 4, range(8), two_sockets) == ()


def test_neighbouring_ranks_share_a_numa_node(two_sockets: Path) -> None:
    first, second = (0, 1, 4, 5), (2, 3, 6, 7)
    assert assign("numa", 4, range(8), two_sockets) == (first, first, second, second)
    assert assign("numa", 3, range(8), two_sockets) == (first, first, second)
    assert assign("numa", 1, range(8), two_sockets) == (first,)
    assert assign("numa", 2, {4, 5}, two_sockets) == ((4, 5), (4, 5))  # the other node is not ours


def test_a_machine_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert assign("numa", 2, {0, 1, 2}, tmp_path) == ((0, 1, 2), (0, 1, 2))
    assert assign("core", 2, {3, 5}, tmp_path) == ((3,), (5,))


def test_too_few_processors(two_sockets: Path) -> None:
    line = r"^--bind core needs a core for each of 3 ranks and this command may use 2: ask for fewer ranks, or for --bi"
    with pytest.raises(BindError, match=line):
        assign("core", 3, {0, 4}, two_sockets)
    assert len(assign("numa", 3, {0, 4}, two_sockets)) == 3


@given(st.sets(st.integers(0, 200), min_size=1))
def test_sets_of_processors_are_written_as_the_kernel_does(numbers: set[int]) -> None:
    assert parse_processors(short(numbers)) == tuple(sorted(numbers))


def test_how_they_are_written() -> None:
    assert (short([3, 0, 1, 2, 8]), short([5]), short([])) == ("0-3,8", "5", "")
    assert to_environment(((0, 4), (1, 5))) == {CORES: "0,4;1,5"}
    assert to_environment(()) == {}


def test_a_rank_that_runs_elsewhere_is_named() -> None:
    assert why_not_bound(((0,), (1,)), ([0], [1])) is None
    assert why_not_bound((), ([0, 1], [0, 1])) is None
    assert why_not_bound(((0,), (1,)), ([0], [0, 1])) == ("rank 1 was to be bound to processors 1 and may run on 0-1")


def test_a_process_is_really_bound() -> None:
    last = max(os.sched_getaffinity(0))
    program = (
        "import json, os, threading\nfrom commbench.launch.bind import bind_rank\n"
        f"bind_rank(1, '0;{last}')\nseen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))\n"
        "thread.start(); thread.join()\nprint(json.dumps([sorted(os.sched_getaffinity(0)), *seen]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [[last], [last]]
    nowhere = subprocess.run(
        [sys.executable, "-c", "from commbench.launch.bind import bind_rank; bind_rank(0, '99999')"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "BindError: rank 0 cannot be bound to processor 99999 (Invalid argument)" in nowhere.stderr
