"""How a parallel command is started in a cluster: with one mpirun over the hosts, one torchrun a host, or as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vcluster import ClusterError, registry
from vcluster.network import NIC
from vcluster.registry import Cluster
from vcluster.session import Command

LAUNCHERS = ("mpirun", "torchrun", "none")
_TORCH_BACKENDS = {"gloo", "nccl"}
_TORCHRUN_PORT = 29500  # nobody else is in the network

# A variable that the user has set stays as it is.
_DEFAULTS = {
    # Ranks of all hosts share this machine's cores: spinning takes them from each other, and so does binding.
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:OVERSUBSCRIBE",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # mpirun would wait six minutes for a host that was cut off; commbench, which names it, needs its deadline.
    "PRTE_MCA_oob_tcp_keepalive_time": "20",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
    # UCX takes hosts with one kernel for one machine, and goes around the network or prints errors.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "self,sm,tcp",
    "UCX_TLS": "self,tcp",
    "UCX_NET_DEVICES": NIC,
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": NIC,
    "OMPI_MCA_btl_tcp_if_include": NIC,
    # Otherwise a request to send may wait behind a whole message of the other direction, and an exchange take twice as
    # long as the link needs, by chance.
    "OMPI_MCA_btl_tcp_flags": "send",
    "OMPI_MCA_btl_tcp_sndbuf": "65536",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "HYDRA_LAUNCHER": "ssh",
    "HYDRA_IFACE": NIC,
    "COMMBENCH_INTERFACE": NIC,
    "GLOO_SOCKET_IFNAME": NIC,
    "NCCL_SOCKET_IFNAME": NIC,
}


def environment(cluster: Cluster, base: Mapping[str, str], program: str) -> dict[str, str]:
    """``base`` for commands inside: what makes MPI, gloo and NCCL use the cluster's network, and mpirun its hosts.

    ``program``'s folder and the checkout's virtual environment are added to the end of PATH, if they are there.
    """
    folders = [Path(program).parent] if "/" in program else []
    folders.append(_checkout() / os.environ.get("VENV", ".venv") / "bin")
    found = [str(folder.absolute()) for folder in folders if folder.is_dir()]
    return {
        **_DEFAULTS,
        "PRTE_MCA_prte_default_hostfile": str(cluster.hostfile()),
        "HYDRA_HOST_FILE": str(cluster.hostfile(mpich=True)),
        **base,
        "PRTE_MCA_plm_ssh_agent": str(cluster.agent),
        "HYDRA_LAUNCHER_EXEC": str(cluster.agent),
        registry.CLUSTER: cluster.name,
        registry.DIRECTORY: str(registry.root()),
        "PATH": os.pathsep.join([base.get("PATH", os.defpath), *found]),
    }


def choose_launcher(argv: Sequence[str]) -> str:
    """``torchrun`` for a ``commbench run`` or ``calibrate`` of torch's backends alone; ``mpirun``, which serves both, for the rest."""
    backends = _commbench_backends(argv)
    return "torchrun" if backends and backends <= _TORCH_BACKENDS else "mpirun"


def on_host(cluster: Cluster, host: int, argv: Sequence[str], base: Mapping[str, str]) -> Command:
    """``argv`` once, on one host. Raises ClusterError."""
    mine = environment(cluster, base, argv[0])
    _find(argv[0], mine)
    return Command(host=host, argv=argv, environment=mine)


def commands(cluster: Cluster, launcher: str, argv: Sequence[str], base: Mapping[str, str]) -> list[Command]:
    """What to run where, for ``argv`` on every rank, or once on the first host. Raises ClusterError."""
    mine = environment(cluster, base, argv[0])
    if launcher == "none":
        return [on_host(cluster, 0, argv, base)]
    path = _beside(_find(argv[0], mine), launcher) or shutil.which(launcher, path=mine["PATH"])
    if path is None:
        how = {"mpirun": "pip install 'commbench[mpi]'", "torchrun": "pip install torch"}[launcher]
        raise ClusterError(f"no {launcher} beside {argv[0]} or on PATH: {how}")
    if launcher == "mpirun":
        ranks = len(cluster.hosts) * cluster.ranks_per_host
        return [Command(host=0, argv=[path, *_hosts(path, cluster), "-n", str(ranks), *argv], environment=mine)]
    shared = [
        path, "--nnodes", str(len(cluster.hosts)), "--nproc-per-node", str(cluster.ranks_per_host),
        "--master-addr", cluster.addresses[0], "--master-port", str(_TORCHRUN_PORT),
    ]  # fmt: skip
    return [
        Command(
            host=index, argv=[*shared, "--node-rank", str(index), "--no-python", *argv], environment=mine,
            reads_input=index == 0,
        )
        for index in range(len(cluster.hosts))
    ]  # fmt: skip


def _find(program: str, variables: Mapping[str, str]) -> str:
    # Before the cluster is troubled: a launcher would say it in fifteen lines.
    path = shutil.which(program, path=variables["PATH"])
    if path is None:
        raise ClusterError(f"no such command: {program}")
    return path


def _beside(program: str, launcher: str) -> str | None:
    """The launcher of the environment that a program is in: an MPI works with its own mpirun only."""
    folder = os.path.dirname(program)
    return None if folder in os.defpath.split(os.pathsep) else shutil.which(launcher, path=folder)


def _hosts(mpirun: str, cluster: Cluster) -> list[str]:
    """The options that name the hosts; the environment has the rest."""
    try:
        said = subprocess.run([mpirun, "--version"], check=False, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(f"{mpirun} --version failed: {error}") from None
    if "Open MPI" in said or "PRRTE" in said.upper():
        return ["--hostfile", str(cluster.hostfile())]
    return ["-f", str(cluster.hostfile(mpich=True))]


def _commbench_backends(argv: Sequence[str]) -> set[str]:
    """The backends that a ``commbench run`` or ``calibrate`` names; none for any other command."""
    if not any(Path(word).name == "commbench" for word in argv) or not {"run", "calibrate"} & set(argv):
        return set()
    named: set[str] = set()
    for index, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if option == "--backend":
            named.update((value if equals else " ".join(argv[index + 1 : index + 2])).split(","))
    return named


def _checkout() -> Path:
    return Path(__file__).resolve().parents[3]
