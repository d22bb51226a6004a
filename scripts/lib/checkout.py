"""Imported by scripts before commbench: starts them again under the checkout's .venv where this Python has no commbench.

So a script runs by its name, whether or not the environment is the shell's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent.parent / ".venv"

if importlib.util.find_spec("commbench") is None:
    python = VENV / "bin" / "python"
    if not python.is_file() or Path(sys.prefix).resolve() == VENV:
        sys.exit(f"{Path(sys.argv[0]).name}: commbench is not installed: pip install -e '.[mpi]'")
    os.execv(python, [str(python), *sys.argv])
