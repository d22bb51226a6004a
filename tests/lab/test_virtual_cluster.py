"""The virtual cluster keeps what it promises: its rates, its faults, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import commbench

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/virtual_cluster"
COMMBENCH = (sys.executable, "-m", "commbench", "run")
PORT = "5000"
Make = Callable[..., Any]  # the fixture's class is in conftest.py, which tests cannot import

# argv: address, port, bytes after which to say so. Prints (seconds since the first, bytes so far) of every receive.
RECEIVER = """
import json, socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
connection, _ = listener.accept()
mark, total, stamps = int(sys.argv[3]), 0, []
while data := connection.recv(1 << 20):
    total += len(data)
    stamps.append((time.monotonic(), total))
    if total >= mark:
        print("mark", flush=True)
        mark = 1 << 60
print(json.dumps([(stamp - stamps[0][0], count) for stamp, count in stamps]))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
"""
# argv: address, seconds to wait. A closed port of a host that is there refuses.
REACH = """
import errno, socket, sys
with socket.socket() as probe:
    probe.settimeout(float(sys.argv[2]))
    print(probe.connect_ex((sys.argv[1], 9)) == errno.ECONNREFUSED)
"""


class Transfer:
    """Bytes over one TCP connection between two hosts of a cluster."""

    def __init__(self, cluster: Any, source: int, target: int, size: int, mark: int = 1 << 60) -> None:
        address = cluster.addresses[target]
        self.receiver = cluster.start(target, [sys.executable, "-S", "-c", RECEIVER, address, PORT, str(mark)])
        assert self.receiver.stdout.readline() == "ready\n", self.receiver.stderr.read()
        self.sender = cluster.start(source, [sys.executable, "-S", "-c", SENDER, address, PORT, str(size)])

    def wait_for_mark(self) -> None:
        assert self.receiver.stdout.readline() == "mark\n", self.receiver.stderr.read()

    def stamps(self) -> list[tuple[float, int]]:
        out, errors = self.receiver.communicate(timeout=30)
        assert self.receiver.returncode == self.sender.wait(timeout=30) == 0, errors
        return [(stamp, count) for stamp, count in json.loads(out)]


def bits_per_s(stamps: list[tuple[float, int]], first: int, last: int) -> float:
    """The rate between the receive that passed ``first`` bytes and the one that passed ``last``."""
    (t0, n0), (t1, n1) = (next(stamp for stamp in stamps if stamp[1] >= limit) for limit in (first, last))
    return (n1 - n0) * 8 / (t1 - t0)


def measured(cluster: Any, source: int, target: int, size: int = 4_000_000) -> float:
    """The rate of a transfer in Mbit/s: the best of three tries at most, because a busy machine can make one slower."""
    best = 0.0
    for _ in range(3):
        best = max(best, bits_per_s(Transfer(cluster, source, target, size).stamps(), 0, size) / 1e6)
        if best > 95:
            break
    return best


def reaches(cluster: Any, source: int, address: str) -> bool:
    """Whether a host hears another; waits long for the answer."""
    return _probe(cluster, source, address, 5.0)


def misses(cluster: Any, source: int, address: str) -> bool:
    """Whether a host gets no answer from an address within a thousand times the usual."""
    return not _probe(cluster, source, address, 0.5)


def _probe(cluster: Any, source: int, address: str, seconds: float) -> bool:
    done = cluster.exec(source, [sys.executable, "-S", "-c", REACH, address, str(seconds)])
    assert done.returncode == 0, done.stderr
    return bool(json.loads(done.stdout.lower()))


# -- links ---------------------------------------------------------------------------------------------


def test_both_directions_have_the_rate(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=2, rate="100mbit")
    for source, target in ((0, 1), (1, 0)):
        assert 90 <= measured(cluster, source, target) <= 101


def test_slow_halves_the_rate_midway_and_heal_restores_it(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=2, rate="100mbit")
    transfer = Transfer(cluster, 0, 1, 10_000_000, mark=1_500_000)
    transfer.wait_for_mark()
    cluster.slow(1, "50mbit")
    stamps = transfer.stamps()
    before, after = bits_per_s(stamps, 0, 1_500_000) / 1e6, bits_per_s(stamps, 8_000_000, 10_000_000) / 1e6
    assert 90 <= before <= 101
    assert 45 <= after <= 50.5
    the_other_way = bits_per_s(Transfer(cluster, 1, 0, 2_000_000).stamps(), 0, 2_000_000) / 1e6
    assert 45 <= the_other_way <= 50.5
    assert list(cluster.status().values()) == [("100mbit", "connected"), ("50mbit", "connected")]
    cluster.heal()
    assert 90 <= measured(cluster, 1, 0) <= 101


def test_cut_takes_one_host_away_and_heal_brings_it_back(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=3)
    _, second, third = cluster.addresses
    assert reaches(cluster, 0, second)
    cluster.cut(1)
    assert misses(cluster, 0, second)
    assert misses(cluster, 1, third)
    assert reaches(cluster, 0, third)
    assert cluster.status()[cluster.hosts[1]] == ("100mbit", "cut")
    cluster.heal()
    assert reaches(cluster, 0, second)
    assert cluster.status()[cluster.hosts[1]] == ("100mbit", "connected")


def test_two_clusters_do_not_meet(virtual_cluster: Make) -> None:
    first, second = virtual_cluster(hosts=2), virtual_cluster(hosts=2)
    assert not set(first.hosts) & set(second.hosts)
    assert not set(first.addresses) & set(second.addresses)
    target = second.addresses[1]
    assert misses(first, 0, target)
    # Nor as neighbours, with an address of the other's subnet.
    neighbour = target.rpartition(".")[0] + ".200/24"
    assert first.exec(0, ["ip", "addr", "add", neighbour, "dev", "eth0"]).returncode == 0
    assert misses(first, 0, target)
    # The same address may be in both.
    assert first.exec(1, ["ip", "addr", "add", f"{target}/24", "dev", "eth0"]).returncode == 0
    second.cut(1)
    assert reaches(first, 0, target)
    assert misses(second, 0, target)


# -- hosts ---------------------------------------------------------------------------------------------


def test_hosts_have_names_that_resolve_and_nics_of_their_own(virtual_cluster: Make) -> None:
    here = (socket.gethostname(), socket.if_nameindex(), Path("/etc/hosts").read_text())
    cluster = virtual_cluster(hosts=3)
    ask = (
        "import json, os, socket, sys; print(json.dumps([socket.gethostname(), "
        "[socket.gethostbyname(name) for name in sys.argv[1:]], sorted(os.listdir('/sys/class/net')), "
        "sorted(name for _, name in socket.if_nameindex()), os.getpid() == int(os.readlink('/proc/self'))]))"
    )
    for index, host in enumerate(cluster.hosts):
        said = json.loads(cluster.exec(index, [sys.executable, "-S", "-c", ask, *cluster.hosts]).stdout)
        assert said == [host, list(cluster.addresses), ["eth0", "lo"], ["eth0", "lo"], True]
    assert len(set(cluster.hosts)) == len(set(cluster.addresses)) == 3
    assert here == (socket.gethostname(), socket.if_nameindex(), Path("/etc/hosts").read_text())


def test_shared_memory_is_a_hosts_own(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=2)
    assert cluster.exec(0, ["sh", "-c", "echo mine > /dev/shm/vc-test"]).returncode == 0
    assert cluster.exec(0, ["cat", "/dev/shm/vc-test"]).stdout == "mine\n"
    assert cluster.exec(1, ["test", "-e", "/dev/shm/vc-test"]).returncode == 1
    assert not Path("/dev/shm/vc-test").exists()


def test_setup_and_teardown_are_quick(virtual_cluster: Make) -> None:
    began = time.monotonic()
    cluster = virtual_cluster(hosts=4)
    cluster.down()
    took = time.monotonic() - began
    print(f"four hosts: set up in {cluster.setup_s:.2f} s, down in {took - cluster.setup_s:.2f} s")
    assert took < 2.0


# -- commands ------------------------------------------------------------------------------------------


needs_mpi = pytest.mark.mpi


@pytest.mark.parametrize("launcher", [pytest.param("mpirun", marks=needs_mpi), "torchrun"])
def test_ranks_are_placed_host_by_host(virtual_cluster: Make, launcher: str) -> None:
    cluster = virtual_cluster(hosts=2, ranks_per_host=2)
    say = "echo ${OMPI_COMM_WORLD_RANK-$RANK} ${OMPI_COMM_WORLD_LOCAL_RANK-$LOCAL_RANK} $(hostname)"
    done = cluster.run(["sh", "-c", say], launcher=launcher)
    assert done.returncode == 0, done.stderr
    first, second = cluster.hosts
    assert sorted(done.stdout.split("\n")) == ["", f"0 0 {first}", f"1 1 {first}", f"2 0 {second}", f"3 1 {second}"]


@needs_mpi
def test_mpirun_inside_finds_the_hosts_by_itself(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=3)
    done = cluster.run(["mpirun", "-n", "3", "hostname"], launcher="none")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(cluster.hosts)


@needs_mpi
def test_exit_codes_are_the_commands(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=2)
    assert cluster.exec(1, ["sh", "-c", "exit 7"]).returncode == 7
    assert cluster.exec(1, ["sh", "-c", "kill -KILL $$"]).returncode == 128 + signal.SIGKILL
    # PRRTE may lose commands that end before all of them have begun, and then waits for ever.
    assert cluster.run(["sh", "-c", "sleep 1; exit $((OMPI_COMM_WORLD_RANK * 9))"]).returncode == 9


def test_what_a_command_leaves_running_ends_with_it(virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=1)
    assert cluster.exec(0, ["sh", "-c", "setsid sleep 300 & sleep 0.1"]).returncode == 0
    assert inside(cluster.name) == {}


# About five seconds of measuring; the rest is start-up, and calibration over a slow link.
@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=needs_mpi), "gloo"])
def test_commbench_measures_the_link(virtual_cluster: Make, tmp_path: Path, backend: str) -> None:
    cluster = virtual_cluster(hosts=2, rate="100mbit")
    done = cluster.run(
        [*COMMBENCH, "--backend", backend, "--collective", "all_gather", "--sizes", "1M", "--nodes", "2",
         "--budget", "1s", "--out", str(tmp_path)]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path)
    assert sorted(frame["timing"]) == ["isolated", "streamed"]
    assert frame["status"].eq("ok").all()
    assert frame["wrong"].eq(0).all()
    assert frame["nodes"].eq(2).all()
    assert frame["start"].eq("clock").all()
    (path,) = tmp_path.glob("*/*")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["launcher"] == {"mpi": "openmpi", "gloo": "torchrun"}[backend]
    assert manifest["hosts"] == list(cluster.hosts)
    # Each of two ranks sends half a MiB over a link of 12.5e6 B/s, both ways at once: bus bandwidth is the link's rate.
    # Frames of 9014 B carry 8948, and what the full token bucket holds, one frame and 0.2 ms, passes for nothing.
    half = 2**19
    fastest_s = (half * 9014 / 8948 - (9014 + 2500)) / 12.5e6
    assert 0.999 < half / fastest_s / 12.5e6 < 1.016
    share = frame["busbw_Bps"] / 12.5e6
    assert share.between(0.60, 1.01).all(), share.tolist()


# -- nothing stays behind ------------------------------------------------------------------------------


def inside(name: str) -> dict[int, str]:
    """The processes of a cluster, by its name in their environment, with their network namespaces."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"VIRTUAL_CLUSTER={name}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = os.readlink(path / "ns/net")
        except OSError:
            pass
    return found


