"""Compiles sources that come with commbench, when they are first used, into the user's cache.

What was built is found again by a digest of the source, the command, the compiler's own words on its version, the kind
of machine and whatever else the caller says that it depends on. A file is complete when it has its name, so whoever
builds the same thing at once, from another host too, does not disturb; but let one rank of a host build for all.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from commbench.provenance.sources import CommandFailed, command

SOURCES = Path(__file__).resolve().parent.parent / "_kernels"
BUILD_S = 60.0
ANSWER_S = 10.0  # for a compiler to say which one it is


class BuildError(RuntimeError):
    """Why there is nothing to load, in one line."""


def find(source: str, compiler: Sequence[str], *, of: Sequence[str] = ()) -> Path | None:
    """The library that ``build`` would give, where it is there already. Raises BuildError."""
    target = _target(source, compiler, of)
    return target if _is_ours(target) else None


def build(source: str, compiler: Sequence[str], *, of: Sequence[str] = ()) -> Path:
    """The shared library that ``compiler`` (a command and its options) makes of a source below ``kernels/``.

    ``of``: what else the result is good for alone, such as the version of the library that it calls. Takes BUILD_S
    seconds at most. Raises BuildError.
    """
    target = _target(source, compiler, of)
    if not _is_ours(target):
        _compile(SOURCES / source, compiler, target)
    return target


def cache_folder() -> Path:
    """The user's own folder for what is built, which nobody else may look into. Raises BuildError."""
    try:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # One that is not absolute is to be ignored, says the XDG Base Directory Specification.
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "commbench" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"no cache: {error}") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise BuildError(f"no cache at {folder}: {error.strerror}") from None
    # What lies there is loaded into this process.
    if found.st_uid != os.geteuid():
        raise BuildError(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of yours")
    if not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
        raise BuildError(f"{folder} is not a folder that is yours alone: delete it, or chmod 700")
    return folder


def _target(source: str, compiler: Sequence[str], of: Sequence[str]) -> Path:
    try:
        text = (SOURCES / source).read_bytes()
    except OSError as error:
        raise BuildError(f"{source} did not come with this installation: {error.strerror}") from None
    key = hashlib.sha256(text)
    # Hosts of several kinds may share the cache.
    machine = (platform.machine(), os.confstr("CS_GNU_LIBC_VERSION") or "")
    for part in (*compiler, _version_of(compiler[0]), *machine, *of):
        key.update(b"\0" + part.encode())
    return cache_folder() / f"{Path(source).stem}-{key.hexdigest()[:24]}.so"


def _is_ours(file: Path) -> bool:
    try:
        found = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


@lru_cache
def _version_of(compiler: str) -> str:
    try:
        return command([compiler, "--version"], timeout_s=ANSWER_S)
    except CommandFailed as error:
        raise BuildError(f"{compiler} does not run: {_telling(error.errors)}") from None
    except OSError as error:  # TimeoutError is one
        raise BuildError(f"{compiler} does not run: {error}") from None


def _compile(source: Path, compiler: Sequence[str], target: Path) -> None:
    try:
        work = Path(tempfile.mkdtemp(prefix=f"{target.stem}-", dir=target.parent))
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written to: {error.strerror}") from None
    try:
        made = work / target.name
        command([*compiler, "-o", str(made), str(source)], timeout_s=BUILD_S)
        made.chmod(0o700)
        # Another host may have loaded what is there by now: over NFS, its memory would go with the file.
        if not _is_ours(target):
            os.rename(made, target)
    except CommandFailed as error:
        raise BuildError(f"{compiler[0]} could not compile {source.name}: {_telling(error.errors)}") from None
    except OSError as error:  # TimeoutError is one
        raise BuildError(f"{source.name} could not be compiled: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _telling(errors: str) -> str:
    """The first line that speaks of an error, else the first paragraph, of what a compiler wrote."""
    lines = [line.strip().strip("-") for line in errors.strip().splitlines()]
    found = next((line for line in lines if "error" in line.lower()), None)
    if found is None:
        paragraphs = "\n".join(lines).strip().split("\n\n")
        found = " ".join(paragraphs[0].split()) or "no message"
    return found[:200]
