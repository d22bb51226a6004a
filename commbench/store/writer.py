"""Writes a run's directory so that a crash at any moment loses nothing that was finished.

Directories are made exclusively, files have one writer each, manifests appear whole or not at all, and a point's line
is on disk before anyone is told of it. Loaded by every rank: standard library and numpy.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commbench.records import CLOCK, HOSTS, LAUNCHES, POINTS, SAMPLES, SCHEMA, Point, finite


class StoreError(OSError):
    """The disk would not take it: one line that says what and where."""


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def create_run(out: Path) -> Path:
    """A new directory ``out/<UTC date>/<run_id>/``; the id is the UTC time and 64 random bits. Raises StoreError."""
    now = datetime.datetime.now(datetime.timezone.utc)
    run = out / now.strftime("%Y-%m-%d") / f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(8)}"
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        run.mkdir()
        (run / HOSTS).mkdir()
        (run / LAUNCHES).mkdir()
    except OSError as error:
        raise StoreError(
            f"cannot write results under {out} ({error.strerror}): choose another place with --out"
        ) from None
    return run


def reserve(file: Path, size: int = 4096) -> None:
    """Take the disk space of a small file now, so that ``write_json`` can write it when the disk is full."""
    try:
        _part(file).write_bytes(b" " * size)
    except OSError as error:
        raise StoreError(f"cannot write {file} ({error.strerror})") from None


def write_json(file: Path, value: dict[str, Any]) -> None:
    """The whole file or, after a crash, none of it. Raises StoreError."""
    temporary = _part(file)
    text = json.dumps(finite({"schema": SCHEMA, **value}), indent=1, allow_nan=False) + "\n"
    try:
        # Not truncated before it is written: reserved blocks stay ours.
        with open(temporary, "r+b" if temporary.exists() else "wb", buffering=0) as stream:
            data = text.encode()
            if stream.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            stream.truncate()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {file} ({error.strerror})") from None


def _part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


class LaunchWriter:
    """The one writer of ``launches/<k>/``: rank 0 of that launch."""

    def __init__(self, run: Path, launch: int, manifest: dict[str, Any]) -> None:
        self._directory = run / LAUNCHES / str(launch)
        self._directory.mkdir()
        (self._directory / SAMPLES).mkdir()
        self._hosts = run / HOSTS
        self._count = 0
        self._manifest = {"launch": launch, **manifest}
        write_json(self._directory / "manifest.json", self._manifest)
        # Unbuffered and appended: one write call a point.
        self._points = open(self._directory / POINTS, "ab", buffering=0)  # noqa: SIM115  open as long as the launch

    def host_facts(self, when: str, facts: dict[str, Any]) -> None:
        """What was found on each host ``when`` ("before" or "after"): in the launch's manifest, and for the whole run,
        from its first "before" to its last "after", in ``hosts/``. Raises StoreError."""
        self.update(**{when: facts})
        for host, found in facts.items():
            file = self._hosts / f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in host)}.json"
            known = json.loads(file.read_text()) if file.exists() else {"host": host}
            if when == "after" or "before" not in known:
                write_json(file, {**known, when: found})

    def update(self, **facts: Any) -> None:
        """Add to the launch's manifest."""
        self._manifest.update(facts)
        write_json(self._directory / "manifest.json", self._manifest)

    def write(self, point: Point, stamps: NDArray[np.int64] | None = None) -> None:
        """One line, on disk when this returns; a line that did not fit is taken back. Raises StoreError.

        ``stamps[rank, iteration] = (start, end)`` in ns go to ``samples/<n>.npy`` for the n-th point.
        """
        line = point.to_json().encode() + b"\n"
        end = self._points.seek(0, os.SEEK_END)
        try:
            written = self._points.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._points.fileno())
        except OSError as error:
            os.ftruncate(self._points.fileno(), end)
            raise StoreError(f"cannot write {self._directory / POINTS} ({error.strerror})") from None
        if stamps is not None:
            self._samples(stamps)
        self._count += 1

    def clock_fit(self, fit: dict[str, Any]) -> None:
        """One line of ``clock.jsonl``: how clocks were taken to the common one from a time on. Raises StoreError."""
        file = self._directory / CLOCK
        try:
            with open(file, "ab") as stream:
                stream.write(json.dumps(finite(fit), separators=(",", ":"), allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise StoreError(f"cannot write {file} ({error.strerror})") from None

    def _samples(self, stamps: NDArray[np.int64]) -> None:
        file = self._directory / SAMPLES / f"{self._count}.npy"
        try:
            with open(file, "wb") as stream:
                np.save(stream, stamps, allow_pickle=False)
        except OSError as error:
            file.unlink(missing_ok=True)
            # numpy reports a short write, which is what a full disk does, without an errno.
            raise StoreError(f"cannot write {file} ({os.strerror(error.errno or errno.ENOSPC)})") from None

    def close(self) -> None:
        self._points.close()