def holders(namespaces: set[str]) -> list[str]:
    """Everything that keeps one of these namespaces: processes, open descriptors and mounts."""
    kept = []
    for path in Path("/proc").glob("[0-9]*"):
        for file in (path / "ns/net", *_entries(path / "fd")):
            try:
                if os.readlink(file) in namespaces:
                    kept.append(str(file))
            except OSError:
                pass
        try:
            mounts = (path / "mountinfo").read_text()
        except OSError:
            continue
        kept += [f"{path}/mountinfo: {name}" for name in namespaces if name in mounts]
    return kept


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def wait_until(holds: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return bool(holds())


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of clusters for this test alone: ``down --all`` means everybody's. With a short path for sockets."""
    with tempfile.TemporaryDirectory(prefix="vc-") as directory:
        monkeypatch.setenv("VIRTUAL_CLUSTER_DIR", directory)
        yield Path(directory)


def record(registry: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((registry / name / "cluster.json").read_text())
    return values


def clusters(registry: Path) -> set[str]:
    return {path.name for path in registry.iterdir()}


# Every rank with a child that has left its session and its process group.
LINGER = "setsid sleep 300 & echo $VIRTUAL_CLUSTER; sleep 300"


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_ending_run_leaves_nothing(registry: Path, number: signal.Signals) -> None:
    wrapper = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "--hosts", "2", "--rate", "200mbit", "--launcher", "mpirun", "--",
         "sh", "-c", LINGER],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wrapper.stdout is not None
    name = wrapper.stdout.readline().strip()
    assert name.startswith("vc"), wrapper.communicate()
    # mpirun here, its agent's daemon there, and on each host a shell and two sleeps: the rank, and the one that left.
    assert wait_until(lambda: len(inside(name)) >= 8, 10), inside(name)
    keeper = record(registry, name)["keeper"][0]
    namespaces = set(inside(name).values())
    assert len(namespaces) == 2
    assert os.readlink("/proc/self/ns/net") not in namespaces
    wrapper.send_signal(number)
    assert wait_until(lambda: not inside(name), 5), inside(name)
    assert wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 5)
    assert wait_until(lambda: not holders(namespaces), 5), holders(namespaces)
    wrapper.communicate(timeout=5)
    assert wrapper.returncode not in (0, 2)
    assert clusters(registry) == set()


