"""The libraries that perform collectives: one module each, loaded when it is used.

A new backend is one module with a class that has ``Backend``'s methods, and one entry here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commbench.cases import BUFFERS, Case, is_own
from commbench.registry import Registry


def _cuda_missing() -> str | None:
    """Why torch will find no CUDA device; asks the driver, which is quicker than importing torch."""
    return _no_device() or _torch_without_cuda()


def _no_device() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver on this machine (libcuda.so.1 is missing): run it on a machine with a GPU"
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU: run it on a machine with a GPU, or check CUDA_VISIBLE_DEVICES"
    return None


def _torch_without_cuda() -> str | None:
    """Whether this is a CPU build, from the text of torch/version.py: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *(.+)$", text, re.MULTILINE))
    if found.get("cuda") != "None" or found.get("hip", "None") != "None":
        return None
    return f"torch {found.get('__version__', '').strip(chr(39))} is built without CUDA: install a CUDA build of torch"


def _find(module: str) -> object | None:
    """Where a module is, which may be inside a package that is not there."""
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo:
    """What is known of a backend before it is loaded.

    ``needs`` is the module that must be importable, ``install`` what provides it; ``starter`` says how commbench
    starts its ranks where no launcher does; ``missing`` says what else this machine lacks, or None; ``buffers`` are the
    kinds of memory that it can be given; ``graphs``: whether its device can launch captured operations; ``dispatches``:
    whether it has dispatch and combine itself, and nothing else.
    """

    name: str
    target: str
    needs: str
    install: str
    starter: str
    missing: Callable[[], str | None] = lambda: None
    buffers: tuple[str, ...] = ("plain",)
    graphs: bool = False
    dispatches: bool = False

    def why_unavailable(self) -> str | None:
        """One line on why this backend cannot run here and what to do, or None."""
        if _find(self.needs) is None:
            return f"backend {self.name!r} needs {self.needs}: {self.install}"
        lacking = self.missing()
        return f"backend {self.name!r}: {lacking}" if lacking else None


BACKENDS: dict[str, BackendInfo] = {
    info.name: info
    for info in (
        BackendInfo(
            name="gloo", target="commbench.backends.gloo:Gloo", needs="torch",
            install="pip install torch", starter="spawn",
        ),
        BackendInfo(
            name="nccl", target="commbench.backends.nccl:Nccl", needs="torch",
            install="pip install torch", starter="spawn", missing=_cuda_missing, graphs=True,
        ),
        BackendInfo(
            name="nccl_raw", target="commbench.backends.nccl_raw:NcclRaw", needs="cupy",
            install="pip install 'commbench[cuda13]', or 'commbench[cuda12]' for a driver of CUDA 12", starter="spawn",
            missing=_no_device, buffers=BUFFERS, graphs=True,
        ),
        BackendInfo(
            name="deepep", target="commbench.backends.deepep:DeepEp", needs="deep_ep",
            install="build it for this torch and CUDA from github.com/deepseek-ai/DeepEP", starter="spawn",
            missing=_cuda_missing, dispatches=True,
        ),
        BackendInfo(
            name="nccl_ep", target="commbench.backends.nccl_ep:NcclEp", needs="nccl.ep",
            install="pip install 'commbench[moe]' and 'commbench[cuda13]', or 'commbench[cuda12]' for a driver of CUDA 12",
            starter="spawn", missing=_cuda_missing, dispatches=True,
        ),
        BackendInfo(
            name="mpi", target="commbench.backends.mpi:Mpi", needs="mpi4py",
            install="pip install 'commbench[mpi]'", starter="mpirun",
        ),
    )
}  # fmt: skip


def why_not_buffers(case: Case) -> str | None:
    """Why a case cannot have the kind of buffers that it asks for, whatever is installed; None where it can."""
    if case.buffers == "plain":
        return None
    if case.buffers not in BACKENDS[case.backend].buffers:
        return f"{case.backend} cannot be told of its buffers: there are no {case.buffers} ones"
    if is_own(case.algorithm):
        return f"the buffers of commbench's own algorithms are plain, not {case.buffers}"
    return None


def why_not_graph(case: Case) -> str | None:
    """Why a case cannot be executed as it asks for, whatever is installed; None where it can."""
    if case.execution == "eager" or BACKENDS[case.backend].graphs:
        return None
    return f"{case.backend} works on the host, and only a device launches graphs"


REGISTRY = Registry("backend", {info.name: info.target for info in BACKENDS.values()})
