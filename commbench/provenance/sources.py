"""What every collector is made of: small file reads, commands with a time limit, and errors that become values.

Collectors take ``root``, the directory that stands for ``/``, so that a test can give them another machine's files.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path("/")
MAX_READ = 1 << 22
_PIECE = 1 << 16
COMMAND_TIMEOUT_S = 5.0


def attempt(collector: Callable[..., Any], *arguments: Any) -> Any:
    """What the collector returns, or ``{"error": ...}``: provenance never ends a measurement."""
    try:
        return collector(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a strange machine does, it is written down
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def read(root: Path, path: str) -> str | None:
    """The stripped text of ``root``/``path`` (the first 4 MiB); None where it cannot be read or is empty.

    sysfs answers some reads with an error by design, such as the speed of a link that is down.
    """
    try:
        with (root / path).open("rb", buffering=0) as file:
            # In small pieces: the kernel allocates what a read of /proc/sys asks for, and refuses megabytes.
            pieces = itertools.islice(iter(lambda: file.read(_PIECE), b""), MAX_READ // _PIECE)
            return b"".join(pieces).decode(errors="replace").strip() or None
    except OSError:
        return None


def read_int(root: Path, path: str) -> int | None:
    """The decimal number in a file; None for no file and no number."""
    text = read(root, path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def names(root: Path, path: str) -> list[str]:
    """The entries of a directory, sorted; none where it cannot be listed."""
    try:
        return sorted(entry.name for entry in (root / path).iterdir())
    except OSError:
        return []


def link_name(root: Path, path: str) -> str | None:
    """The last part of what a symbolic link points at; None where there is none."""
    try:
        return (root / path).readlink().name
    except OSError:
        return None


def digest(text: str | None) -> str | None:
    """The first 16 hex digits of the sha256: tells machines apart without giving their identity away."""
    import hashlib

    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


class CommandFailed(RuntimeError):
    """A command that ended with another code than 0; ``errors``: all that it wrote to its standard error."""

    def __init__(self, text: str, errors: str) -> None:
        super().__init__(text)
        self.errors = errors


def command(
    argv: Sequence[str], *, timeout_s: float = COMMAND_TIMEOUT_S, environ: Mapping[str, str] | None = None
) -> str:
    """Standard output of a command. Raises OSError, CommandFailed for a non-zero exit, TimeoutError.

    On a time-out the whole process group is ended, so that no grandchild keeps the pipe open.
    """
    import subprocess  # every rank loads this module, and few start a command

    with subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", start_new_session=True, env=None if environ is None else dict(environ),
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s") from None
    if process.returncode != 0:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise CommandFailed(f"{argv[0]} ended with {process.returncode}: {last[:200]}", err)
    return out
