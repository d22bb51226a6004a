"""``commbench doctor``: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from commbench import __version__
from commbench.backends import BACKENDS, BackendInfo
from commbench.cli.doctor_gpus import gpu_lines
from commbench.launch.network import interfaces
from commbench.launch.place import LaunchError, Place, detect
from commbench.launch.start import find_mpirun, mpirun_command, mpirun_environment
from commbench.provenance.gpu import collect_gpus
from commbench.provenance.gpu_topology import collect_topology
from commbench.provenance.host import collect_host
from commbench.provenance.network import collect_network
from commbench.provenance.sources import attempt, command

PROBE_S = 15.0
# The alarm ends a rank that mpirun left behind. Rank 0 alone speaks: N singletons would all be rank 0 of 1.
_PROBE = f"""
import signal
signal.alarm({PROBE_S:.0f})
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.Get_rank() == 0:
    print(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version().split(',')[0].splitlines()[0])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the answer. ``ok`` None is neither good nor bad: a fact."""

    subject: str
    text: str
    ok: bool | None = None


def doctor() -> None:
    """Say what this machine can run, and what to install for the rest.

    Ends with 0 if at least one backend can run here, else with 2.
    """
    checks = list(examine())
    for check in checks:
        mark = {None: "   ", True: typer.style("yes", fg="green"), False: typer.style("no ", fg="yellow")}[check.ok]
        typer.echo(f"{check.subject:<9} {mark} {check.text}".rstrip())
    if not any(check.ok for check in checks if check.subject in BACKENDS):
        raise typer.Exit(2)


def examine() -> Iterator[Check]:
    """Every check in the order it is shown: the machine, how ranks start, then one line a backend."""
    yield Check(subject="machine", text=_machine(collect_host()))
    yield Check(subject="python", text=f"{platform.python_version()} with commbench {__version__}, {sys.executable}")
    yield from _gpus()
    yield Check(subject="network", text=_network(collect_network(), interfaces()))
    place, text = _launcher()
    yield Check(subject="launcher", text=text)
    mpirun = probe_mpirun(find_mpirun(), place)
    yield mpirun
    for info in BACKENDS.values():
        yield _backend(info, mpirun)
    yield Check(subject="extras", text=_extras())


def probe_mpirun(mpirun: str | None, place: Place | None) -> Check:
    """Whether mpi4py's ranks find one another when ``mpirun`` starts two of them (not tried below a launcher)."""
    if mpirun is None:
        return Check(
            subject="mpirun", ok=False, text="not found: pip install 'commbench[mpi]', or load your site's MPI"
        )
    if place is not None:
        return Check(subject="mpirun", text=f"{mpirun} (not tried, for {place.launcher} started this)")
    start = time.monotonic()
    try:
        argv = [*mpirun_command(mpirun, 2, oversubscribed=True), sys.executable, "-c", _PROBE]
        said = command(argv, timeout_s=PROBE_S, environ=mpirun_environment(os.environ, oversubscribed=True)).split(
            maxsplit=1
        )
    except (OSError, RuntimeError) as error:
        fix = "install mpi4py for this MPI (pip install --no-binary mpi4py mpi4py), or use pip install 'commbench[mpi]'"
        return Check(subject="mpirun", ok=False, text=f"{mpirun} cannot start mpi4py ({_one_line(error)}): {fix}")
    if said[:1] != ["2"]:
        lone = "mpi4py's ranks do not find one another: it is loaded with another MPI than this mpirun's"
        return Check(subject="mpirun", ok=False, text=f"{mpirun}: {lone}; pip install 'commbench[mpi]' brings a pair")
    took = time.monotonic() - start
    return Check(subject="mpirun", ok=True, text=f"{mpirun}, {said[1].strip()}, started 2 ranks in {took:.1f} s")


def _backend(info: BackendInfo, mpirun: Check) -> Check:
    reason = info.why_unavailable()
    if reason is not None:
        return Check(subject=info.name, ok=False, text=reason.removeprefix(f"backend {info.name!r}").lstrip(": "))
    if info.starter == "mpirun" and mpirun.ok is False:
        return Check(subject=info.name, ok=False, text=f"{_version(info.needs)}, but mpirun cannot start it: see above")
    return Check(subject=info.name, ok=True, text=_version(info.needs))


