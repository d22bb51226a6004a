"""How ranks come to the same loop, and what the library's records do. MPI is loaded here, but not started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

try:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as problem:
    pytest.skip(f"no MPI library: {problem}", allow_module_level=True)

from commbench.backends import mpi_loop as module
from commbench.backends.base import Context
from commbench.backends.build import BuildError, build
from commbench.backends.mpi_loop import Copy, Makers, MpiCompiled, Programs, load, makers_in_use

HOSTS = ("a", "a", "b", "b")
Act = Callable[[str], Any]


class World:
    """Ranks as threads that agree as they do over the control plane; ``did`` is what each host's compiler was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, find: Act, build: Act, load: Act = Path) -> None:
        self.did: list[tuple[str, int]] = []
        self.expected: list[str] = []
        self._slots: list[Any] = [None] * len(HOSTS)
        self._barrier = threading.Barrier(len(HOSTS), timeout=20)
        self._rank = threading.local()
        monkeypatch.setattr(module, "makers_in_use", lambda: Makers(("cc",), ()))
        monkeypatch.setattr(module, "find", lambda *_, of: self._do("find", find))
        monkeypatch.setattr(module, "build", lambda *_, of: self._do("build", build))
        monkeypatch.setattr(module, "MpiCompiled", lambda path: self._do(f"load {path}", load))

    def _do(self, what: str, act: Act) -> Any:
        self.did.append((what, self._rank.value))
        return act(HOSTS[self._rank.value])

    def _agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        self._slots[self._rank.value] = value
        self._barrier.wait()
        found = decide(list(self._slots))
        self._barrier.wait()
        return found

    def _one(self, rank: int, ends: list[str]) -> None:
        self._rank.value = rank
        context = Context(
            rank=rank, world=len(HOSTS), local_rank=rank % 2, hosts=HOSTS, address="", interface="",
            share=lambda value: value, agree=self._agree, expect=lambda seconds, doing: self.expected.append(doing),
        )  # fmt: skip
        try:
            load(context)
            ends[rank] = "loaded"
        except BuildError as error:
            ends[rank] = str(error)

    def run(self) -> list[str]:
        """What ``load`` ends with on every rank."""
        ends = [""] * len(HOSTS)
        threads = [threading.Thread(target=self._one, args=(rank, ends)) for rank in range(len(HOSTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return ends


def refuse(reason: str, on: str) -> Act:
    def act(host: str) -> Path:
        if host == on:
            raise BuildError(reason)
        return Path(f"/{host}.so")

    return act


def path_of(host: str) -> Path:
    return Path(f"/{host}.so")


def test_the_first_rank_of_each_host_builds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, find=lambda host: None, build=path_of)
    assert world.run() == ["loaded"] * 4
    assert sorted(world.did) == [
        ("build", 0), ("build", 2), ("find", 0), ("find", 2),
        ("load /a.so", 0), ("load /a.so", 1), ("load /b.so", 2), ("load /b.so", 3),
    ]  # fmt: skip
    # It may take its time.
    assert set(world.expected) == {"compiling mpi_loop.c"}


def test_only_a_host_that_has_none_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, find=lambda host: path_of(host) if host == "a" else None, build=path_of)
    assert world.run() == ["loaded"] * 4
    assert [rank for what, rank in world.did if what == "build"] == [2]


def test_nothing_is_waited_for_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, find=path_of, build=path_of)
    assert world.run() == ["loaded"] * 4
    assert world.expected == []


def test_where_one_host_cannot_build_no_rank_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, find=lambda host: None, build=refuse("no cc", on="b"))
    assert world.run() == ["no cc (on b)"] * 4
    assert not [what for what, _ in world.did if what.startswith("load")]


def test_where_one_rank_cannot_load_it_no_rank_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, find=path_of, build=path_of, load=refuse("another MPI", on="b"))
    assert world.run() == ["another MPI (on b)"] * 4


