"""The command. A rank other than the first, started by somebody's launcher, needs none of the command line."""

from __future__ import annotations

import os
import sys

MEASURING = ("run", "moe", "calibrate")  # commands that every rank of a launcher takes part in


def main() -> int:
    """Entry of ``commbench`` and ``python -m commbench``; returns the exit code."""
    if sys.argv[1:2] and sys.argv[1] in MEASURING:
        from commbench.launch.place import LaunchError, detect

        try:
            place = detect(os.environ, _launcher(sys.argv))
        except LaunchError:
            place = None  # the command says it properly
        if place is not None and place.rank != 0:
            return _follow(place)
    from commbench.cli.main import main as command

    return command()


def _launcher(argv: list[str]) -> str | None:
    """The value of ``--launcher``: the one option that a rank must know before it knows what it is."""
    for index, argument in enumerate(argv):
        if argument == "--launcher" and index + 1 < len(argv):
            return argv[index + 1]
        if argument.startswith("--launcher="):
            return argument.partition("=")[2]
    return None


def _follow(place) -> int:  # type: ignore[no-untyped-def]
    if "--dry-run" in sys.argv or "--help" in sys.argv or "list" in sys.argv:  # nothing is measured
        return 0
    from commbench.worker import follow

    return follow(place)


if __name__ == "__main__":
    sys.exit(main())
