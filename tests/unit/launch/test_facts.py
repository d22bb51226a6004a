"""Facts of a launch, from files of a made-up machine and from this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from commbench.cases import Layout
from commbench.launch.facts import flatten, gather_disturbances, host_facts, rank_facts, see_settings
from commbench.launch.place import LaunchError


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_rank_says_where_it_is(tmp_path: Path) -> None:
    # proc_pid_stat(5): 52 fields, of which the 39th is the processor. The name may hold spaces and brackets.
    fields = [str(number) for number in range(1, 53)]
    fields[1], fields[2], fields[38] = "(a) b (c d)", "R", "5"
    write(tmp_path, "proc/self/stat", " ".join(fields))
    write(tmp_path, "sys/devices/system/cpu/cpu5/cpufreq/scaling_cur_freq", "2600000\n")
    (tmp_path / "sys/devices/system/cpu/cpu5/node1").mkdir()
    found = rank_facts(tmp_path)
    assert {name: found[name] for name in found if name != "cores"} == {
        "core": 5, "numa_node": 1, "frequency_Hz": 2_600_000_000
    }  # fmt: skip
    assert rank_facts(tmp_path / "nothing") == {"cores": found["cores"]}


def test_this_rank_is_on_a_core_that_it_may_use() -> None:
    assert rank_facts()["core"] in os.sched_getaffinity(0)


def test_a_host_says_how_busy_it_is(tmp_path: Path) -> None:
    write(tmp_path, "proc/loadavg", "1.25 0.50 0.25 3/400 12345\n")
    write(tmp_path, "proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    assert host_facts(tmp_path) == {
        "load1": 1.25, "available_bytes": 1_024_000, "transparent_hugepages": "madvise"
    }  # fmt: skip
    assert set(host_facts(tmp_path / "nothing").values()) == {None}


def test_all_of_it_in_flat_names() -> None:
    layout = Layout(hosts=("a", "a", "b"))
    ranks = [{"cores": "0-1", "core": 0, "numa_node": 0}, {"cores": "0-1", "core": 0, "numa_node": 0},
             {"cores": "0", "core": 0}]  # fmt: skip
    hosts = [{"load1": 1.0, "available_bytes": 10, "transparent_hugepages": "never"},
             {"load1": 2.5, "available_bytes": None, "transparent_hugepages": "always"}]  # fmt: skip
    assert flatten(ranks, hosts, layout, "_end") == {
        "rank0.cores_end": "0-1", "rank0.core_end": 0, "rank0.numa_node_end": 0, "rank1.cores_end": "0-1",
        "rank1.core_end": 0, "rank1.numa_node_end": 0, "rank2.cores_end": "0", "rank2.core_end": 0,
        "distinct_cores_end": 2, "distinct_numa_nodes_end": 1, "load1_end": 2.5, "available_bytes_end": 10,
        "transparent_hugepages_end": "always, never",
    }  # fmt: skip
    assert flatten([], [], layout) == {}


class Everyone:
    """Of a client its gather, at rank 0: what the other ranks would say is given."""

    rank = 0

    def __init__(self, *others: Any) -> None:
        self._others = others

    def gather(self, value: Any) -> list[tuple[Any, bytes]]:
        return [(one, b"") for one in (value, *self._others)]


def test_disturbances_of_all_ranks_together() -> None:
    everyone: Any = Everyone({"preemptions": 3}, {"preemptions": 4, "steal_s": 1e6})
    found = gather_disturbances(everyone, {"preemptions": 0, "steal_s": 0.0})
    assert found["steal_s"] == 1e6  # the other host lost more than this one ever did
    assert found["preemptions"] >= 7
    nobody: Any = Everyone({}, {"preemptions": None})
    assert gather_disturbances(nobody, {}) == {"steal_s": None, "preemptions": None, "tainted": [None] * 3}


def test_each_rank_says_what_tainted_its_own_times() -> None:
    everyone: Any = Everyone({"preemptions": 3}, {"tainted": "power cap"})
    assert gather_disturbances(everyone, {}, "PCIe x8 instead of x16")["tainted"] == [
        "PCIe x8 instead of x16", None, "power cap"
    ]  # fmt: skip


def test_a_rank_that_does_not_see_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    everyone: Any = Everyone([], [])
    see_settings(everyone, {"NCCL_ALGO": "Ring"}, "ring")
    with pytest.raises(LaunchError, match="^rank 0 does not see what variant 'tree' sets NCCL_ALGO to: the launcher d"):
        see_settings(everyone, {"NCCL_ALGO": "Tree"}, "tree")
    someone: Any = Everyone([], ["NCCL_PROTO"])
    with pytest.raises(LaunchError, match="^rank 2 does not see what variant 'a' sets NCCL_PROTO to"):
        see_settings(someone, {}, "a")
