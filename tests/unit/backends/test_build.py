"""What is compiled on first use: found again, rebuilt when it must be, and refused in one line where it cannot be had."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from commbench.backends import build as module
from commbench.backends.build import BuildError, build, cache_folder, find

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
    """A program that is called as a compiler: ``$out`` is where its library shall be."""
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo one; exit 0; }}\nout=$2\n{body}\n')
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_it_is_built_once_and_found_again(sources: Path) -> None:
    assert find("seven.c", CC) is None
    path = build("seven.c", CC)
    assert ctypes.CDLL(str(path)).seven() == 7
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o700)
    made = path.stat().st_ino
    assert build("seven.c", CC) == find("seven.c", CC) == path
    assert path.stat().st_ino == made
    assert list(path.parent.iterdir()) == [path]


@needs_compiler
def test_what_it_depends_on_is_in_its_name(sources: Path) -> None:
    names = {build("seven.c", CC), build("seven.c", (*CC, "-g")), build("seven.c", CC, of=("another MPI",))}
    (sources / "seven.c").write_text("int seven(void) { return 8; }\n")
    names.add(build("seven.c", CC))
    assert len(names) == 4


def test_whoever_comes_second_leaves_the_first_ones_file(sources: Path, tmp_path: Path) -> None:
    """Two hosts that share the cache build at once: what one has loaded must not be taken from under it."""
    meeting = tmp_path / "meeting"
    slow = compiler(
        tmp_path, f'echo $$ > "$out"; echo x >> {meeting}; while [ $(wc -l < {meeting}) -lt 3 ]; do sleep 0.02; done'
    )
    threads = [threading.Thread(target=build, args=("seven.c", (slow,))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not meeting.exists() or len(meeting.read_text().splitlines()) < 2:
        time.sleep(0.01)
    assert find("seven.c", (slow,)) is None  # not before it is whole
    before = cache_folder() / "first"
    target = _target_of("seven.c", (slow,))
    before.write_text("loaded by the other host")
    before.rename(target)
    with meeting.open("a") as file:
        file.write("x\n")
    for thread in threads:
        thread.join()
    assert target.read_text() == "loaded by the other host"
    assert list(target.parent.iterdir()) == [target]


def _target_of(source: str, command: tuple[str, ...]) -> Path:
    return module._target(source, command, ())


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("seven.c:1:10: fatal error: mpi.h: No such file or directory\n 1 | #include <mpi.h>\ncompilation terminated.",
         "fatal error: mpi.h: No such file or directory"),
        ("-----\nThe wrapper was unable to find\ncc in your PATH.\n\nNote that this was\n-----",
         "The wrapper was unable to find cc in your PATH."),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_told_and_leaves_nothing(sources: Path, tmp_path: Path, says: str, told: str) -> None:
    bad = compiler(tmp_path, f"cat >&2 <<'END'\n{says}\nEND\nexit 1")
    with pytest.raises(BuildError) as failure:
        build("seven.c", (bad,))
    assert str(failure.value).startswith(f"{bad} could not compile seven.c: ")
    assert str(failure.value).endswith(told)
    assert list(cache_folder().iterdir()) == []


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


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_cache_that_others_may_open_is_refused(sources: Path, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache" / "commbench" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(BuildError, match="not a folder that is yours alone: delete it, or chmod 700"):
        cache_folder()
    folder.chmod(0o700)
    assert cache_folder() == folder


def test_a_link_is_not_followed(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache" / "commbench").mkdir(parents=True)
    (tmp_path / "cache" / "commbench" / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match="not a folder that is yours alone"):
        cache_folder()


def test_what_belongs_to_another_is_not_used(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = cache_folder().stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(BuildError, match="belongs to another user: set XDG_CACHE_HOME"):
        cache_folder()


def test_a_cache_home_that_is_not_absolute_is_ignored(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "commbench" / "kernels"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_to(sources: Path, tmp_path: Path) -> None:
    cache_folder().chmod(0o500)
    with pytest.raises(BuildError, match="cannot be written to"):
        build("seven.c", (compiler(tmp_path, 'touch "$out"'),))
