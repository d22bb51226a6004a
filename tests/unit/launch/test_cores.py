"""Whether ranks may spin: each needs a core of its own, and hosts may share a machine's."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from commbench.launch.place import Place
from commbench.launch.runner import _cores_for_all
from commbench.launch.verify import hello


def said(host: str, cores: list[int], machine: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"host": host, "cores": cores}
    return found if machine is None else {**found, "machine": machine}


@pytest.mark.parametrize(
    ("ranks", "spin"),
    [
        ([("a", [0, 1], "m")] * 2, True),
        ([("a", [0, 1], "m")] * 3, False),
        ([("a", [0], "m"), ("a", [1], "m"), ("a", [2], "m")], True),  # bound, each to another
        # Two machines have cores each, two namespaces of one machine do not.
        ([("a", [0, 1], "m")] * 2 + [("b", [0, 1], "n")] * 2, True),
        ([("a", [0, 1], "m")] * 2 + [("b", [0, 1], "m")] * 2, False),
        ([("a", [0, 1], "m"), ("b", [0, 1], "m")], True),
        ([("a", [0, 1], None)] * 2 + [("b", [0, 1], None)] * 2, True),
    ],
)
def test_cores_are_a_machines(ranks: list[tuple[str, list[int], str | None]], spin: bool) -> None:
    assert _cores_for_all([said(*rank) for rank in ranks]) is spin


def test_ranks_of_one_machine_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(rank: int) -> str:
        return str(hello(Place(rank=rank, world=2, local_rank=rank, local_world=2, launcher="commbench"))["machine"])

    here = machine(0)
    assert here
    monkeypatch.setattr(socket, "gethostname", lambda: "another-namespace")
    assert machine(1) == here
