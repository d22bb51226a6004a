"""What is compiled on first use: found again, rebuilt when it must be, and refused in one line where it cannot be had."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from commbench.backends import build as module
from commbench.backends.build import BuildError, build, cache_folder

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc: apt-get install gcc libc6-dev")
CC = ("cc", "-O1", "-fPIC", "-shared")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of our own, and a cache of our own."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "seven.c").write_text("int seven(void) { return 7; }\n")
    monkeypatch.setattr(module, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def compiler(tmp_path: Path, body: str) -> str:
    """A program that is called as a compiler."""
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo one; exit 0; }}\n{body}\n')
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_it_is_built_once_and_found_again(sources: Path) -> None:
    path = build("seven.c", CC)
    assert ctypes.CDLL(str(path)).seven() == 7
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    made = path.stat().st_mtime_ns
    assert build("seven.c", CC) == path
    assert path.stat().st_mtime_ns == made
    assert [one.suffix for one in sorted(path.parent.iterdir())] == [".lock", ".so"]


@needs_compiler
def test_what_it_depends_on_is_in_its_name(sources: Path) -> None:
    names = {build("seven.c", CC), build("seven.c", (*CC, "-g")), build("seven.c", CC, of=("another MPI",))}
    (sources / "seven.c").write_text("int seven(void) { return 8; }\n")
    names.add(build("seven.c", CC))
    assert len(names) == 4


def test_of_many_that_want_it_at_once_one_builds(sources: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    slow = compiler(tmp_path, f'echo x >> {count}; sleep 0.3; shift; touch "$1"')
    threads = [threading.Thread(target=build, args=("seven.c", (slow,))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "x\n"


def test_a_compiler_that_fails_is_told_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    bad = compiler(tmp_path, "echo 'seven.c:1: no such thing' >&2; exit 1")
    with pytest.raises(BuildError, match=r"seven\.c could not be compiled: .*no such thing"):
        build("seven.c", (bad,))
    assert not [one for one in cache_folder().iterdir() if one.suffix != ".lock"]


def test_a_compiler_that_hangs_is_ended(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUILD_S", 0.5)
    with pytest.raises(BuildError, match=r"did not end within 0\.5 s"):
        build("seven.c", (compiler(tmp_path, "sleep 20"),))


@pytest.mark.parametrize(
    ("source", "command", "told"),
    [("eight.c", CC, "did not come with this installation"), ("seven.c", ("/nowhere/cc",), "/nowhere/cc does not run")],
)
def test_what_is_not_there_is_one_line(sources: Path, source: str, command: tuple[str, ...], told: str) -> None:
    with pytest.raises(BuildError, match=told):
        build(source, command)


def test_the_cache_is_the_users_alone(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "commbench" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(BuildError, match="belongs to another user: set XDG_CACHE_HOME"):
        cache_folder()
