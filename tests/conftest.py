"""Which tests this machine can run: a marker names what a test needs, and where that is missing the test says so."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from commbench.launch.start import find_mpirun
from commbench.models.links import Link, Links
from commbench.store.calibration import write_calibration


def _why_no_mpi() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py"
    return None if find_mpirun() else "no mpirun: pip install -e '.[mpi]'"


def _why_no_lab() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install iproute2 util-linux"
    # Root in a container often may not.
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False, timeout=20)
    return None if tried.returncode == 0 else "this root may not make network namespaces"


def _why_no_gpu() -> str | None:
    # Device files first: importing torch takes seconds, and most machines have none of them.
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return "no NVIDIA device in /dev"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _why_no_browser() -> str | None:
    return None if shutil.which("chromium") else "no chromium: apt-get install chromium"


WHY_NOT: dict[str, Callable[[], str | None]] = {
    "mpi": functools.cache(_why_no_mpi),
    "lab": functools.cache(_why_no_lab),
    "gpu": functools.cache(_why_no_gpu),
    "browser": functools.cache(_why_no_browser),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test below tests/mpi, tests/lab, tests/gpu or tests/browser has that marker."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if folder in WHY_NOT:
            item.add_marker(folder)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Asked only when the test is about to run: a deselected GPU test costs nothing."""
    for marker, why_not in WHY_NOT.items():
        if item.get_closest_marker(marker) and (reason := why_not()):
            pytest.skip(reason)


@pytest.fixture(scope="session")
def links_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For ``--calibration`` of runs of which nothing is asked that depends on it: measuring links takes each seconds."""
    file = tmp_path_factory.mktemp("links") / "links.json"
    same, other = Link(latency_s=1e-6, seconds_per_byte=1e-10), Link(latency_s=5e-5, seconds_per_byte=8e-8)
    links = Links(same_host=same, other_host=other).to_dict()
    backends = {name: {"version": "", "settings": {}, "links": links, "windows": []} for name in ("gloo", "mpi")}
    write_calibration(file, hosts=("a", "b"), backends=backends)
    return file
