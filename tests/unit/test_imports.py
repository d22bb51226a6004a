"""What a rank loads. Ranks import from one shared file system, a thousand at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commbench.backends import BACKENDS

ROOT = Path(__file__).parents[2]
HEAVY = {"pandas", "scipy", "pydantic", "typer", "rich", "plotly", "matplotlib", "jinja2"}
PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages in a fresh interpreter after it has imported ``modules``."""
    out = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}", *modules],
        capture_output=True, text=True, check=True, timeout=120, env=dict(os.environ),
    ).stdout  # fmt: skip
    return set(json.loads(out.splitlines()[-1]))


def test_a_rank_is_standard_library_until_its_backend_is_chosen() -> None:
    loaded = loaded_by("commbench.worker", "commbench.launch.place", "commbench.backends")
    third_party = loaded - set(sys.stdlib_module_names) - {"commbench", "__mp_main__"}
    # What site-packages' own .pth files load is not ours.
    assert {name for name in third_party if not name.startswith(("_", "sitecustomize"))} == set()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_rank_with_its_backend_loads_nothing_heavy(name: str) -> None:
    if BACKENDS[name].why_unavailable():
        pytest.skip(f"backend {name} is not available here")
    loaded = loaded_by(
        "commbench.worker",
        BACKENDS[name].target.partition(":")[0],
        *(f"commbench.{path.parent.name}.{path.stem}" for path in worker_files()),
    )
    assert loaded & HEAVY == set()


def worker_files() -> list[Path]:
    """The modules of the layers that ranks use."""
    layers = ("launch", "algorithms", "measure", "provenance", "store")
    return [path for layer in layers for path in sorted((ROOT / "commbench" / layer).glob("[a-z]*.py"))]
