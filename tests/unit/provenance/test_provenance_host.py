"""Collectors read a made-up machine: its /proc and /sys are files that the test writes."""

from __future__ import annotations

import hashlib
import json
import math
import socket
from pathlib import Path

import pytest

from commbench.provenance.collect import collect_after, collect_before
from commbench.provenance.counters import difference, disturbances, since, snapshot
from commbench.provenance.host import collect_host
from commbench.provenance.network import collect_network, collect_port_counters

CPUINFO = """processor\t: 0
model name\t: Example CPU 9000 @ 2.00GHz
physical id\t: 0
microcode\t: 0xd0003b9
flags\t\t: fpu sse2 avx512f

processor\t: 1
model name\t: Example CPU 9000 @ 2.00GHz
physical id\t: 1
flags\t\t: fpu sse2 avx512f
"""
FILES = {
    "proc/sys/kernel/hostname": "gpu-7\n",
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "proc/sys/kernel/random/boot_id": "0d1e2f\n",
    "proc/sys/kernel/numa_balancing": "1\n",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt pci=realloc=off password=hunter2 isolcpus=2-5 quiet\n",
    "proc/cpuinfo": CPUINFO,
    "proc/self/status": "Name:\tpython\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n",
    "proc/self/cgroup": "0::/slurm/job7\n",
    "proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB\nSwapTotal: 0 kB\nHugePages_Total:   16\n",
    "proc/loadavg": "0.50 1.25 2.00 3/217 4242\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC 12\n",
    "etc/machine-id": "abc123\n",
    "etc/os-release": 'NAME="Example"\nPRETTY_NAME="Example Linux 12 (demo)"\n',
    ".dockerenv": "",
    "sys/class/dmi/id/product_name": "Server X\n",
    "sys/devices/system/cpu/online": "0-1\n",
    "sys/devices/system/cpu/smt/active": "1\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3900000\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/cpufreq/boost": "1\n",
    "sys/devices/system/node/node0/cpulist": "0\n",
    "sys/devices/system/node/node1/cpulist": "1\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/fs/cgroup/slurm/job7/cpu.max": "max 100000\n",
    "sys/fs/cgroup/slurm/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/slurm/job7/memory.max": "4194304\n",
    "sys/fs/cgroup/slurm/memory.max": "max\n",
    "sys/class/net/eth0/speed": "25000\n",
    "sys/class/net/eth0/mtu": "9000\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/device/numa_node": "1\n",
    "sys/class/net/eth0/queues/rx-0/rps_cpus": "0\n",
    "sys/class/net/eth0/queues/tx-0/xps_cpus": "0\n",
    "sys/class/net/eth1/speed": "-1\n",
    "sys/class/net/eth1/operstate": "down\n",
    "sys/class/net/bonding_masters": "bond0\n",
    "sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002\n",
    "sys/class/infiniband/mlx5_0/board_id": "MT_0000000838\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "1000\n",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "N/A (not supported)\n",
    "sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence": "7\n",
    "sys/class/infiniband/mlx5_0/ports/1/hw_counters/lifespan": "10\n",
}
STAT = "cpu  {user} 0 {system} 1000 0 0 0 {steal} 0 0\ncpu0 1 2 3\nctxt {switches}\nbtime 1\n"
NETDEV = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier\n"
    "  eth0: {rx} 10 1 2 0 0 0 0 {tx} 20 3 4 0 0 0 0\n"
)
SNMP = "Ip: Forwarding\nIp: 1\nTcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 {again} 0\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    driver = tmp_path / "sys/class/net/eth0/device/driver"
    driver.symlink_to("../../../bus/pci/drivers/mlx5_core")
    return tmp_path


def write_counters(root: Path, *, user: int, steal: int, switches: int, rx: int, tx: int, again: int) -> None:
    (root / "proc/net").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(STAT.format(user=user, system=50, steal=steal, switches=switches))
    (root / "proc/net/dev").write_text(NETDEV.format(rx=rx, tx=tx))
    (root / "proc/net/snmp").write_text(SNMP.format(again=again))


def test_host_facts(machine: Path) -> None:
    host = collect_host(machine)
    assert host["hostname"] == "gpu-7"
    assert host["machine_id"] == hashlib.sha256(b"abc123").hexdigest()[:16]
    assert host["boot_id"] == hashlib.sha256(b"0d1e2f").hexdigest()[:16]
    assert host["kernel"] == "6.8.0-45-generic"
    assert host["distribution"] == "Example Linux 12 (demo)"
    assert host["product"] == {"sys_vendor": None, "product_name": "Server X", "bios_version": None}
    assert host["cpu"] == {
        "model": "Example CPU 9000 @ 2.00GHz", "logical": 2, "sockets": 2, "online": "0-1", "allowed": "0-1",
        "governors": {"performance": 1, "powersave": 1}, "driver": None, "max_Hz": 3_900_000_000, "smt": True,
        "microcode": "0xd0003b9", "hypervisor": False,
    }  # fmt: skip
    assert host["numa"] == {"node0": "0", "node1": "1"}
    assert host["memory"]["total_bytes"] == 1024 * 1024
    assert host["memory"]["hugepages"] == 16
    assert host["load"]["loadavg_1_5_15"] == [0.5, 1.25, 2.0]
    assert host["load"]["runnable"] == 3
    assert host["load"]["available_bytes"] == 512 * 1024
    assert host["clocksource"] == "tsc"
    assert host["transparent_hugepages"] == "madvise"
    assert host["numa_balancing"] == 1
    assert host["nvidia_driver"] == "550.54.15"


