"""``commbench run``: time collectives here, or as a rank of whatever launcher started it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from commbench.cases import Sweep
    from commbench.cli.options import RunOptions
    from commbench.launch.place import Place
    from commbench.launch.run import Run
    from commbench.launch.sets import ProcessSet
    from commbench.store.calibration import Calibration

_HELP = """Time collectives, check their data, store every point, and set each beside ring, tree and lower bound.

Without a launcher it starts the ranks itself, on this host. Under mpirun, srun or torchrun it becomes a rank.

\b
Examples:
  commbench run
  commbench run --backend gloo --collective all_reduce --sizes 8:64M:4x --ranks 4
  commbench run --collective all --dtype float32,bfloat16 --op sum,max --placement out,in
  commbench run --algorithm library,own:ring --collective all_reduce
  commbench run --backend mpi --algorithm ring,rabenseifner --collective all_reduce
  commbench run --backend mpi --launches auto:5% --bind core --spread 30m
  commbench run --backend mpi --launches 6 --variant tcp:OMPI_MCA_pml=ob1,OMPI_MCA_btl='"self,tcp"'
  commbench run --backend mpi --collective all_reduce --launches 6 --variants ompi-allreduce
  commbench run sweep.toml --label after-driver-update
  mpirun -n 4 commbench run --backend mpi
  torchrun --nproc-per-node 4 --no-python commbench run --backend gloo
