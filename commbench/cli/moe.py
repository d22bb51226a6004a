"""``commbench moe``: time the dispatch and combine of a mixture of experts."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commbench.cli.run import (
    check_binding,
    check_world,
    head_or_here,
    list_launches,
    option,
    ranks_of,
    report_end,
)

if TYPE_CHECKING:
    import pandas as pd

    from commbench.cases import Sweep
    from commbench.cli.moe_options import MoeOptions
    from commbench.launch.place import Place
    from commbench.launch.run import Run

_HELP = """Time the dispatch and combine of a mixture of experts: tokens to their experts, and their sums back.

Tokens are routed, laid out, quantised, exchanged and put in the experts' order, as in training and serving; what comes out
is checked, token by token. Beside each time stand the load of ranks and experts, the bytes by every convention under which
such numbers are published, a plain all_to_all of the same bytes, and what the traffic should take over these links.

\b
Examples:
  commbench moe
  commbench moe --backend gloo --ranks 4 --tokens 1,16,128,1K --hidden 2048 --experts 64 --topk 6
  commbench moe --routing uniform,zipf:1.2,imbalance:2.0 --tokens 1K --experts-on contiguous,eplb:8
  commbench moe --mode throughput,low_latency --dtype fp8,bf16 --tokens 128
  commbench moe --profile deepseek-v3-decode --ranks 8
  mpirun -n 8 --hostfile hosts commbench moe --backend mpi --dispatch flat,hierarchical
