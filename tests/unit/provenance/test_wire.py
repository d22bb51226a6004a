"""What a host sent, by the counters of a made-up machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from commbench.provenance.wire import SentBytes

HEAD = "Inter-|   Receive   |  Transmit\n face |bytes packets | bytes packets\n"
IB = "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data"


def machine(
    root: Path, sent: dict[str, int], *, hardware: tuple[str, ...] = (), files: dict[str, str] | None = None
) -> Path:
    """``sent``: transmitted bytes by interface; those of ``hardware`` have a device."""
    lines = [f"{name:>6}: 9999999 1 0 0 0 0 0 0 {count} 1 0 0 0 0 0 0\n" for name, count in sent.items()]
    written = {"proc/net/dev": HEAD + "".join(lines)} | {f"sys/class/net/{name}/type": "1\n" for name in sent}
    written |= {f"sys/class/net/{name}/device/vendor": "0x15b3\n" for name in hardware}
    for path, text in (written | (files or {})).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("job", "hardware", "files", "counted"),
    [
        ("eth0", ("eth0",), {}, 100),
        ("eth0", ("eth0", "eth1"), {}, 110),  # every NIC of hardware
        ("eth1", ("eth0",), {}, 110),  # the job's own, though it is a virtual one
        ("eth1", ("eth0",), {"sys/class/net/eth1/lower_eth0/x": ""}, 100),  # built upon eth0, which counts it
        ("lo", ("eth0",), {}, 100),  # what goes over loopback leaves nowhere
        ("eth0", ("eth0",), {IB: "250\n"}, 1100),  # words of four bytes
        ("eth1", ("eth0", "eth1"), {"sys/class/net/eth1/type": "32\n", IB: "250\n"}, 1100),  # the port counts IPoIB
    ],
)
def test_what_counts(tmp_path: Path, job: str, hardware: tuple[str, ...], files: dict[str, str], counted: int) -> None:
    root = machine(tmp_path, {"lo": 1, "eth0": 100, "eth1": 10}, hardware=hardware, files=files)
    assert SentBytes(job, root)() == counted


def test_it_grows_with_the_counters(tmp_path: Path) -> None:
    count = SentBytes("eth0", machine(tmp_path, {"lo": 5, "eth0": 7}))
    before = count()
    machine(tmp_path, {"lo": 500, "eth0": 1007})
    assert count() - before == 1000


def test_a_host_without_sysfs_counts_the_jobs_interface(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(HEAD + "  eth0: 1 1 0 0 0 0 0 0 64 1 0 0 0 0 0 0\n")
    assert SentBytes("eth0", tmp_path)() == 64