"""

Text = Annotated[str | None, typer.Option()]


def option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


def run(
    sweep_file: Annotated[Path | None, typer.Argument(metavar="SWEEP.toml", help="The same options as keys of a TOML file.", show_default=False)] = None,
    backend: Annotated[str | None, option("gloo, mpi, nccl, nccl_raw; several with commas. Default: gloo,mpi.")] = None,
    collective: Annotated[str | None, option("all_reduce, all_gather, ... or all. Default: all_reduce,reduce_scatter,all_gather,all_to_all.")] = None,
    sizes: Annotated[str | None, option("8:64M:4x, 1M:8M:+1M or 8,1K,1M; K, M, G are 1024-based. Default: 8:16M:8x.")] = None,
    dtype: Annotated[str | None, option("float32, bfloat16, int8, ... or all. Default: float32.")] = None,
    op: Annotated[str | None, option("sum, prod, min, max, avg, band, bor, bxor or all. Default: sum.")] = None,
    placement: Annotated[str | None, option("out, in or both with a comma. Default: out.")] = None,
    algorithm: Annotated[str | None, option("library, own:ring, own:ring/8 (pieces), own:all, or a name that the library can be told to use: ring, tree:ll, ... Default: library.")] = None,
    group: Annotated[str | None, option("world, node, rail, pair:A-B. Default: world.")] = None,
    root: Annotated[str | None, option("Root of rooted collectives. Default: 0.")] = None,
    timing: Annotated[str | None, option("isolated, streamed. Default: both.")] = None,
    execution: Annotated[str | None, option("eager calls of the library, or graph: launches of captured CUDA graphs (nccl, nccl_raw). Default: eager.")] = None,
    buffers: Annotated[str | None, option("plain, registered, symmetric: what NCCL is told of the memory (nccl_raw). Default: plain.")] = None,
    precision: Annotated[str | None, option("Stop when the median's 95% interval is within this. Default: 2%.")] = None,
    max_time: Annotated[str | None, option("Longest time a case may take. Default: 5s.")] = None,
    budget: Annotated[str | None, option("Measuring time that the sweep aims at; each case takes a little at least. Default: auto, 0.3 s a case.")] = None,
    ranks: Annotated[str | None, option("Local processes to start where there is no launcher. Default: 2.")] = None,
    nodes: Annotated[str | None, option("Hosts that the launcher is expected to use; others end the run.")] = None,
    launches: Annotated[str | None, option("Fresh sets of processes, each with the cases in an order of its own: a number; auto:5% until every case's interval over launches is within 5% of its median; auto:5%:30 with at most 30 instead of 40. Default: 1.")] = None,
    variant: Annotated[list[str] | None, option("Settings as a factor, NAME:VAR=VALUE,VAR=VALUE: launches of their own under these environment variables, in turn with the others'. Repeat it for more; default: is one without settings, and is added where one is given alone. A value with a comma goes in quotes.")] = None,
    variants: Annotated[str | None, option("A set of variants that ships with commbench, by name; list prints them.")] = None,
    spread: Annotated[str | None, option("Spread the launches evenly over this time, such as 30m: those in a row are alike. Default: one right after the other.")] = None,
    bind: Annotated[str | None, option("core: pin every rank to a processor of its own; numa: to those of a NUMA node; none: leave it to the system and the MPI library, which lets ranks wander. Default: none.")] = None,
    cache: Annotated[str | None, option("rotate buffers, or keep one set warm. Default: rotate.")] = None,
    iters: Annotated[str | None, option("A fixed number of iterations instead of --precision.")] = None,
    soak: Annotated[str | None, option("Soak: repeat the sweep for this long, such as 2h.", "--for")] = None,
    deadline: Annotated[str | None, option("How long a rank may be silent before it is named, or 100 times what a round should take. Default: 30s.")] = None,
    seed: Annotated[str | None, option("Seed of the data. Default: random, and stored.")] = None,
    out: Annotated[str | None, option("Directory that results go to. Default: results.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Links from `commbench calibrate`, or of an earlier run's directory, instead of measuring them.", show_default=False)] = None,
    label: Annotated[str | None, option("A name for this run, stored with every point.")] = None,
    launcher: Annotated[str | None, option("Which launcher's variables to believe, or none.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases and stop.")] = False,
) -> int:  # fmt: skip
    from commbench.cli.errors import UsageError
    from commbench.cli.options import read_options
    from commbench.launch.place import LaunchError, detect
    from commbench.launch.run import new_seed
    from commbench.launch.runnable import NotRunnable, check_runnable
    from commbench.store.calibration import CalibrationError, read_calibration
    from commbench.store.writer import StoreError

    given = {
        "backend": backend, "collective": collective, "sizes": sizes, "dtype": dtype, "op": op,
        "placement": placement, "algorithm": algorithm, "group": group, "root": root, "timing": timing,
        "execution": execution, "buffers": buffers, "precision": precision, "max_time": max_time, "budget": budget,
        "ranks": ranks, "nodes": nodes, "launches": launches, "cache": cache, "iters": iters, "soak": soak, "deadline": deadline, "seed": seed,
        "out": out, "label": label, "variant": variant or None, "variants": variants, "spread": spread, "bind": bind,
    }  # fmt: skip
    if variants == "list":
        return _list_variants()
    options = read_options(sweep_file, given)
    try:
        place = detect(os.environ, launcher)
        sweep = options.sweep(new_seed())
        check_world(options, place)
        if dry_run:
            return _list_cases(options, sweep, place)
        check_runnable(sweep, local_ranks=None if place else ranks_of(options, None), variants=options.all_variants)
        links = read_calibration(calibration) if calibration is not None else None
        return head_or_here(options, sweep, place, _report, given=links)
    except (LaunchError, NotRunnable, StoreError, CalibrationError) as error:
        raise UsageError(str(error)) from None


run.__doc__ = _HELP


def check_world(options: RunOptions, place: Place | None) -> None:
    from commbench.cli.errors import UsageError

    if place is None:
        if options.nodes not in (None, 1):
            raise UsageError(f"--nodes {options.nodes} needs a launcher: without one every rank is on this host")
        return
    for warning in place.warnings:
        print(f"commbench: warning: {warning}", file=sys.stderr)
    if options.ranks is not None and options.ranks != place.world:
        raise UsageError(
            f"--ranks {options.ranks} does not fit the {place.world} ranks that {place.launcher} started: leave it out"
        )
    started_by_us = {
        "--launches": options.launches.several, "--variant": options.variant, "--variants": options.variants,
        "--bind": options.bind != "none",
    }  # fmt: skip
    for name, wanted in started_by_us.items():
        if wanted:
            raise UsageError(f"{name} needs commbench to start the ranks itself; {place.launcher} already did")


def ranks_of(options: RunOptions, place: Place | None) -> int:
    return place.world if place else options.ranks or 2


def _list_cases(options: RunOptions, sweep: Sweep, place: Place | None) -> int:
    import socket

    from commbench.backends import why_not_buffers, why_not_graph
    from commbench.backends.forcing import is_forced, why_not
    from commbench.cases import is_own
    from commbench.schedules.own import why_not_own

    cases = _expand(sweep, (socket.gethostname(),) * ranks_of(options, place))
    for case in cases:
        asked = f" (asked for {case.requested_bytes} B)" if case.requested_bytes != case.bytes else ""
        skip = case.skip
        if not skip and is_own(case.algorithm) and place is None:  # a launcher's hosts are not known yet
            skip = why_not_own(case.collective, case.algorithm, (0,) * case.ranks)
        if not skip and is_forced(case.algorithm):
            skip = why_not(case.backend, case.collective, case.algorithm)
        skip = skip or why_not_buffers(case) or why_not_graph(case)
        print(f"{case.case_id}  {case.title}{asked}" + (f"  skipped: {skip}" if skip else ""))
    print(f"{len(cases)} cases", file=sys.stderr)
    if place is None:
        check_binding(options, ranks_of(options, place))
        list_launches(options, sweep, cases)
    return 0


def check_binding(options: RunOptions, ranks: int) -> None:
    from commbench.cli.errors import UsageError
    from commbench.launch.bind import BindError, assign

    try:
        assign(options.bind, ranks, os.sched_getaffinity(0))
    except BindError as error:
        raise UsageError(str(error)) from None


def list_launches(options: RunOptions, sweep: Sweep, cases: tuple[Any, ...]) -> None:
    """Which sets of processes there will be, and in which order, where there are several."""
    from commbench.launch.order import sets_in_order
    from commbench.launch.sets import process_sets

    sets: list[ProcessSet] = process_sets(sweep.backends, cases, options.all_variants)
    launches = options.launches
    if launches.most * len(sets) < 2:
        return
    number = 0
    for repetition in range(launches.least):
        for index in sets_in_order(len(sets), repetition):
            number += 1
            print(f"launch {number}: {sets[index].title}, {len(sets[index].cases)} cases", file=sys.stderr)
    if launches.precision is not None:
        most = launches.most * len(sets)
        print(f"then on, until intervals are within {launches.precision:.3g}; at most {most} launches", file=sys.stderr)


def _list_variants() -> int:
    from commbench.launch.variants import variant_sets

    for one in variant_sets().values():
        of = " or ".join(one.backends) + (f", {one.collective} alone" if one.collective else "")
        print(f"{one.name} ({of}): {one.about}")
        for variant in one.variants:
            settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variant.settings.items())
            print(f"  {variant.name}: {settings or 'as it comes'}")
        print(f"  sources: {'; '.join(one.sources)}")
    return 0


def _expand(sweep: Sweep, hosts: tuple[str, ...]) -> tuple[Any, ...]:
    from commbench.cases import Layout
    from commbench.cli.errors import UsageError

    try:
        return sweep.expand(Layout(hosts=hosts))
    except ValueError as error:
        raise UsageError(str(error)) from None


def head_or_here(
    options: RunOptions, sweep: Sweep, place: Place | None, report: Callable[[Run], int],
    given: Calibration | None = None, thorough: bool = False,
) -> int:  # fmt: skip
    """Carry a sweep out, on ranks of our own or as rank 0 of a launcher's; ``report`` prints what came of it."""
    import socket

    from commbench.cli.progress import Progress
    from commbench.launch.runner import run_as_head, run_local
    from commbench.worker import work

    # A launcher's layout is known only when all have arrived; a world on one host tells what is wrong with the
    # options now.
    ranks = ranks_of(options, place)
    progress = Progress(len(_expand(sweep, (socket.gethostname(),) * ranks)))
    if place is None:
        try:
            found = run_local(
                sweep, ranks=ranks, launches=options.launches, variants=options.all_variants, spread_s=options.spread,
                bind=options.bind, out=options.out, on_event=progress.hear, given=given, thorough=thorough,
            )  # fmt: skip
        finally:
            progress.close()
        return report(found)

    def end(run: Run) -> None:
        progress.close()
        report(run)

    found = run_as_head(
        sweep, place=place, out=options.out, nodes=options.nodes, on_event=progress.hear, on_end=end, be_rank=work,
        given=given, thorough=thorough,
    )  # fmt: skip
    return found.exit_code