def test_a_rank_that_is_told_not_to_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_COMPILED", "0")
    world = World(monkeypatch, find=path_of, build=path_of)
    assert world.run() == ["COMMBENCH_COMPILED is 0 (on a)"] * 4
    assert world.did == []


@pytest.mark.parametrize(
    ("flags", "belongs"),
    [("-L{0}/lib -lmpi", True), ("-L{0}/lib/../lib -lmpi", True), ('-I{0}/include "-L{0}/lib" -lmpi', True),
     ("-L{0}/other -lmpi", False), ("-L{0}/nowhere -lmpi", False), ("-lmpi", False)],
)  # fmt: skip
def test_an_mpicc_belongs_to_the_library_that_it_links_with(tmp_path: Path, flags: str, belongs: bool) -> None:
    for folder in ("lib", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libmpi.so.40.1").write_text("")
        (tmp_path / folder / "libmpi.so").symlink_to("libmpi.so.40.1")
    shown = f"cc {flags.format(tmp_path)}"
    assert module._links_with(shown, str(tmp_path / "lib" / "libmpi.so")) == belongs


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> MpiCompiled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            makers = makers_in_use()
            return MpiCompiled(build(module.SOURCE, makers.compiler, of=makers.of))
        except BuildError as error:
            pytest.skip(str(error))


def test_stamps_are_of_the_clock_that_python_reads(library: MpiCompiled) -> None:
    before = time.perf_counter_ns()
    stamps = Programs(library, [[]]).stream(3)
    assert before <= stamps[0] <= stamps[1] <= time.perf_counter_ns()


def test_programs_take_turns_and_go_on_where_they_stopped(library: MpiCompiled) -> None:
    source = np.arange(4, dtype=np.uint8)
    targets = [np.zeros(1, dtype=np.uint8) for _ in range(3)]
    programs = Programs(library, [[Copy(target=target, source=source[i : i + 1])] for i, target in enumerate(targets)])
    source += 10
    programs.repeat(2)
    assert [int(target[0]) for target in targets] == [10, 11, 0]
    source += 10
    programs.repeat(2)
    assert [int(target[0]) for target in targets] == [20, 11, 22]


def test_a_program_is_carried_out_in_order(library: MpiCompiled) -> None:
    a, b, c = (np.full(1000, value, dtype=np.uint8) for value in (1, 2, 3))
    Programs(library, [[Copy(target=b, source=a), Copy(target=c, source=b)]]).repeat(1)
    assert c.tolist() == [1] * 1000


def test_each_isolated_iteration_waits_for_its_start_and_notes_itself(library: MpiCompiled) -> None:
    for spin in (True, False):
        starts = time.perf_counter_ns() + np.array([1_000_000, 1_500_000, 0], dtype=np.int64)
        noted = np.zeros(1, dtype=np.int64)
        seen = [np.zeros(8, dtype=np.uint8) for _ in range(3)]
        # Each operation copies what is noted while it runs.
        programs = Programs(library, [[Copy(target=one, source=noted.view(np.uint8))] for one in seen])
        stamps = programs.isolate(3, 40, starts, spin, None, noted.ctypes.data)
        assert [int(one.view(np.int64)[0]) for one in seen] == [40, 41, 42]
        assert (stamps[:, 0] >= starts).all()
        assert (stamps[:, 1] >= stamps[:, 0]).all()
        assert (np.diff(stamps.reshape(-1)) >= 0).all()


def test_handles_of_another_size_are_refused(library: MpiCompiled, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(library._library._name)
    monkeypatch.setattr(MPI, "_sizeof", lambda kind: 4)
    if MPI.get_vendor()[0] != "Open MPI":
        pytest.skip("handles are integers of 4 bytes here")
    with pytest.raises(BuildError, match="handles have other sizes"):
        MpiCompiled(path)


def test_another_mpi_is_refused(library: MpiCompiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPI, "Get_library_version", lambda: "MPICH Version: 1.0")
    with pytest.raises(BuildError, match="belongs to another MPI"):
        MpiCompiled(Path(library._library._name))
