"""Which commit of commbench measured, when it runs from a checkout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import commbench
from commbench.provenance.sources import command

PACKAGE = Path(commbench.__file__).parent


def collect_git(package: Path = PACKAGE) -> dict[str, Any] | None:
    """``{"sha": ..., "dirty": ...}`` of the checkout that holds ``package``; None outside one; never raises.

    A package installed into somebody else's repository (a virtual environment inside a project) is outside: git must
    know the package's own file. Starts git: call it before MPI starts, for forking after is not safe on every fabric.
    """

    def git(*arguments: str) -> str:
        # Without optional locks, a status in the background does not disturb the user's own git; a GIT_DIR of a hook
        # that started us would name another repository.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        argv = ["git", "-C", str(package), *arguments]
        return command(argv, environ={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"})

    try:
        if not git("ls-files", "--", "__init__.py").strip():
            return None
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../kernels").strip()
        return {"sha": git("rev-parse", "HEAD").strip(), "dirty": bool(dirty)}
    except RuntimeError as error:
        return None if "not a git repository" in str(error) else {"error": str(error)}
    except OSError as error:
        return {"error": str(error)}
