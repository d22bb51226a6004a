"""The calibration file: what is written can be read, and what cannot be used is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commbench.models.links import Link, Links
from commbench.store.calibration import CALIBRATION, CalibrationError, read_calibration, write_calibration
from commbench.store.writer import StoreError

SLOW = Link(latency_s=1e-5, seconds_per_byte=1e-9, table=((8, 1e-5), (1024, 1.2e-5)), shift=((8, 1.1e-5),))
LINKS = Links(
    same_host=Link(latency_s=1e-6, seconds_per_byte=1e-10),
    other_host=SLOW,
    nic_seconds_per_byte=5e-10,
    nic=((8, 1e-6), (4096, 5e-6)),
    host_rates=((1e-9, 1e-9), (4e-9, 4e-9)),
    calibration_id="abc",
)
HOSTS = ("a", "a", "b", "b")
IMPOSSIBLE = {"other_host": {"latency_s": -1, "seconds_per_byte": 1}}


def backend(links: Links = LINKS) -> dict[str, Any]:
    return {"version": "4.1", "settings": {"btl": "tcp"}, "links": links.to_dict(), "windows": [{"pattern": "shift"}]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / CALIBRATION
    write_calibration(path, hosts=HOSTS, backends={"mpi": backend()})
    return path


def test_reads_what_was_written(file: Path) -> None:
    found = read_calibration(file)
    assert found == read_calibration(file.parent)  # a run's directory
    assert (found.path, found.hosts, list(found.backends)) == (file, HOSTS, ["mpi"])
    mpi = found.backends["mpi"]
    assert mpi.links == LINKS
    assert (mpi.version, mpi.settings, mpi.windows) == ("4.1", {"btl": "tcp"}, ({"pattern": "shift"},))


def test_the_file_says_what_it_is_and_appears_whole(file: Path) -> None:
    values = json.loads(file.read_text())
    assert (values["schema"], values["kind"]) == (1, "calibration")
    assert {"commbench", "created_utc"} <= set(values)
    assert [path.name for path in file.parent.iterdir()] == [CALIBRATION]


def test_later_versions_may_add_fields(file: Path) -> None:
    values = json.loads(file.read_text())
    values["mood"] = values["backends"]["mpi"]["links"]["colour"] = "blue"
    values["backends"]["mpi"]["links"]["other_host"]["spin"] = 1
    file.write_text(json.dumps(values))
    assert read_calibration(file).backends["mpi"].links == LINKS


def test_one_backend_needs_no_name(file: Path) -> None:
    found = read_calibration(file)
    assert found.backend(None) is found.backends["mpi"]
    with pytest.raises(CalibrationError, match="holds no gloo, only mpi"):
        found.backend("gloo")
    write_calibration(file, hosts=HOSTS, backends={"mpi": backend(), "gloo": backend()})
    with pytest.raises(CalibrationError, match="holds mpi, gloo: choose one with --backend"):
        read_calibration(file).backend(None)


@pytest.mark.parametrize(
    ("hosts", "rates"),
    [
        (("a", "a", "b", "b"), ((1e-9, 1e-9), (4e-9, 4e-9))),
        (("b", "b", "a"), ((4e-9, 4e-9), (1e-9, 1e-9))),  # hosts are numbered as they appear
        (("b", "b"), ((4e-9, 4e-9),)),
        (("x", "y"), ((1e-9, 1e-9), (4e-9, 4e-9))),  # others, but as many
        (("x", "y", "z"), ((1e-9, 1e-9),) * 3),  # others: the usual rate
    ],
)
def test_rates_follow_the_hosts(file: Path, hosts: tuple[str, ...], rates: tuple[tuple[float, float], ...]) -> None:
    found = read_calibration(file).links_for("mpi", hosts)
    assert found.host_rates == rates
    assert (found.same_host, found.other_host) == (LINKS.same_host, LINKS.other_host)


def test_a_class_of_links_that_was_not_calibrated(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    write_calibration(file, hosts=("a", "b"), backends={"mpi": backend(Links(other_host=SLOW))})
    found = read_calibration(file)
    assert found.links_for("mpi", ("a", "b", "c")).other_host == SLOW
    with pytest.raises(CalibrationError, match="no mpi link inside a host"):
        found.links_for("mpi", ("a", "a", "b"))
    write_calibration(file, hosts=("a", "a"), backends={"mpi": backend(Links(same_host=SLOW))})
    with pytest.raises(CalibrationError, match="no mpi link between hosts"):
        read_calibration(file).links_for("mpi", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no calibration"),
        ('{"kind": "manifest", "backends": {"mpi": {}}}', "is no calibration"),
        ('{"kind": "calibration", "hosts": [], "backends": {}}', "is no calibration"),
        ('{"kind": "calibration", "hosts": ["a"], "backends": {"mpi": {}}}', r"damaged calibration \(KeyError"),
        ('{"kind": "calibration", "hosts": ["a"], "backends": {"mpi": 1}}', r"damaged calibration \(AttributeError"),
        ('{"kind": "calibration", "backends": {"mpi": {"links": {}}}}', r"damaged calibration \(KeyError"),
        (
            json.dumps({"kind": "calibration", "hosts": ["a"], "backends": {"mpi": {"links": IMPOSSIBLE}}}),
            r"damaged calibration \(ValueError: latency_s must be a finite number",
        ),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(CalibrationError, match=message) as caught:
        read_calibration(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot read calibration .*calibration.json \(No such file"):
        read_calibration(tmp_path)


def test_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write"):
        write_calibration(tmp_path / "no" / "links.json", hosts=HOSTS, backends={"mpi": backend()})
