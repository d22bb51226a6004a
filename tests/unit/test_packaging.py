"""What pip installs: every module and every data file, and the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = {"_kernels": "kernels", "_scripts": "scripts"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of this checkout (a build in place leaves folders behind, and takes up old ones)."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "build", "*.so", "*.o")
    for folder in filter(lambda name: (ROOT / name).is_dir(), ("commbench", *LINKED.values())):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=skip)
    for file in ("pyproject.toml", "README.md"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source)
    (source / "kernels/build").mkdir(parents=True)
    (source / "kernels/build/leftover.bin").write_text("")
    argv = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", str(target), "."]
    made = subprocess.run(
        [sys.executable, "-m", "pip", *argv], cwd=source, capture_output=True, text=True, check=False, timeout=150
    )
    assert made.returncode == 0, made.stderr
    return zipfile.ZipFile(next(target.glob("*.whl")))


def files_below(folder: Path) -> set[str]:
    """Relative paths of what belongs into the wheel."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        str(path)
        for path in found
        if not {"__pycache__", "build"} & set(path.parts) and path.suffix not in (".pyc", ".so", ".o")
    }


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    inside = {name.removeprefix("commbench/") for name in wheel.namelist() if name.startswith("commbench/")}
    expected = {path for path in files_below(ROOT / "commbench") if path.split("/")[0] not in LINKED}
    for link, folder in LINKED.items():
        expected |= {f"{link}/{path}" for path in files_below(ROOT / folder)}
    assert inside == expected
    assert {"worker.py", "py.typed", "_scripts/quickstart"} <= inside


def test_nothing_but_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    roots = {name.split("/")[0].split("-")[0] for name in wheel.namelist()}
    assert roots == {"commbench"}


def test_the_command_is_an_entry_point(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "commbench = commbench.__main__:main" in wheel.read(name).decode()


def test_data_is_found_by_one_path_in_a_checkout_too() -> None:
    for link, folder in LINKED.items():
        assert (ROOT / "commbench" / link).resolve() == ROOT / folder