@needs_mpi
def test_a_failing_command_is_cleaned_up_after(registry: Path, cluster_script: Make) -> None:
    done = cluster_script("run", "--hosts", "2", "--", "sh", "-c", "echo $VIRTUAL_CLUSTER; exit 5")
    assert done.returncode == 5
    (name,) = set(done.stdout.split())
    assert inside(name) == {}
    assert clusters(registry) == set()


def test_killing_the_keeper_ends_what_runs_inside(registry: Path, virtual_cluster: Make, cluster_script: Make) -> None:
    cluster = virtual_cluster(hosts=2)
    process = cluster.start(1, ["sh", "-c", LINGER])
    assert process.stdout.readline().strip() == cluster.name
    os.kill(record(registry, cluster.name)["keeper"][0], signal.SIGKILL)
    assert process.wait(timeout=5) == 2
    assert f"{cluster.name} went down" in process.stderr.read()
    assert inside(cluster.name) == {}
    assert cluster_script("down", "--all").returncode == 0
    assert clusters(registry) == set()


def test_up_cleans_what_dead_owners_left_and_keeps_the_living(registry: Path, cluster_script: Make) -> None:
    owners = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        names = [cluster_script("up", "--hosts", "1", "--owner", str(owner.pid)).stdout.strip() for owner in owners]
        assert clusters(registry) == set(names)
        keepers = [record(registry, name)["keeper"][0] for name in names]
        # One keeper that cannot follow its owner, one that dies, and one that lives.
        os.kill(keepers[0], signal.SIGSTOP)
        os.kill(keepers[1], signal.SIGKILL)
        owners[0].kill()
        owners[0].wait()
        assert clusters(registry) == set(names)
        fourth = cluster_script("up", "--hosts", "1").stdout.strip()
        assert clusters(registry) == {names[2], fourth}
        assert wait_until(lambda: not any(Path(f"/proc/{keeper}").exists() for keeper in keepers[:2]), 5)
        assert cluster_script("exec", "--cluster", names[2], "0", "--", "hostname").stdout.strip() == f"{names[2]}-0"
        # Unhindered, a cluster goes with its owner.
        owners[2].kill()
        owners[2].wait()
        assert wait_until(lambda: clusters(registry) == {fourth}, 5)
        assert cluster_script("hostfile").stdout == f"{fourth}-0 slots=1\n"
        assert cluster_script("down").returncode == 0
        assert clusters(registry) == set()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
        cluster_script("down", "--all")


