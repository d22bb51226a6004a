"""What is known of NCCL besides its calls: its tuner's estimate, what it is told, and what its log says, in one process.

GRAPHS are what a communicator of two GPUs leaves; the expected times are worked out in the comments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.backends import why_not_graph
from commbench.backends.base import BackendError, Context
from commbench.backends.forcing import Chosen
from commbench.backends.nccl_account import Gpu, NcclAccount, device_number
from commbench.cases import Case
from commbench.measure.operation import Operation
from commbench.provenance import nccl_choices
from commbench.provenance.nccl_choices import NcclLogSwitch, log_reset

CHANNEL = '<channel><gpu dev="0"/><gpu dev="1"/></channel>'
GRAPHS = f"""<graphs version="1">
  <graph id="0" pattern="4" crossnic="0" nchannels="2" speedintra="40" speedinter="40" latencyinter="0" \
typeintra="NVL" typeinter="PIX" samechannels="1">{CHANNEL}{CHANNEL}</graph>
  <graph id="1" pattern="1" crossnic="0" nchannels="2" speedintra="40" speedinter="40" latencyinter="0" \
typeintra="NVL" typeinter="PIX" samechannels="1">{CHANNEL}{CHANNEL}</graph>
</graphs>
"""
LINE = "node0:17:17 [0] NCCL INFO {}: {} Bytes -> Algo {} proto {} channel{{{{Lo..Hi}}}}={{{{0..{}}}}}\n"
VERSION = 22707


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without variables of NCCL's; those that are set here are undone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_COLLNET_ENABLE", "NCCL_GRAPH_DUMP_FILE", "NCCL_DEBUG",
                 "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_MULTI_RANK_GPU_ENABLE"):  # fmt: skip
        monkeypatch.setenv(name, "")  # so that what is set in between is undone
        monkeypatch.delenv(name)


def case(**fields: Any) -> Case:
    base: dict[str, Any] = {
        "collective": "all_reduce", "backend": "nccl", "bytes": 4096, "requested_bytes": 4096, "ranks": 2, "nodes": 1
    }  # fmt: skip
    return Case(**{**base, **fields})


def context(
    rank: int = 0, *, uuids: tuple[str, str] = ("u0", "u1"), resets: tuple[bool, bool] | None = None
) -> Context:
    def agree(value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        if isinstance(value, bool):
            return decide(list(resets or (value, value)))
        return decide([[[uuid, 9, 0], ["x86_64", "intel"]] for uuid in uuids])

    return Context(
        rank=rank, world=2, local_rank=rank, hosts=("a", "a"), address="127.0.0.1", interface="lo",
        share=lambda value: value, agree=agree,
    )  # fmt: skip


def account(version: int = VERSION, forced: Mapping[str, str] | None = None) -> NcclAccount:
    made = NcclAccount(version, forced or {})
    made.compare(context(), Gpu("u0", 9, 0))
    return made


def with_graphs(graphs: str, version: int = VERSION) -> tuple[float | None, str | None]:
    """The estimate of an all_reduce of 4096 B, and what the settings say of the graphs."""
    made = account(version)
    if graphs:
        Path(os.environ["NCCL_GRAPH_DUMP_FILE"]).write_text(graphs)
    found = made.estimate(case(), (0, 1)), made.settings().get("nccl graphs")
    made.close()
    return found


def test_only_a_device_launches_graphs() -> None:
    assert why_not_graph(case(execution="graph")) is None
    assert why_not_graph(case(backend="mpi")) is None
    assert why_not_graph(case(backend="mpi", algorithm="own:ring", execution="graph")) == (
        "mpi works on the host, and only a device launches graphs"
    )


# -- the estimate ----------------------------------------------------------------------------------


def test_the_estimate_is_of_what_the_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    # By ring and LL: 6.6 us and 0.6 for each of two steps; half of two channels' 40 GB/s.
    assert with_graphs(GRAPHS) == (pytest.approx(7.8e-6 + 4096 / 40e9), None)
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    # Tree: 8.4 us and twice 4 for one hop; bandwidth is half of 0.92 of the channels' sum, and 0.9 of that at 4 KiB.
    assert with_graphs(GRAPHS)[0] == pytest.approx(8.4e-6 + 2 * 4e-6 + 4096 / (0.92 * 80e9 / 2 * 0.9))


@pytest.mark.parametrize(
    ("graphs", "version", "variables", "says"),
    [
        (GRAPHS, 23101, {}, None),
        (GRAPHS, VERSION, {"NCCL_ALGO": "Rnig"}, None),
        ("", VERSION, {}, "not written"),
        ("<graphs>", VERSION, {}, "not readable: not XML"),
        (GRAPHS.replace('id="1"', 'id="4"'), VERSION, {}, "the graphs lack a ring or a tree"),
        (GRAPHS, VERSION, {"NCCL_COLLNET_ENABLE": "1"}, "do not tell whether NCCL_COLLNET_ENABLE is in effect"),
    ],
)
def test_there_is_no_estimate_of_what_is_not_known(
    monkeypatch: pytest.MonkeyPatch, graphs: str, version: int, variables: dict[str, str], says: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    estimate, note = with_graphs(graphs, version)
    assert estimate is None
    assert note is None if says is None else (note or "").startswith(says)


def test_a_file_that_the_user_names_is_read_and_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_GRAPH_DUMP_FILE", str(tmp_path / "graphs.xml"))
    made = account()
    (tmp_path / "graphs.xml").write_text(GRAPHS)
    assert made.estimate(case(), (0, 1)) == pytest.approx(7.8e-6 + 4096 / 40e9)
    assert made.settings()["NCCL_GRAPH_DUMP_FILE"] == str(tmp_path / "graphs.xml")
    made.close()
    assert (tmp_path / "graphs.xml").read_text() == GRAPHS


# -- devices ---------------------------------------------------------------------------------------


def test_a_shared_gpu_is_refused_unless_nccl_can_and_the_user_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(version: int) -> str | None:
        made = NcclAccount(version, {})
        made.compare(context(1, uuids=("u0", "u0")), Gpu("u0", 9, 0))
        return made.tainted()

    with pytest.raises(BackendError, match=r"^ranks 0 and 1 on a have the same GPU: start at most one rank a GPU$"):
        shares(23003)
    with pytest.raises(BackendError, match="local rank 2, but its host has 2 GPUs"):
        device_number(replace(context(1), local_rank=2), 2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert shares(23003) == "several ranks on one GPU: no timing"
    assert device_number(context(1), 1) == 0
    with pytest.raises(BackendError, match="have the same GPU"):
        shares(22907)
    assert account().tainted() is None


# -- what it is told -------------------------------------------------------------------------------


def test_before_2_24_nccl_takes_one_list_for_all() -> None:
    account(22304, {"all_reduce": "ring:ll"})
    assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("Ring", "LL")
    account(22403, {"all_gather": "pat"})
    assert os.environ["NCCL_ALGO"] == "allgather:PAT"


def test_an_old_nccl_is_not_told_what_the_barrier_before_each_operation_cannot_do() -> None:
    made = account(22304, {"all_gather": "pat"})
    assert made.why_not_forced() == "NCCL 2.23.4 would take pat for every operation, which all_reduce has not"
    assert "NCCL_ALGO" not in os.environ
    assert account(22403, {"all_gather": "pat"}).why_not_forced() is None


# -- what its log says -----------------------------------------------------------------------------


class Nccl:
    """An NCCL that reads its log's variables when it writes the first message after a reset."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.fresh = True
        self.ran: list[str] = []

    def reset(self) -> None:
        self.fresh = True

    def write(self, text: str) -> None:
        if self.fresh:
            on = os.environ.get("NCCL_DEBUG") == "INFO" and os.environ.get("NCCL_DEBUG_SUBSYS") == "TUNING"
            self.path, self.fresh = os.environ["NCCL_DEBUG_FILE"] if on else None, False
            if self.path:
                Path(self.path).write_text("")
        if self.path:
            with open(self.path, "a") as file:
                file.write(text)

    def operation(self, *lines: str) -> Operation:
        def run(how: str) -> Callable[[], None]:
            self.ran.append(how)
            for line in lines:
                self.write(line)
            return lambda: self.ran.append("launched")

        nothing = np.empty(0, dtype=np.uint8)
        return Operation(
            run=lambda: run("run"), enqueue=lambda: run("enqueued"), input=nothing, output=nothing,
            capture=lambda: run("captured"),
        )  # fmt: skip


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    library = Nccl()
    monkeypatch.setattr("commbench.backends.nccl_account.log_reset", lambda version: library.reset)
    return library


