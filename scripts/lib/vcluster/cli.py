"""The command line of scripts/virtual_cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from vcluster import ClusterError, keeper, launch, network, registry, session
from vcluster.registry import Cluster

EXIT_USAGE = 2
_RATE = "200mbit"
EPILOG = """\
HOST is a host's name, address, or index from 0. RATE is such as 200mbit, in each direction.
run without --hosts uses a cluster that is up. See docs/virtual_cluster.md."""


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        raise ClusterError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code. What is wrong is one line on standard error, and exit code 2."""
    words, inner = list(argv), None
    if "--" in words:
        cut = words.index("--")
        words, inner = words[:cut], words[cut + 1 :]
    try:
        options = _parser().parse_args(words)
        options.inner = _inner(options.command, inner)
        _check_root()
        code: int = options.does(options)
        sys.stdout.flush()
    except ClusterError as error:
        print(f"virtual_cluster: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains when it flushes
        return 141
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="virtual_cluster", description="A cluster of network namespaces on this machine.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help: str, does: object, *, cluster: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        one.set_defaults(does=does)
        if cluster:
            one.add_argument("--cluster", metavar="NAME", help="which cluster; not needed where there is one")
        return one

    run = add("run", "run -- CMD: start CMD on every rank, in a new cluster for CMD alone or in one that is up", _run)
    _shape(run)
    run.add_argument(
        "--launcher", choices=launch.LAUNCHERS,
        help="mpirun over the hosts, a torchrun on each, or none: CMD once, on the first host (default: what fits CMD)",
    )  # fmt: skip
    up = add("up", "make a cluster that stays, and print its name", _up, cluster=False)
    _shape(up)
    up.add_argument("--owner", type=int, metavar="PID", help="a process; the cluster goes away when it ends")
    add("exec", "exec HOST -- CMD: run CMD on one host", _exec).add_argument("host", metavar="HOST")
    add("status", "a line a host: name, address, rate, connected or cut", _status)
    add("hostfile", "print the hosts as mpirun --hostfile reads them", _hostfile)
    slow = add("slow", "give one host another rate", _slow)
    slow.add_argument("host", metavar="HOST")
    slow.add_argument("rate", metavar="RATE")
    add("cut", "pull the cable of one host", _cut).add_argument("host", metavar="HOST")
    add("heal", "undo every slow and cut", _heal)
    down = add("down", "take a cluster down", _down)
    down.add_argument("--all", action="store_true", help="every cluster of this machine, whoever owns it")
    add("check", "say whether this machine can have a cluster", _check, cluster=False)
    return parser


def _shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, metavar="N", help=f"hosts of a new cluster (1 to {registry.MAX_HOSTS})")
    parser.add_argument("--rate", metavar="RATE", help=f"of every link, in each direction (default {_RATE})")
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="(default 1)")


def _inner(command: str, inner: list[str] | None) -> list[str]:
    if command in ("run", "exec"):
        if not inner:
            raise ClusterError(f"no command: write {command} … -- CMD")
        return inner
    if inner is not None:
        raise ClusterError(f"{command} takes no command after --")
    return []


def _check_root() -> None:
    if sys.platform != "linux":
        raise ClusterError("network namespaces are Linux's")
    if os.geteuid() != 0:
        raise ClusterError("network namespaces need root: use sudo")
    for name in ("ip", "tc"):
        network.program(name)


# -- the commands --------------------------------------------------------------------------------------


def _make(options: argparse.Namespace, owner: int | None) -> Cluster:
    hosts, ranks = options.hosts, 1 if options.ranks_per_host is None else options.ranks_per_host
    if hosts is None:
        raise ClusterError("say how many: --hosts N")
    if not 1 <= hosts <= registry.MAX_HOSTS:
        raise ClusterError(f"--hosts {hosts} is outside 1 to {registry.MAX_HOSTS}")
    if ranks < 1:
        raise ClusterError(f"--ranks-per-host {ranks} is below 1")
    rate = network.parse_rate(options.rate or _RATE)
    registry.clean()
    return keeper.start(hosts, ranks, rate, owner)


def _run(options: argparse.Namespace) -> int:
    new = options.hosts is not None
    if new and options.cluster:
        raise ClusterError("--hosts makes a new cluster and --cluster takes one that is up: name one of them")
    if not new and (options.rate or options.ranks_per_host):
        raise ClusterError("--rate and --ranks-per-host belong to a new cluster: add --hosts N")
    cluster = _make(options, os.getpid()) if new else registry.find(options.cluster)
    try:
        chosen = options.launcher or launch.choose_launcher(options.inner)
        return session.run(cluster, launch.commands(cluster, chosen, options.inner, os.environ))
    finally:
        if new:
            keeper.take_down(cluster)


def _up(options: argparse.Namespace) -> int:
    print(_make(options, options.owner).name)
    return 0


def _exec(options: argparse.Namespace) -> int:
    cluster = registry.find(options.cluster)
    host = cluster.host(options.host)
    return session.run(cluster, [launch.on_host(cluster, host, options.inner, os.environ)])


def _status(options: argparse.Namespace) -> int:
    chosen = [registry.find(options.cluster)] if options.cluster else registry.living()
    for cluster in chosen:
        links = keeper.ask(cluster, "status")["links"]
        for host, address, (rate, cut) in zip(cluster.hosts, cluster.addresses, links, strict=True):
            print(host, address, network.format_rate(rate), "cut" if cut else "connected")
    return 0


def _hostfile(options: argparse.Namespace) -> int:
    print(registry.find(options.cluster).hostfile().read_text(), end="")
    return 0


def _slow(options: argparse.Namespace) -> int:
    cluster, rate = registry.find(options.cluster), network.parse_rate(options.rate)
    keeper.ask(cluster, "slow", host=cluster.host(options.host), rate=rate)
    return 0


def _cut(options: argparse.Namespace) -> int:
    cluster = registry.find(options.cluster)
    keeper.ask(cluster, "cut", host=cluster.host(options.host))
    return 0


def _heal(options: argparse.Namespace) -> int:
    keeper.ask(registry.find(options.cluster), "heal")
    return 0


def _down(options: argparse.Namespace) -> int:
    if options.all and options.cluster:
        raise ClusterError("--all and --cluster exclude each other")
    for cluster in registry.living() if options.all else [registry.find(options.cluster)]:
        keeper.take_down(cluster)
    registry.clean()
    return 0


def _check(options: argparse.Namespace) -> int:
    cluster = keeper.start(1, 1, network.parse_rate(_RATE), os.getpid())
    try:
        return session.run(cluster, [launch.on_host(cluster, 0, [sys.executable, "-S", "-c", ""], os.environ)])
    finally:
        keeper.take_down(cluster)
