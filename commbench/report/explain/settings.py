"""What the settings of communication libraries rule out: fast networks, shared memory, a free choice of algorithm.

Names and values as the libraries' documentation has them: Open MPI 5 (MCA parameters ``btl``, ``pml``, ``mtl``,
``coll``, ``coll_tuned_*``), UCX (``UCX_TLS``), Intel MPI (``I_MPI_FABRICS``, ``I_MPI_ADJUST_*``), libfabric
(``FI_PROVIDER``), NCCL (``NCCL_ALGO``, ``NCCL_PROTO``, ``NCCL_IB_DISABLE``, ``NCCL_NET``, ``NCCL_SHM_DISABLE``,
``NCCL_P2P_DISABLE``).
"""

from __future__ import annotations

from collections.abc import Mapping

from commbench.backends.forcing import NCCL_BACKENDS, OPEN_MPI

_MCA = "OMPI_MCA_"
_UCX_SHARED = ("sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem")
_UCX_RDMA = ("ib", "rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "ud", "ud_x", "ud_v", "ud_verbs", "ud_mlx5", "dc", "dc_x",
             "dc_mlx5", "srd", "gga", "ugni")  # fmt: skip
_OFI_TCP = ("tcp", "sockets", "udp", "net")


def no_shared_memory(backend: str, settings: Mapping[str, str]) -> str | None:
    """The setting that keeps ranks of one host from shared memory, or None."""
    if backend in NCCL_BACKENDS:
        return _on_text(settings, "NCCL_SHM_DISABLE") or _on_text(settings, "NCCL_P2P_DISABLE")
    if backend != "mpi":
        return None
    pml = _pml(settings)
    if pml not in ("ucx", "cm"):
        said = _excludes(settings, f"{_MCA}btl", ("sm", "vader"))
        if said:
            return said
    if pml == "ucx":
        return _excludes(settings, "UCX_TLS", _UCX_SHARED, everything=("all",))
    if pml == "cm":
        return _is_one_of(settings, "FI_PROVIDER", _OFI_TCP)
    fabrics = settings.get("I_MPI_FABRICS")
    return f"I_MPI_FABRICS={fabrics}" if fabrics and "shm" not in fabrics else None


def no_rdma(backend: str, settings: Mapping[str, str]) -> str | None:
    """The setting that keeps messages between hosts from InfiniBand or RoCE, or None."""
    if backend in NCCL_BACKENDS:
        return _on_text(settings, "NCCL_IB_DISABLE") or _is_one_of(settings, "NCCL_NET", ("socket",))
    if backend != "mpi":
        return None
    pml = _pml(settings)
    if pml == "ob1":
        btl = settings.get(f"{_MCA}btl", "")
        fast = btl.startswith("^") or any(name in btl.split(",") for name in ("uct", "ofi", "openib"))
        return None if fast else " ".join(filter(None, (f"{_MCA}pml=ob1", f"{_MCA}btl={btl}" if btl else None)))
    if pml != "cm":
        said = _excludes(settings, "UCX_TLS", _UCX_RDMA, everything=("all",))
        if said:
            return said
    return _is_one_of(settings, "FI_PROVIDER", _OFI_TCP) or _is_one_of(settings, "I_MPI_OFI_PROVIDER", _OFI_TCP)


def forced_algorithm(backend: str, collective: str, settings: Mapping[str, str]) -> str | None:
    """The setting that takes the choice of algorithm for a collective from the library, or None."""
    if backend in NCCL_BACKENDS:
        value = settings.get("NCCL_ALGO", "")
        return f"NCCL_ALGO={value}" if value and "^" not in value else None
    if backend != "mpi":
        return None
    name = OPEN_MPI.get(collective, ("", ()))[0]
    variable = f"{_MCA}coll_tuned_{name}_algorithm"
    if settings.get(variable, "0") not in ("0", "ignore") and _on(settings, f"{_MCA}coll_tuned_use_dynamic_rules"):
        return f"{variable}={settings[variable]}"
    rules = settings.get(f"{_MCA}coll_tuned_dynamic_rules_filename")
    if rules and _on(settings, f"{_MCA}coll_tuned_use_dynamic_rules"):
        return f"{_MCA}coll_tuned_dynamic_rules_filename={rules}"
    said = _excludes(settings, f"{_MCA}coll", ("tuned",))
    intel = f"I_MPI_ADJUST_{name.upper()}"
    return said or (f"{intel}={settings[intel]}" if settings.get(intel) else None)


def forced_protocol(backend: str, settings: Mapping[str, str]) -> str | None:
    """The setting that takes the choice of protocol from the library, or None."""
    if backend in NCCL_BACKENDS:
        value = settings.get("NCCL_PROTO", "")
        return f"NCCL_PROTO={value}" if value and "^" not in value else None
    if backend == "mpi" and _pml(settings) in (None, "ucx"):
        value = settings.get("UCX_RNDV_THRESH", "auto")
        return f"UCX_RNDV_THRESH={value}" if value != "auto" else None
    return None


def _pml(settings: Mapping[str, str]) -> str | None:
    value = settings.get(f"{_MCA}pml", "")
    return value if value and not value.startswith("^") else None


def _on(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "").lower() in ("1", "true", "yes", "on", "enabled")


def _on_text(settings: Mapping[str, str], name: str) -> str | None:
    return f"{name}={settings[name]}" if _on(settings, name) else None


def _is_one_of(settings: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    value = settings.get(name)
    return f"{name}={value}" if value and value.lower() in values else None


def _excludes(
    settings: Mapping[str, str], name: str, wanted: tuple[str, ...], everything: tuple[str, ...] = ()
) -> str | None:
    """The setting if its list names none of ``wanted``, or, beginning with ^, one of the first two, which stand for all."""
    value = settings.get(name)
    if not value:
        return None
    listed = value.removeprefix("^").split(",")
    if value.startswith("^"):
        return f"{name}={value}" if any(one in listed for one in wanted[:2]) else None
    return None if any(one in listed for one in (*wanted, *everything)) else f"{name}={value}"