# -- what it says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "the following arguments are required: COMMAND (see virtual_cluster --help)"),
        ("up", "say how many: --hosts N"),
        ("up --hosts two", "argument --hosts: invalid int value: 'two' (see virtual_cluster up --help)"),
        ("up --hosts 65", "--hosts 65 is outside 1 to 64"),
        ("up --hosts 2 --ranks-per-host 0", "--ranks-per-host 0 is below 1"),
        (
            "up --hosts 2 --rate fast",
            "'fast' is not a rate: write a number with kbit, mbit or gbit, such as 200mbit",
        ),
        ("up --hosts 2 --rate 1kbit", "rate '1kbit' is outside 1mbit to 100gbit"),
        ("up --hosts 2 -- true", "up takes no command after --"),
        ("run --hosts 2", "no command: write run … -- CMD"),
        ("run --rate 1mbit -- true", "--rate and --ranks-per-host belong to a new cluster: add --hosts N"),
        ("exec 0 -- true", "no cluster is up: make one with up --hosts N"),
        ("down --cluster vcnone", "no cluster 'vcnone' is up"),
        ("run --hosts 1 -- no-such-command", "no such command: no-such-command"),
    ],
)
def test_bad_input_is_one_line(registry: Path, cluster_script: Make, words: str, line: str) -> None:
    done = cluster_script(*words.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"virtual_cluster: {line}\n")
    assert clusters(registry) == set()


def test_a_host_that_is_not_there(registry: Path, virtual_cluster: Make) -> None:
    cluster = virtual_cluster(hosts=2)
    done = cluster.exec("9", ["true"])
    assert done.returncode == 2
    hosts = f"{cluster.name}-0, {cluster.name}-1"
    assert done.stderr == f"virtual_cluster: no host '9' in {cluster.name}: hosts are 0 to 1 ({hosts})\n"


# Root may give up being root, and programs may be missing, in a process that has loaded what it needs.
@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("os.seteuid(65534)", "network namespaces need root: use sudo"),
        ("network.shutil.which = lambda *words, **more: None", "no ip: install iproute2"),
    ],
    ids=["not root", "no iproute2"],
)
def test_what_a_machine_lacks_is_one_line(before: str, line: str) -> None:
    program = f"import os, sys; from vcluster import cli, network; {before}; sys.exit(cli.main(['check']))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts/lib")},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"virtual_cluster: {line}")
    assert done.stderr.count("\n") == 1


def test_it_is_a_program_of_its_own(registry: Path) -> None:
    done = subprocess.run([SCRIPT, "--help"], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "run -- CMD: start CMD on every rank" in done.stdout