"""


def moe(
    sweep_file: Annotated[Path | None, typer.Argument(metavar="SWEEP.toml", help="The same options as keys of a TOML file.", show_default=False)] = None,
    backend: Annotated[str | None, option("gloo, mpi, nccl: commbench's own data path over them; deepep, nccl_ep: theirs. Default: gloo,mpi.")] = None,
    tokens: Annotated[str | None, option("Tokens of each rank, such as 1,16,128,4K or 1:4K:4x. Default: 1,16,128,1K.")] = None,
    hidden: Annotated[str | None, option("Values of a token. Default: 7168.")] = None,
    experts: Annotated[str | None, option("Experts in all. Default: 256.")] = None,
    topk: Annotated[str | None, option("Experts that each token goes to. Default: 8.")] = None,
    profile: Annotated[str | None, option("A model's shape and way to route, by name, for what is not given; list prints them.")] = None,
    mode: Annotated[str | None, option("throughput: as many bytes as are routed; low_latency: slots of a fixed size. Default: throughput.")] = None,
    dispatch: Annotated[str | None, option("flat: straight to the experts' ranks; hierarchical: once to each host, and on from there. Default: flat.")] = None,
    dtype: Annotated[str | None, option("What a dispatch sends: bf16, or fp8 with a scale for 128 values. A combine is in bf16. Default: bf16.")] = None,
    routing: Annotated[str | None, option("uniform, group_limited:4, zipf:1.2, hotspot:2, ramp, imbalance:2.0, local:0.8, file:ids.npz; several with commas. Default: uniform.")] = None,
    routing_fixed: Annotated[bool | None, typer.Option("--routing-fixed", help="Route every iteration alike.", show_default=False)] = None,
    masked: Annotated[str | None, option("Share of selections that go to no expert, such as 10%. Default: 0.")] = None,
    uneven_tokens: Annotated[bool | None, typer.Option("--uneven-tokens", help="Rank r has r tokens less than the first.", show_default=False)] = None,
    experts_on: Annotated[str | None, option("contiguous, round_robin, eplb (a copy more for each rank), eplb:32 (so many). Default: contiguous.")] = None,
    uneven_experts: Annotated[bool | None, typer.Option("--uneven-experts", help="Let some ranks have an expert more than others.", show_default=False)] = None,
    counts: Annotated[str | None, option("exchanged: a dispatch begins with how many tokens come; known: as with DeepEP's cached handle. Default: exchanged.")] = None,
    phases: Annotated[str | None, option("What to show of total, layout, quantise, counts, send, recv, forward, permute, gather, reduce; and combine, without which none is timed. Default: all.")] = None,
    timing: Annotated[str | None, option("isolated, streamed. Default: isolated.")] = None,
    execution: Annotated[str | None, option("eager calls, or graph: captured CUDA graphs, of low latency on nccl. Default: eager.")] = None,
    precision: Annotated[str | None, option("Stop when the median's 95% interval is within this. Default: 2%.")] = None,
    max_time: Annotated[str | None, option("Longest time a case may take. Default: 5s.")] = None,
    budget: Annotated[str | None, option("Measuring time that the sweep aims at. Default: auto, 1 s a case.")] = None,
    ranks: Annotated[str | None, option("Local processes to start where there is no launcher. Default: 2.")] = None,
    nodes: Annotated[str | None, option("Hosts that the launcher is expected to use; others end the run.")] = None,
    launches: Annotated[str | None, option("Fresh sets of processes; auto:5%. Default: 1. See commbench run --help.")] = None,
    variant: Annotated[list[str] | None, option("Settings as a factor, NAME:VAR=VALUE. See commbench run --help.")] = None,
    spread: Annotated[str | None, option("Spread the launches evenly over this time.")] = None,
    bind: Annotated[str | None, option("core, numa or none. Default: none.")] = None,
    iters: Annotated[str | None, option("A fixed number of iterations instead of --precision.")] = None,
    soak: Annotated[str | None, option("Soak: repeat the sweep for this long, such as 2h.", "--for")] = None,
    deadline: Annotated[str | None, option("How long a rank may be silent before it is named. Default: 30s.")] = None,
    seed: Annotated[str | None, option("Seed of routing and data. Default: random, and stored.")] = None,
    out: Annotated[str | None, option("Directory that results go to. Default: results.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Links from `commbench calibrate`, instead of measuring them.", show_default=False)] = None,
    label: Annotated[str | None, option("A name for this run, stored with every point.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw time and bandwidth against tokens into this file.", show_default=False)] = None,
    launcher: Annotated[str | None, option("Which launcher's variables to believe, or none.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases and stop.")] = False,
) -> int:  # fmt: skip
    from commbench.cli.errors import UsageError
    from commbench.cli.moe_options import check_picture, check_workloads, read_moe_options
    from commbench.launch.place import LaunchError, detect
    from commbench.launch.run import new_seed
    from commbench.launch.runnable import NotRunnable, check_runnable
    from commbench.store.calibration import CalibrationError, read_calibration
    from commbench.store.writer import StoreError

    if profile == "list":
        return _list_profiles()
    given: dict[str, Any] = {
        "backend": backend, "tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk, "mode": mode,
        "dispatch": dispatch, "dtype": dtype, "routing": routing, "routing_fixed": routing_fixed, "masked": masked,
        "uneven_tokens": uneven_tokens, "experts_on": experts_on, "uneven_experts": uneven_experts, "counts": counts,
        "phases": phases, "timing": timing, "execution": execution, "precision": precision, "max_time": max_time,
        "budget": budget, "ranks": ranks, "nodes": nodes, "launches": launches, "variant": variant or None,
        "spread": spread, "bind": bind, "iters": iters, "soak": soak, "deadline": deadline, "seed": seed, "out": out,
        "label": label,
    }  # fmt: skip
    options = read_moe_options(sweep_file, given, profile)
    if plot is not None:
        check_picture(plot)
    try:
        place = detect(os.environ, launcher)
        check_world(options, place)
        world = ranks_of(options, place)
        # A launcher's hosts are not known yet: what is wrong on one host is wrong on several, but for groups of hosts.
        check_workloads(options, world, (0,) * world)
        sweep = options.sweep(new_seed())
        if dry_run:
            return _list_cases(options, sweep, place)
        check_runnable(sweep, local_ranks=None if place else world, variants=options.all_variants)
        links = read_calibration(calibration) if calibration is not None else None

        def report(run: Run) -> int:
            return _report(run, options, plot)

        return head_or_here(options, sweep, place, report, given=links)
    except (LaunchError, NotRunnable, StoreError, CalibrationError) as error:
        raise UsageError(str(error)) from None


moe.__doc__ = _HELP


def _list_profiles() -> int:
    from commbench.moe.profiles import profiles

    for name, one in profiles().items():
        print(f"{name}: {one.workload.title}, {one.dtype}")
        print(f"  source: {one.source}")
    return 0


def _list_cases(options: MoeOptions, sweep: Sweep, place: Place | None) -> int:
    from commbench.backends import why_not_graph
    from commbench.cases import Layout
    from commbench.moe.exchange import why_not

    layout = Layout(hosts=(socket.gethostname(),) * ranks_of(options, place))
    cases = sweep.expand(layout)
    for case in cases:
        skip = case.skip or why_not_graph(case) or (why_not(case, layout) if case.algorithm != "library" else None)
        print(f"{case.case_id}  {case.title}" + (f"  skipped: {skip}" if skip else ""))
    print(f"{len(cases)} cases", file=sys.stderr)
    if place is None:
        check_binding(options, layout.world)
        list_launches(options, sweep, cases)
    return 0


def _report(run: Run, options: MoeOptions, plot: Path | None) -> int:
    """The tables from what was heard, the figure if it is asked for, and where the results are."""
    drawn = False
    if run.points:
        from commbench.report.frame import from_points
        from commbench.report.launches import print_launches
        from commbench.report.moe import print_moe

        frame = from_points(run.points)
        print_moe(frame, options.shown_phases)
        print_launches(frame, run.directory)
        if plot is not None:
            drawn = _draw(frame, plot)
    return report_end(run, None if drawn else "moe.png")


def _draw(frame: pd.DataFrame, plot: Path) -> bool:
    """Whether it could be: a picture is no reason for a run to fail."""
    from commbench.report.moe_figure import plot_moe

    try:
        plot_moe(frame, plot)
    except (OSError, ValueError) as error:
        print(f"commbench: no figure: {error}", file=sys.stderr)
        return False
    print(f"figure:  {shlex.quote(str(plot))}")
    return True
