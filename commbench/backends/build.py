"""Compiles sources that come with commbench, when they are first used, into the user's cache.

What was built is found again by a digest of the source, the command, the compiler's own words on its version and
whatever else the caller says that it depends on. Of the ranks of a host that want the same thing at once one builds it
and the others wait; a file is complete when it has its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from commbench.provenance.sources import command

SOURCES = Path(__file__).resolve().parent.parent / "_kernels"
BUILD_S = 60.0


class BuildError(RuntimeError):
    """Why there is nothing to load, in one line."""


def build(source: str, compiler: Sequence[str], *, of: Sequence[str] = ()) -> Path:
    """The shared library that ``compiler`` (a command and its options) makes of a source below ``kernels/``.

    ``of``: what else the result is good for alone, such as the version of the library that it calls. Raises BuildError.
    """
    try:
        text = (SOURCES / source).read_bytes()
    except OSError as error:
        raise BuildError(f"{source} did not come with this installation: {error.strerror}") from None
    folder = cache_folder()
    key = hashlib.sha256(text)
    for part in (*compiler, _version_of(compiler[0]), *of):
        key.update(b"\0" + part.encode())
    target = folder / f"{Path(source).stem}-{key.hexdigest()[:24]}.so"
    if not target.is_file():
        with _alone(target.with_suffix(".lock")):
            if not target.is_file():
                _compile(SOURCES / source, compiler, target)
    return target


def cache_folder() -> Path:
    """The user's own folder for what is built, which nobody else may write to. Raises BuildError."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "commbench" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"no cache at {folder}: {getattr(error, 'strerror', None) or error}") from None
    # What lies there is loaded into this process.
    if found.st_uid != os.geteuid():
        raise BuildError(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of yours")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time, where the file system knows locks; where it does not, the rename is enough."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BuildError(f"{lock.parent} cannot be written to: {error.strerror}") from None
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _version_of(compiler: str) -> str:
    try:
        return command([compiler, "--version"], timeout_s=BUILD_S)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        raise BuildError(f"{compiler} does not run: {error}") from None


def _compile(source: Path, compiler: Sequence[str], target: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{target.stem}-", dir=target.parent))
    try:
        made = work / target.name
        command([*compiler, "-o", str(made), str(source)], timeout_s=BUILD_S)
        made.chmod(0o700)
        os.rename(made, target)
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{source.name} could not be compiled: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