def _version(module: str) -> str:
    """Name and version of the distribution that provides a module, without importing it."""
    try:
        return f"{module} {importlib.metadata.version(module)}"
    except importlib.metadata.PackageNotFoundError:
        provider = next(iter(importlib.metadata.packages_distributions().get(module, [])), None)
        return f"{provider} {importlib.metadata.version(provider)}" if provider else module


def _extras() -> str:
    """Which of commbench's optional dependencies are there, by the name that pip knows them under."""
    try:
        requirements = importlib.metadata.requires("commbench") or []
    except importlib.metadata.PackageNotFoundError:
        return "unknown, for commbench is not installed: pip install -e '.[mpi]' in its checkout"
    complete: dict[str, bool] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", requirement)
        if match:
            complete[match[2]] = complete.get(match[2], True) and _is_installed(match[1])
    there = ", ".join(name for name, whole in complete.items() if whole) or "none"
    absent = " ".join(f"'commbench[{name}]'" for name, whole in complete.items() if not whole)
    return there + (f"; to add: pip install {absent}" if absent else "")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _machine(host: dict[str, Any]) -> str:
    cpu, memory, load = (host.get(part) or {} for part in ("cpu", "memory", "load"))
    shm = (load.get("shm") or {}).get("free_bytes")
    quota = (host.get("container") or {}).get("cpu_quota")
    parts = [
        f"{host.get('hostname') or 'unknown'}: {cpu.get('logical') or os.cpu_count()} cores",
        f"{len(os.sched_getaffinity(0))} usable" + (f" (limited to {quota:g} by its control group)" if quota else ""),
        f"{_gigabytes(memory.get('total_bytes'))} memory",
        f"{_gigabytes(load.get('available_bytes'))} free",
        f"/dev/shm {_gigabytes(shm)} free" if shm else "no /dev/shm",
    ]
    return ", ".join(parts)


def _gpus() -> Iterator[Check]:
    """By NVIDIA's management library where it is there, else by nvidia-smi."""
    gpus = attempt(collect_gpus)
    if not gpus or not gpus.get("devices"):
        failed = f"; NVML fails: {gpus['error']}" if gpus and "error" in gpus else ""
        yield Check(subject="GPU", text=_listed_gpus() + failed)
        return
    for text, ok in gpu_lines(gpus, attempt(collect_topology) or {"error": "NVML has gone"}):
        yield Check(subject="GPU", text=text, ok=ok)


def _listed_gpus() -> str:
    argv = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        lines = command(argv, timeout_s=5).strip().splitlines()
    except (OSError, RuntimeError) as error:
        return "none found" if isinstance(error, FileNotFoundError) else f"unknown ({_one_line(error)})"
    kinds = dict.fromkeys(lines)
    return "; ".join(f"{lines.count(kind)} x {kind}" for kind in kinds) or "none found"


def _network(network: dict[str, Any], addresses: dict[str, str]) -> str:
    parts = []
    for name, address in addresses.items():
        facts = network["interfaces"].get(name, {})
        speed = facts.get("speed_bps")
        rate = f", {speed / 1e9:g} Gb/s" if speed else ""
        parts.append(f"{name} {address} (mtu {facts.get('mtu', '?')}{rate})")
    for device, facts in network["infiniband"].items():
        for port, state in facts.get("ports", {}).items():
            parts.append(f"{device}/{port} ({state.get('rate', '?')}, {state.get('state', '?')})")
    return "; ".join(parts) or "no interface with an address"


def _launcher() -> tuple[Place | None, str]:
    try:
        place = detect(os.environ)
    except LaunchError as error:
        return None, f"unclear: {error}"
    if place is None:
        return None, "none: commbench run starts its own ranks"
    warning = f" ({place.warnings[0]})" if place.warnings else ""
    return place, f"{place.launcher}: rank {place.rank} of {place.world}{warning}"


def _gigabytes(size: int | None) -> str:
    return "? GB" if size is None else f"{size / 1e9:.3g} GB"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
