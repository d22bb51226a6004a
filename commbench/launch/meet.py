"""How ranks that somebody else started find the hub: through what their launcher gives.

MPI launchers broadcast rank 0's address and a random token. torchrun's agent has a store. srun and the env:// variables
give an address that every rank can work out, and no secret: there the token only keeps strangers' mistakes out,
unless COMMBENCH_TOKEN is set for the job.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from commbench.launch.hostlist import expand_hostlist
from commbench.launch.network import job_address, listen
from commbench.launch.place import LaunchError, Place
from commbench.launch.startup import startup_s

_MPI_LAUNCHERS = ("openmpi", "mvapich2", "pals", "hydra", "flux", "jsm")
_PORTS = (20000, 12000)  # first, count: below Linux's ephemeral ports


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the hub is. ``listener`` is its socket, at rank 0 only."""

    address: tuple[str, int]
    token: str
    listener: socket.socket | None = None


def meet(place: Place) -> Meeting:
    """Agree on the hub's address and token with all ranks. Raises LaunchError with one line that says what to do."""
    return _meeting_of(place.launcher)(place)


def part() -> None:
    """End MPI where it was started to meet and no backend has ended it: mpirun calls anything else a crash."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _meeting_of(launcher: str) -> Callable[[Place], Meeting]:
    if launcher in _MPI_LAUNCHERS:
        return _by_mpi
    return {"torchrun": _by_torchrun, "slurm": _by_slurm, "env": _by_environment}[launcher]


def _open(place: Place) -> tuple[socket.socket, str]:
    try:
        listener = listen(job_address(place.local_world == place.world))
    except (OSError, ValueError) as error:
        raise LaunchError(f"rank 0 cannot listen: {error}") from None
    return listener, os.environ.get("COMMBENCH_TOKEN") or secrets.token_hex(16)


def _by_mpi(place: Place) -> Meeting:
    # Imported here: only these launchers need MPI to meet.
    try:
        import mpi4py

        mpi4py.rc.thread_level = "single"
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{place.launcher} started this rank, but mpi4py cannot start MPI ({error}): "
            "pip install 'commbench[mpi]' or mpi4py for the cluster's MPI"
        ) from None
    world = MPI.COMM_WORLD
    if world.Get_size() != place.world or world.Get_rank() != place.rank:
        raise LaunchError(
            f"MPI says rank {world.Get_rank()} of {world.Get_size()} where {place.launcher} says rank {place.rank} of "
            f"{place.world}: start with the mpirun that belongs to mpi4py's MPI ({MPI.get_vendor()[0]})"
        )
    message = bytearray(256)
    listener = None
    if place.rank == 0:
        listener, token = _open(place)
        host, port = listener.getsockname()
        text = f"{host} {port} {token}".encode()
        message[: len(text)] = text
    world.Bcast([message, MPI.BYTE], 0)
    host, port, token = message.rstrip(b"\0").decode().split()
    return Meeting(address=(host, int(port)), token=token, listener=listener)


def _by_torchrun(place: Place) -> Meeting:
    if place.facts.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _by_environment(place)
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    facts = place.facts
    listener = None
    patience = startup_s()
    try:
        agent = TCPStore(
            facts["MASTER_ADDR"], _port(facts), is_master=False, timeout=datetime.timedelta(seconds=patience)
        )
        store = PrefixStore(f"commbench/{facts.get('TORCHELASTIC_RESTART_COUNT', '0')}", agent)
        if place.rank == 0:
            listener, token = _open(place)
            host, port = listener.getsockname()
            store.set("hub", f"{host} {port} {token}")
        host, port, token = store.get("hub").decode().split()
    except RuntimeError:  # torch's network errors are of this kind, some with a C++ backtrace as their text
        raise LaunchError(
            f"no word from rank 0 through torchrun's store at {facts['MASTER_ADDR']}:{facts['MASTER_PORT']} within "
            f"{patience:.0f} s: check that rank 0 was started and that this host can reach the store"
        ) from None
    return Meeting(address=(host, int(port)), token=token, listener=listener)


def _by_slurm(place: Place) -> Meeting:
    facts = place.facts
    first, count = _PORTS
    key = f"{facts['SLURM_JOB_ID']}.{facts['SLURM_STEP_ID']}"
    port = first + int(hashlib.sha256(key.encode()).hexdigest(), 16) % count
    try:
        host = expand_hostlist(facts["SLURM_STEP_NODELIST"])[0]
    except (ValueError, IndexError) as error:
        raise LaunchError(f"cannot read SLURM_STEP_NODELIST={facts['SLURM_STEP_NODELIST']!r} ({error})") from None
    return _at(place, host, port, key)


def _by_environment(place: Place) -> Meeting:
    host, port = place.facts["MASTER_ADDR"], _port(place.facts)
    return _at(place, host, port, f"{host}:{port}")


def _port(facts: dict[str, str]) -> int:
    text = facts["MASTER_PORT"]
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise LaunchError(f"MASTER_PORT={text[:40]!r} is not a port: set it to a number from 1 to 65535")
    return int(text)


def _at(place: Place, host: str, port: int, key: str) -> Meeting:
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise LaunchError(f"cannot resolve rank 0's host {host!r} ({error.strerror})") from None
    token = os.environ.get("COMMBENCH_TOKEN") or hashlib.sha256(f"{os.getuid()} {key}".encode()).hexdigest()[:32]
    listener = None
    if place.rank == 0:
        try:
            listener = listen(address, port)
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen at {host}:{port} ({error.strerror}): is it on that host?"
            ) from None
    return Meeting(address=(address, port), token=token, listener=listener)
