"""A run's directory is written so that whatever happens, what was finished is there and can be read."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.records import END, SCHEMA, Point
from commbench.store import writer
from commbench.store.writer import LaunchWriter, StoreError, create_run, reserve, utc_now, write_json

ROOT = Path(__file__).parents[3]


def point(**changes: Any) -> Point:
    values: dict[str, Any] = {
        "collective": "all_reduce", "backend": "gloo", "ranks": 2, "nodes": 1, "dtype": "float32", "reduce_op": "sum",
        "placement": "out", "bytes": 8, "requested_bytes": 8, "timing": "isolated",
    }  # fmt: skip
    return Point(**(values | changes))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run(tmp_path / "results")


def points_of(run: Path, launch: int = 0) -> Path:
    return run / "launches" / str(launch) / "points.jsonl"


# -- directories -----------------------------------------------------------------------------------


def test_a_run_has_a_directory_of_its_own_below_the_day(tmp_path: Path) -> None:
    runs = {create_run(tmp_path) for _ in range(20)}
    assert len(runs) == 20
    for run in runs:
        day, stamp = run.parts[-2:]
        assert stamp.startswith(day.replace("-", "") + "T")
        assert len(stamp.rpartition("-")[2]) == 16  # 64 random bits
        assert sorted(path.name for path in run.iterdir()) == ["hosts", "launches"]


def test_a_directory_that_exists_is_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.secrets, "token_hex", lambda count: "0" * 2 * count)
    monkeypatch.setattr(writer.datetime, "datetime", _Frozen)
    create_run(tmp_path)
    with pytest.raises(StoreError, match=r"cannot write results under .* \(File exists\)"):
        create_run(tmp_path)


class _Frozen(writer.datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls(2025, 1, 2, 3, 4, 5, tzinfo=tz)


def test_a_launch_is_written_by_one_writer_only(run: Path) -> None:
    first = LaunchWriter(run, 0, {})
    with pytest.raises(FileExistsError):
        LaunchWriter(run, 0, {})
    first.write(point())
    first.close()
    assert len(points_of(run).read_text().splitlines()) == 1


def test_a_place_below_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        create_run(tmp_path / "file" / "results")
    assert str(caught.value).endswith("file/results (Not a directory): choose another place with --out")


def test_utc_times_sort_as_text() -> None:
    assert utc_now() <= utc_now()
    assert utc_now().endswith("Z")


# -- manifests -------------------------------------------------------------------------------------


def test_json_is_strict_and_says_its_schema(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"nan": math.nan, "nested": {"inf": [math.inf, 1]}})
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "schema": SCHEMA, "nan": None, "nested": {"inf": [None, 1]},
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"fill": ["0" * 50000]})
    stop = threading.Event()
    torn: list[str] = []

    def read() -> None:
        while not stop.is_set() and not torn:
            text = file.read_text()
            try:
                whole = len(set(json.loads(text)["fill"][0])) == 1
            except ValueError:
                whole = False
            if not whole:
                torn.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        write_json(file, {"fill": [str(number % 10) * (50000 - 500 * number)]})
    stop.set()
    reader.join()
    assert torn == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"^cannot write .*x\.json \(No space left on device\)$"):
        write_json(file, {"a": 2})
    assert json.loads(file.read_text())["a"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_reserved_end_is_written_over_in_place(tmp_path: Path) -> None:
    """A full disk has no room for a new file, but the blocks of the reserved one are ours."""
    reserve(tmp_path / END)
    part = tmp_path / (END + ".part")
    assert part.stat().st_size == 4096
    assert not (tmp_path / END).exists()  # a crash must not look like an end
    inode = part.stat().st_ino
    write_json(tmp_path / END, {"status": "ok"})
    assert (tmp_path / END).stat().st_ino == inode
    assert json.loads((tmp_path / END).read_text()) == {"schema": SCHEMA, "status": "ok"}
    assert not part.exists()


# -- points ----------------------------------------------------------------------------------------


def test_fits_of_clocks_are_a_line_each(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LaunchWriter(run, 0, {})
    fits: list[dict[str, Any]] = [
        {"at_ns": 10**18, "clocks": [{"off_s": math.nan}]},
        {"at_ns": 10**18 + 1, "clocks": []},
    ]
    for fit in fits:
        launch.clock_fit(fit)
    file = run / "launches" / "0" / "clock.jsonl"
    fits[0]["clocks"][0]["off_s"] = None
    assert [json.loads(line) for line in file.read_text().splitlines()] == fits
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError, match="cannot write .*clock.jsonl"):
        launch.clock_fit(fits[0])


def test_a_point_is_on_disk_when_write_returns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), real(descriptor)))
    launch = LaunchWriter(run, 3, {"seed": 7})
    synced.clear()
    for size in (8, 16):
        launch.write(point(bytes=size, time_s=math.nan))
        assert synced.pop() == points_of(run, 3).stat().st_ino
        lines = [json.loads(line) for line in points_of(run, 3).read_text().splitlines()]
        assert (lines[-1]["bytes"], lines[-1]["time_s"]) == (size, None)
    launch.close()
    assert json.loads((run / "launches/3/manifest.json").read_text()) == {"schema": SCHEMA, "launch": 3, "seed": 7}


def test_samples_need_no_pickle_and_are_numbered_as_the_points(run: Path) -> None:
    launch = LaunchWriter(run, 0, {})
    stamps = np.arange(12, dtype=np.int64).reshape(2, 3, 2)
    launch.write(point(), stamps)
    launch.write(point(status="skipped"))
    launch.write(point(), stamps + 100)
    launch.close()
    samples = run / "launches/0/samples"
    assert sorted(file.name for file in samples.iterdir()) == ["0.npy", "2.npy"]
    np.testing.assert_array_equal(np.load(samples / "2.npy", allow_pickle=False), stamps + 100)
    assert len(points_of(run).read_text().splitlines()) == 3


def test_the_manifest_grows(run: Path) -> None:
    launch = LaunchWriter(run, 0, {"seed": 1})
    launch.update(backends={"gloo": {}})
    launch.update(ended_utc="now")
    stored = json.loads((run / "launches/0/manifest.json").read_text())
    assert stored == {"schema": SCHEMA, "launch": 0, "seed": 1, "backends": {"gloo": {}}, "ended_utc": "now"}


def test_hosts_keep_the_first_before_and_the_last_after(run: Path) -> None:
    for number in (0, 1):
        launch = LaunchWriter(run, number, {})
        launch.host_facts("before", {"a/b": {"n": number}, "c": {"n": 10 + number}})
        launch.host_facts("after", {"a/b": {"n": 20 + number}})
        launch.close()
    assert sorted(file.name for file in (run / "hosts").iterdir()) == ["a_b.json", "c.json"]
    stored = json.loads((run / "hosts/a_b.json").read_text())
    assert (stored["host"], stored["before"], stored["after"]) == ("a/b", {"n": 0}, {"n": 21})
    manifest = json.loads((run / "launches/1/manifest.json").read_text())
    assert (manifest["before"]["c"], manifest["after"]) == ({"n": 11}, {"a/b": {"n": 21}})


class ShortFile(io.RawIOBase):
    """A file on a disk that takes only ``room`` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: Any) -> int:
        taken = self.file.write(bytes(data)[: self.room])
        self.room -= taken
        return int(taken)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.file.seek(offset, whence))

    def fileno(self) -> int:
        return int(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def test_half_a_line_is_taken_back(run: Path) -> None:
    launch = LaunchWriter(run, 0, {})
    launch.write(point())
    whole = points_of(run).read_bytes()
    launch._points = ShortFile(launch._points, room=100)  # type: ignore[assignment]
    with pytest.raises(StoreError, match=r"^cannot write .*points\.jsonl \(No space left on device\)$"):
        launch.write(point(bytes=16), np.zeros((2, 1, 2), dtype=np.int64))
    assert points_of(run).read_bytes() == whole
    assert list((run / "launches/0/samples").iterdir()) == []


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from commbench.records import Point
from commbench.store.writer import LaunchWriter, StoreError

launch = LaunchWriter(Path(sys.argv[1]), 0, {})
one = Point(collective="all_reduce", backend="gloo", ranks=2, nodes=1, dtype="float32", reduce_op="sum",
            placement="out", bytes=8, requested_bytes=8, timing="isolated")
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    for _ in range(100):
        launch.write(one, np.zeros((2, int(sys.argv[2]), 2), dtype=np.int64))
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize(("iterations", "file"), [(1, "points.jsonl"), (1000, "0.npy")])
def test_the_kernel_refuses_more_bytes(run: Path, iterations: int, file: str) -> None:
    """A limit on the size of files: what is left can be read, and the line names the file and a reason."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run), str(iterations)], capture_output=True, text=True, check=True,
        timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    assert line.startswith("cannot write ")
    assert file in line
    assert line.endswith(("(File too large)", "(No space left on device)"))
    stored = points_of(run).read_text()
    assert stored.endswith("\n")
    assert [json.loads(text)["bytes"] for text in stored.splitlines()] == [8] * len(stored.splitlines())
    for samples in (run / "launches/0/samples").iterdir():
        assert np.load(samples, allow_pickle=False).shape == (2, iterations, 2)
