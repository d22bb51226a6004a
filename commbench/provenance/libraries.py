"""Versions of what this process has loaded. Nothing is imported to find out: asking must not change the answer."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from commbench import __version__
from commbench.provenance.sources import ROOT, attempt, read

_MODULES = ("numpy", "torch", "mpi4py", "cupy", "nvshmem", "nccl", "deep_ep", "triton", "ray")
_SHARED = re.compile(
    r"/lib(nccl|nccl-net|rccl|mpi|pmix|ucp|ucc|ucs|fabric|ibverbs|mlx5|cuda|cudart|nvshmem_host|gloo|nvidia-ml|torch_cpu"
    r"|torch_cuda)(-[\w.]+)?\.so[\w.]*$"
)


def collect_libraries(root: Path = ROOT) -> dict[str, Any]:
    """Versions of the interpreter and of the libraries already in ``sys.modules``; None for one without a version.

    ``loaded`` are the files of the communication libraries mapped into this process. Never raises.
    """
    found: dict[str, Any] = {
        "commbench": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
    }
    found.update({name: attempt(_version, sys.modules[name]) for name in _MODULES if name in sys.modules})
    for name, key, ask in (
        ("mpi4py.MPI", "mpi_library", _mpi_library),
        ("torch", "torch_build", _torch_build),
    ):
        if name in sys.modules:
            found[key] = attempt(ask, sys.modules[name])
    found["loaded"] = attempt(_loaded, root)
    return found


def _version(module: ModuleType) -> str | None:
    version = getattr(module, "__version__", None)
    return None if version is None else str(version)


def _mpi_library(mpi: Any) -> str:
    # MPI allows this call before MPI_Init and after MPI_Finalize (MPI 4.1 §9.1.1).
    return str(mpi.Get_library_version()).strip().strip("\0").splitlines()[0]


def _torch_build(torch: Any) -> dict[str, Any]:
    cuda = torch.version.cuda
    return {
        "git": torch.version.git_version,
        "cuda": cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and hasattr(torch.cuda, "nccl") else None,
    }


def _loaded(root: Path) -> list[str]:
    lines = (read(root, "proc/self/maps") or "").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if _SHARED.search(path))
