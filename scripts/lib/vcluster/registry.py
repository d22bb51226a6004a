"""Which clusters there are: one directory each, with what is needed to reach its keeper and to know whether it lives.

Names and subnets are drawn at random. The kernel removes namespaces and processes of a cluster with its keeper, so all
that a dead one can leave behind is its directory.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shutil
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcluster import ClusterError
from vcluster.kernel import start_time

DIRECTORY = "VIRTUAL_CLUSTER_DIR"  # where the directories are; an environment variable
CLUSTER = "VIRTUAL_CLUSTER"  # the cluster that a command inside one belongs to; an environment variable
_RECORD = "cluster.json"
_BENCHMARKING = ipaddress.ip_network("198.18.0.0/15")  # RFC 2544: for tests, routed nowhere
_BIRTH_S = 10.0
MAX_HOSTS = 64


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster as its directory has it. ``keeper`` and ``owner`` are (process id, start time) in ``pid_namespace``."""

    name: str
    subnet: str
    hosts: tuple[str, ...]
    ranks_per_host: int
    keeper: tuple[int, str]
    owner: tuple[int, str]
    pid_namespace: str

    @property
    def directory(self) -> Path:
        return root() / self.name

    @property
    def addresses(self) -> tuple[str, ...]:
        network = ipaddress.ip_network(self.subnet)
        return tuple(str(network[index + 1]) for index in range(len(self.hosts)))

    @property
    def agent(self) -> Path:
        """The remote shell of the launchers: ``agent HOST COMMAND``."""
        return self.directory / "agent"

    @property
    def hosts_file(self) -> Path:
        """What stands in for /etc/hosts on every host."""
        return self.directory / "hosts"

    def hostfile(self, mpich: bool = False) -> Path:
        """The hosts and their number of ranks, as Open MPI or MPICH reads them."""
        return self.directory / ("hostfile.mpich" if mpich else "hostfile")

    def host(self, wanted: str) -> int:
        """The index of a host given by name, index or address. Raises ClusterError."""
        for names in (self.hosts, self.addresses, tuple(map(str, range(len(self.hosts))))):
            if wanted in names:
                return names.index(wanted)
        last = len(self.hosts) - 1
        raise ClusterError(f"no host {wanted!r} in {self.name}: hosts are 0 to {last} ({', '.join(self.hosts)})")

    def write(self) -> None:
        """Make the directory's files; the record comes last and at once."""
        pairs = list(zip(self.addresses, self.hosts, strict=True))
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for address, host in pairs)]
        # torch's store looks peers of its IPv6 socket up, and complains about every one that has no name.
        lines += [f"::ffff:{address} {host}.mapped" for address, host in pairs]
        self.hosts_file.write_text("".join(f"{line}\n" for line in lines))
        self.hosts_file.chmod(0o644)  # by its bind mount for everybody
        for mpich, form in ((False, "{} slots={}\n"), (True, "{}:{}\n")):
            self.hostfile(mpich).write_text("".join(form.format(host, self.ranks_per_host) for host in self.hosts))
        # A link, because programs under /run may not be executed on many systems.
        self.agent.symlink_to(Path(__file__).resolve().with_name("agent"))
        draft = self.directory / "draft"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(self.directory / _RECORD)

    @property
    def socket(self) -> Path:
        """Where the keeper listens."""
        return self.directory / "socket"

    def is_alive(self) -> bool:
        """Whether its keeper is."""
        if self.pid_namespace == pid_namespace():
            return start_time(self.keeper[0]) == self.keeper[1] != ""
        # Asked from inside a cluster, where other processes are shown: who listens, lives.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def is_owned(self) -> bool:
        """Whether its owner lives, as far as can be seen from here."""
        return self.pid_namespace != pid_namespace() or start_time(self.owner[0]) == self.owner[1] != ""


def pid_namespace() -> str:
    """Which process ids mean the same."""
    return os.readlink("/proc/self/ns/pid")


def root() -> Path:
    """The directory of all clusters."""
    return Path(os.environ.get(DIRECTORY) or "/run/virtual_cluster")


def reserve(hosts: int, ranks_per_host: int, owner: tuple[int, str]) -> Cluster:
    """A new cluster's name, subnet and directory; this process is its keeper. Raises ClusterError."""
    taken = {cluster.subnet for cluster in living()}
    free = [str(net) for net in _BENCHMARKING.subnets(new_prefix=24) if str(net) not in taken]
    draw = random.SystemRandom()
    if not free:
        raise ClusterError("every subnet is taken: take some clusters down")
    while True:
        # Letters only: launchers compress host names by the numbers in them.
        name = "vc" + "".join(draw.choices("bcdfghjklmnpqrstvwxz", k=6))
        try:
            root().mkdir(mode=0o700, parents=True, exist_ok=True)
            (root() / name).mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise ClusterError(f"cannot make {root() / name}: {error.strerror}") from None
        return Cluster(
            name=name, subnet=draw.choice(free), hosts=tuple(f"{name}-{index}" for index in range(hosts)),
            ranks_per_host=ranks_per_host, keeper=(os.getpid(), start_time(os.getpid())), owner=owner,
            pid_namespace=pid_namespace(),
        )  # fmt: skip


def remove(cluster: Cluster) -> None:
    shutil.rmtree(cluster.directory, ignore_errors=True)


def living() -> list[Cluster]:
    """The clusters whose keeper lives, by name."""
    found = [_read(path) for path in _directories()]
    return [cluster for cluster in found if cluster is not None and cluster.is_alive()]


def find(name: str | None) -> Cluster:
    """The living cluster of that name (default: that of the environment, else the only one). Raises ClusterError."""
    name = name or os.environ.get(CLUSTER)
    found = [cluster for cluster in living() if name in (None, cluster.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ClusterError(f"several clusters are up: name one with --cluster: {', '.join(c.name for c in found)}")
    raise ClusterError(f"no cluster {name!r} is up" if name else "no cluster is up: make one with up --hosts N")


def clean() -> list[str]:
    """Remove what clusters left whose keeper or owner is dead; their names. Living ones are not touched."""
    cleaned = []
    for path in _directories():
        cluster = _read(path)
        if cluster is None:
            if not _is_old(path):
                continue
        elif cluster.is_alive():
            if cluster.is_owned():
                continue
            kill(cluster)
        shutil.rmtree(path, ignore_errors=True)
        cleaned.append(path.name)
    return cleaned


def kill(cluster: Cluster) -> None:
    """End a keeper that does not end by itself: everything in its cluster ends with it."""
    try:
        descriptor = os.pidfd_open(cluster.keeper[0])
    except ProcessLookupError:
        return
    try:
        if cluster.is_alive():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _directories() -> list[Path]:
    try:
        return sorted(path for path in root().iterdir() if path.is_dir())
    except FileNotFoundError:
        return []


def _read(path: Path) -> Cluster | None:
    try:
        values: dict[str, Any] = json.loads((path / _RECORD).read_text())
        pairs = {key: (int(values[key][0]), str(values[key][1])) for key in ("keeper", "owner")}
        return Cluster(**{**values, "hosts": tuple(values["hosts"]), **pairs})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # just being made, or cut short


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _BIRTH_S
    except OSError:
        return False
