"""``commbench explain``: what the curves of a stored run look like, and why they are not faster."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from commbench.cli.errors import UsageError


class Format(str, Enum):
    text = "text"
    json = "json"


def explain(
    run: Annotated[
        str | None, typer.Argument(help="The beginning of a run's id, or its directory. The newest run if left out.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where the runs are.")] = Path("results"),
    output: Annotated[Format, typer.Option("--format", help="For people or for programs.")] = Format.text,
) -> int:
    """Say which algorithm each curve looks like, where it is slower than its models, and the likeliest cause.

    Judged by the calibrated links, the hosts' counters and the libraries' settings that the run has stored; 'none'
    for a sound run. The last line is about the run as a whole.

    \b
    commbench explain                   the newest run
    commbench explain 20250102T0304     one run, by the beginning of its id
    commbench explain --format json
    """
    import json

    from commbench.cli.show import points_of
    from commbench.report.explain import diagnose, read_curves, to_json, to_text
    from commbench.report.frame import find_run, read_run
    from commbench.report.moe import is_routed

    try:
        info = read_run(find_run(results, run))
        frame = points_of(info)
    except ValueError as error:
        raise UsageError(str(error)) from None
    routed = is_routed(frame)
    if len(frame) and routed.all():
        print("dispatch and combine are not explained: their points say what was slow (commbench show)")
        return 0
    frame = frame[~routed]
    diagnoses = [diagnose(curve) for curve in read_curves(info.path, frame)]
    if output is Format.json:
        print(json.dumps(to_json(info.run_id, diagnoses), indent=1, allow_nan=False))
    else:
        print(to_text(info.run_id, diagnoses))
    return 0
