"""``commbench calibrate``: measure the links that predictions are made from."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commbench.cli.run import check_world, head_or_here, option, ranks_of

if TYPE_CHECKING:
    from commbench.launch.run import Run

_HELP = """Measure links: latency, rate, overhead, both directions at once, fan-in, NICs with several ranks behind them.

Nothing but messages is timed: no collective and no algorithm. The file that it leaves is what predictions are made
from: give it to `commbench run --calibration` and `commbench predict --calibration`. Without one, every run
measures its own links first, less thoroughly.

\b
Examples:
  commbench calibrate
  commbench calibrate --backend mpi --ranks 4 --file links.json
  mpirun -n 8 --hostfile hosts commbench calibrate --backend mpi --file cluster.json
"""


def calibrate(
    backend: Annotated[str | None, option("gloo, mpi, nccl, nccl_raw; several with commas. Default: gloo,mpi.")] = None,
    ranks: Annotated[str | None, option("Local processes to start where there is no launcher. Default: 2.")] = None,
    nodes: Annotated[str | None, option("Hosts that the launcher is expected to use; others end it.")] = None,
    cache: Annotated[str | None, option("rotate buffers, or keep one set warm. Default: rotate.")] = None,
    deadline: Annotated[str | None, option("How long a rank may be silent before it is named. Default: 30s.")] = None,
    file: Annotated[Path | None, typer.Option(help="Copy the calibration here; it is kept with the results too.", show_default=False)] = None,
    out: Annotated[str | None, option("Directory that results go to. Default: results.")] = None,
    label: Annotated[str | None, option("A name for it, stored with it.")] = None,
    launcher: Annotated[str | None, option("Which launcher's variables to believe, or none.")] = None,
) -> int:  # fmt: skip
    from commbench.cli.errors import UsageError
    from commbench.cli.options import read_options
    from commbench.launch.place import LaunchError, detect
    from commbench.launch.runnable import NotRunnable, check_runnable
    from commbench.store.writer import StoreError

    given: dict[str, Any] = {
        "backend": backend, "ranks": ranks, "nodes": nodes, "cache": cache, "deadline": deadline, "out": out,
        "label": label,
    }  # fmt: skip
    options = read_options(None, given)
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--file: there is no directory {file.parent}")
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise UsageError(f"--file: {file} {'is a directory' if file.is_dir() else 'cannot be written'}: name a file")
    try:
        place = detect(os.environ, launcher)
        check_world(options, place)
        if ranks_of(options, place) < 2:
            raise UsageError("one rank has no link to measure: ask for --ranks 2 or more")
        sweep = replace(options.sweep(0), collectives=())
        check_runnable(sweep, local_ranks=None if place else ranks_of(options, None))
        return head_or_here(options, sweep, place, lambda run: _report(run, file), thorough=True)
    except (LaunchError, NotRunnable, StoreError) as error:
        raise UsageError(str(error)) from None


calibrate.__doc__ = _HELP


def _report(run: Run, file: Path | None) -> int:
    from commbench.models import Links
    from commbench.report.calibration import describe_calibration
    from commbench.report.tables import plain
    from commbench.store.calibration import CALIBRATION

    if not run.found or run.layout is None:
        print(f"results: {shlex.quote(str(run.directory))}")
        return run.exit_code
    for name, found in run.found.items():
        links = Links.from_dict(found["links"])
        for line in describe_calibration(name, links, found["windows"], run.layout.hosts):
            print(plain(line))
    written = run.directory / CALIBRATION
    if file is not None:
        try:
            shutil.copyfile(written, file)
            written = file
        except OSError as error:
            print(f"commbench: cannot write {file} ({error.strerror}): it is in {written}", file=sys.stderr)
    print(f"calibration: {shlex.quote(str(written))}")
    return run.exit_code or (3 if file not in (None, written) else 0)
