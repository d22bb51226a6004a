"""The ranks that arrived must be one world."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

import commbench.launch.verify as verification
from commbench.launch.place import Place, WorldError
from commbench.launch.verify import verify


def hello(rank: int, **changes: Any) -> dict[str, Any]:
    versions = {"commbench": "0.1.0", "torch": "2.13.0", "mpi4py": "4.1.2", "numpy": "2.4.6"}
    said = {
        "rank": rank, "world": 4, "local_rank": rank % 2, "launcher": "openmpi", "host": f"n{rank // 2}",
        "pid": rank, "versions": versions, "cores": [0, 1],
    }  # fmt: skip
    return {**said, **changes}


def test_a_sound_world() -> None:
    assert verify([hello(rank) for rank in range(4)], nodes=2).hosts == ("n0", "n0", "n1", "n1")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"world": 64}, "world size differs: 4 on rank 0 (n0), 64 on rank 3 (n1): use the same environment"),
        ({"launcher": "slurm"}, "launcher differs: openmpi on rank 0 (n0), slurm on rank 3 (n1)"),
        (
            {"versions": {"commbench": "0.2.0", "torch": "2.13.0", "mpi4py": "4.1.2", "numpy": "2.4.6"}},
            "commbench version differs: 0.1.0 on rank 0 (n0), 0.2.0 on rank 3 (n1)",
        ),
        ({"versions": {"commbench": "0.1.0"}}, "torch version differs: 2.13.0 on rank 0 (n0), missing on rank 3 (n1)"),
        ({"local_rank": 0}, "ranks 2 and 3 both say they are local rank 0 on n1"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(WorldError) as caught:
        verify([*(hello(rank) for rank in range(3)), hello(3, **changes)])
    assert str(caught.value).startswith(line)
    assert caught.value.code == 3


def test_fewer_hosts_than_asked_for() -> None:
    with pytest.raises(WorldError, match=r"^3 hosts were asked for and the ranks are on 2 \(n0, n1\)"):
        verify([hello(rank) for rank in range(4)], nodes=3)


def test_versions_are_those_that_are_installed() -> None:
    place = Place(rank=0, world=1, local_rank=0, local_world=1, launcher="commbench")
    versions = verification.hello(place)["versions"]
    assert {name: importlib.metadata.version(name) for name in versions} == versions