def line(function: str, size: int, algorithm: str, protocol: str, last: int) -> str:
    return LINE.format(function, size, algorithm, protocol, last).format()


def test_what_nccl_takes_is_asked_in_a_call_of_its_own(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    made = account()
    mine = nccl.operation(line("AllReduce", 1, "RING", "LL", 0), line("AllReduce", 4096, "TREE", "LL128", 15))
    nccl.write("a timed call\n")
    assert made.chosen(case(), mine) == [Chosen("tree", "ll128", 16)]
    assert made.chosen(case(execution="graph"), mine) == [Chosen("tree", "ll128", 16)]
    assert nccl.ran == ["run", "captured"]
    # Off again: what is written now goes where the user wants it, and a rank without an operation asks nothing.
    nccl.write(line("AllReduce", 4096, "NVLS", "SIMPLE", 3))
    assert nccl.path is None
    assert {name: os.environ.get(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")} == {
        "NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": None, "NCCL_DEBUG_FILE": None
    }  # fmt: skip
    assert made.chosen(case(), None) == []
    made.close()


def test_the_log_is_off_again_where_the_call_fails(nccl: Nccl) -> None:
    switch = NcclLogSwitch(os.environ, nccl.reset)

    def fail() -> None:
        raise RuntimeError("NCCL error")

    with pytest.raises(RuntimeError, match="NCCL error"):
        switch.choices(fail)
    assert "NCCL_DEBUG" not in os.environ
    assert nccl.fresh
    switch.close()


def test_one_part_of_a_gathering_is_logged_and_nothing_of_messages(nccl: Nccl) -> None:
    made = account()
    gather = case(collective="all_gather", reduce_op=None)
    assert made.chosen(gather, nccl.operation(line("AllGather", 2048, "PAT", "SIMPLE", 1))) == [
        Chosen("pat", "simple", 2)
    ]
    assert made.chosen(case(collective="all_to_all", reduce_op=None), nccl.operation()) == []


def test_where_one_rank_cannot_turn_its_log_on_none_asks(nccl: Nccl) -> None:
    made = NcclAccount(VERSION, {})
    made.compare(context(resets=(True, False)), Gpu("u0", 9, 0))
    assert made.chosen(case(), nccl.operation(line("AllReduce", 4096, "RING", "LL", 0))) is None
    assert nccl.ran == []
    # A forced algorithm is read back all the same, from the log of all calls.
    made = NcclAccount(VERSION, {"all_reduce": "ring"})
    made.compare(context(resets=(True, False)), Gpu("u0", 9, 0))
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(line("AllReduce", 4096, "RING", "LL", 0))
    assert made.chosen(case(algorithm="ring"), nccl.operation()) == [Chosen("ring", "ll", 1)]
    assert made.chosen(case(algorithm="ring"), nccl.operation()) == []
    assert nccl.ran == []


class Loaded:
    """libnccl.so.2."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, lambda: None)


def test_a_log_is_turned_on_only_where_that_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Loaded("ncclResetDebugInit")
    real = nccl_choices.ctypes.CDLL

    def load(name: Any, **options: Any) -> Any:
        return library if name == "libnccl.so.2" else real(name, **options)

    monkeypatch.setattr(nccl_choices.ctypes, "CDLL", load)
    assert log_reset(22703) is not None
    assert log_reset(22602) is None  # it would close the file while others write into it
    monkeypatch.setenv("NCCL_DEBUG", "VERSION")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/somewhere/log")
    assert log_reset(22703) is not None  # at this level there is no file
    monkeypatch.setenv("NCCL_DEBUG", "info")
    assert log_reset(22703) is None  # the user's file would begin anew
    monkeypatch.delenv("NCCL_DEBUG_FILE")
    assert log_reset(22703) is not None
    library = Loaded()
    assert log_reset(23100) is None