def _report(run: Run) -> int:
    """Tables from what was heard, so that a full disk does not hide them, and where the results are."""
    if run.points:
        from commbench.report.frame import from_points
        from commbench.report.tables import print_tables

        print_tables(from_points(run.points))
    return report_end(run, "busbw.png")


def report_end(run: Run, figure: str | None) -> int:
    """What follows the tables: launches, taints, wrong data, where the results are, and how to draw a ``figure`` of them."""
    if run.points:
        from commbench.report.frame import from_points, taint_line
        from commbench.report.launches import print_launches
        from commbench.report.tables import plain

        print_launches(from_points(run.points), run.directory)
        if (line := taint_line(run.directory, [point["tainted"] for point in run.points])) is not None:
            print(plain(line))
    wrong = sum(1 for point in run.points if point["status"] == "wrong")
    if wrong:
        print(f"commbench: {wrong} points have wrong data: no bandwidth is given for them", file=sys.stderr)
    directory = shlex.quote(str(run.directory))
    print(f"results: {directory}")
    if figure is not None and any(point["busbw_Bps"] for point in run.points):
        print(f"next:    commbench show {directory} --plot {shlex.quote(str(run.directory / figure))}")
    elif not any(point["time_s"] for point in run.points):
        skipped = bool(run.points) and all(point["status"] == "skipped" for point in run.points)
        print("nothing was measured: " + ("every case was skipped" if skipped else "no case came to its end"))
    return run.exit_code