def test_the_kernel_command_line_is_kept_only_where_it_changes_timing(machine: Path) -> None:
    assert collect_host(machine)["kernel_options"] == ["iommu=pt", "pci=realloc=off", "isolcpus=2-5"]


def test_limits_of_a_parent_control_group_count(machine: Path) -> None:
    container = collect_host(machine)["container"]
    assert container["signs"] == [".dockerenv"]
    assert container["cpu_quota"] == 1.5
    assert container["memory_limit_bytes"] == 4 * 1024 * 1024


def test_limits_of_a_version_1_control_group(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(2**63 - 4096),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    container = collect_host(tmp_path)["container"]
    assert container["cpu_quota"] == 0.5
    assert container["memory_limit_bytes"] is None


def test_network_facts(machine: Path) -> None:
    network = collect_network(machine)
    assert set(network["interfaces"]) == {"eth0", "eth1"}
    eth0 = network["interfaces"]["eth0"]
    assert eth0["speed_bps"] == 25_000_000_000
    assert (eth0["mtu"], eth0["state"], eth0["driver"], eth0["numa_node"]) == (9000, "up", "mlx5_core", 1)
    assert eth0["queues"] == 1
    assert network["interfaces"]["eth1"]["speed_bps"] is None
    device = network["infiniband"]["mlx5_0"]
    assert (device["firmware"], device["board"]) == ("28.39.1002", "MT_0000000838")
    assert device["ports"]["1"] == {
        "state": "ACTIVE", "physical_state": "LinkUp", "rate": "400 Gb/sec (4X NDR)", "rate_bps": 400e9,
        "link_layer": "InfiniBand",
    }  # fmt: skip


def test_port_counters_leave_out_what_is_no_counter(machine: Path) -> None:
    assert collect_port_counters(machine) == {"mlx5_0/1": {"port_xmit_data": 1000, "out_of_sequence": 7}}


def test_counters_and_their_difference(machine: Path) -> None:
    write_counters(machine, user=100, steal=200, switches=5000, rx=10**12, tx=500, again=1)
    before = snapshot(machine)
    write_counters(machine, user=150, steal=230, switches=5100, rx=10**12 + 77, tx=100, again=4)
    after = snapshot(machine)
    # USER_HZ is 100 on every Linux that Python runs on: 30 ticks are 0.3 s.
    assert before["machine"]["steal_s"] == 2.0
    change = difference(before, after)
    assert change["machine"]["steal_s"] == pytest.approx(0.3)
    assert change["machine"]["busy_s"] == pytest.approx(0.5)
    assert change["machine"]["switches"] == 100
    assert change["interfaces"]["eth0"]["rx_bytes"] == 77
    assert change["interfaces"]["eth0"]["tx_bytes"] is None, "a counter that went backwards was reset"
    assert change["tcp"]["retransmitted"] == 3
    assert change["elapsed_s"] == pytest.approx(after["monotonic_s"] - before["monotonic_s"])
    assert "monotonic_s" not in change


def test_what_disturbs_a_rank(machine: Path) -> None:
    write_counters(machine, user=100, steal=200, switches=5000, rx=1, tx=1, again=1)
    host, rank = disturbances(of_host=True, root=machine), disturbances(of_host=False, root=machine)
    assert set(host) == {"steal_s", "preemptions"}
    assert set(rank) == {"preemptions"}
    write_counters(machine, user=100, steal=230, switches=5000, rx=1, tx=1, again=1)
    assert since(host, machine)["steal_s"] == pytest.approx(0.3)
    assert set(since(rank, machine)) == {"preemptions"}
    assert since({"preemptions": -5}, machine)["preemptions"] >= 5
    (machine / "proc/stat").unlink()
    assert set(disturbances(of_host=True, root=machine)) == {"preemptions"}


def test_a_counter_that_cannot_be_read_is_an_error_and_stays_one(machine: Path) -> None:
    broken = snapshot(machine)  # no proc/stat yet
    assert "error" in broken["machine"]
    write_counters(machine, user=1, steal=1, switches=1, rx=1, tx=1, again=1)
    change = difference(broken, snapshot(machine))
    assert change["machine"] == broken["machine"]
    assert change["process"]["voluntary_switches"] >= 0


def test_the_process_counts_its_own_work() -> None:
    before = snapshot()
    math.factorial(20_000)
    change = difference(before, snapshot())
    assert change["process"]["cpu_s"] > 0
    assert change["elapsed_s"] > 0


def test_an_empty_machine_raises_nothing_and_is_json(tmp_path: Path) -> None:
    for bundle in (collect_before(tmp_path), collect_after(tmp_path)):
        json.dumps(bundle, allow_nan=False)
    assert collect_before(tmp_path)["host"]["hostname"] is None


def test_garbage_raises_nothing_and_is_json(machine: Path) -> None:
    write_counters(machine, user=1, steal=1, switches=1, rx=1, tx=1, again=1)
    for path in sorted(machine.rglob("*")):
        if path.is_file():
            path.write_bytes(b"\xff\x00 ]:= [=\n::\nTcp:\ncpu x\n\n\n  : 1\n")
    bundle = collect_before(machine)
    json.dumps(bundle, allow_nan=False)
    assert "error" in bundle["counters"]["machine"]


def test_this_machine_before_and_after() -> None:
    before, after = collect_before(), collect_after()
    assert json.loads(json.dumps(before)) == before
    assert before["host"]["hostname"] == socket.gethostname()
    assert before["host"]["boot_id"] is not None
    assert before["host"]["memory"]["total_bytes"] > 0
    assert "lo" in before["network"]["interfaces"]
    assert set(after) <= set(before)
    assert difference(before["counters"], after["counters"])["machine"]["steal_s"] >= 0
