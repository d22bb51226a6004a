"""``commbench predict``: what a collective should take on a machine that is calibrated, or only known by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commbench.cli.errors import UsageError

if TYPE_CHECKING:
    from commbench.models.hardware import Hardware
    from commbench.models.links import Links
    from commbench.models.nccl import NcclInputs
    from commbench.report.forecast import Estimate, Forecast, Row

_HELP = """Predict collectives: the time and bus bandwidth of every algorithm, the best of them, and the lower bound.

Links come from a calibration (`commbench calibrate`, or any run's directory) or from a preset of hardware. Up to 32
ranks are simulated; beyond, closed forms answer as fast for a million. Nothing is measured.

\b
Examples:
  commbench predict --hardware h200-8x400g --nodes 4 --ranks 32 --sizes 8:1G:4x
  commbench predict --hardware b200-8x400g --nodes 12500 --collective all_to_all --algorithm pairwise,hierarchical
  commbench predict --calibration links.json --backend mpi --timing streamed --format csv
  commbench predict --list-hardware
"""

_DEFAULT_SIZES = "8:1G:8x"
_FORMATS = ("table", "csv", "json")
_NCCL = "2.30"


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


def predict(
    collective: Annotated[str, _option("all_reduce, all_gather, ...; several with commas, or all. Default: all_reduce.")] = "all_reduce",
    sizes: Annotated[str, _option(f"8:64M:4x, 1M:8M:+1M or 8,1K,1M; K, M, G are 1024-based. Default: {_DEFAULT_SIZES}.")] = _DEFAULT_SIZES,
    ranks: Annotated[int | None, _option("All ranks. Default: the calibration's, or every GPU of the nodes.")] = None,
    nodes: Annotated[int | None, _option("Hosts, with equally many ranks each. Default: the calibration's, or 1.")] = None,
    hardware: Annotated[str | None, _option("A preset, such as h200-8x400g; `list` names them all.")] = None,
    calibration: Annotated[Path | None, _option("A file of commbench calibrate, or a run's directory.")] = None,
    backend: Annotated[str | None, _option("Whose links, where the calibration has several.")] = None,
    algorithm: Annotated[str | None, _option("Only these, such as ring,hierarchical.")] = None,
    timing: Annotated[str, _option("isolated, or streamed: each further one of a row. Default: isolated.")] = "isolated",
    dtype: Annotated[str, _option("What messages are made of. Default: float32.")] = "float32",
    format_: Annotated[str, _option("table, or csv and json in SI units and full precision. Default: table.", "--format")] = "table",
    nccl_version: Annotated[str, _option(f"Whose tuner to ask, where the hardware runs NCCL. Default: {_NCCL}.")] = _NCCL,
    list_hardware: Annotated[bool, typer.Option("--list-hardware", help="List the presets and stop.")] = False,
) -> int:  # fmt: skip
    if list_hardware or hardware == "list":
        return _list_hardware()
    from commbench.report.forecast import to_csv, to_json, to_table

    try:
        names = _names(collective, timing, dtype, format_)
        machine = _machine(hardware, calibration, backend, ranks, nodes, nccl_version)
        forecasts = [machine.forecast(name, sizes, timing, dtype, algorithm) for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if format_ == "table":
        print("\n\n".join(to_table(forecast, _width()) for forecast in forecasts))
    else:
        print(to_csv(forecasts) if format_ == "csv" else to_json(forecasts))
    return 0


predict.__doc__ = _HELP


def _names(collective: str, timing: str, dtype: str, format_: str) -> list[str]:
    """The collectives, all options with a fixed choice checked. Raises ValueError."""
    from commbench.cases import DTYPES, TIMINGS
    from commbench.collectives import COLLECTIVES
    from commbench.registry import unknown_name

    names = [name.strip() for name in collective.split(",") if name.strip()]
    names = list(COLLECTIVES) if names == ["all"] else list(dict.fromkeys(names))
    if not names:
        raise ValueError("--collective is empty: name at least one, such as all_reduce")
    for kind, given, known in (
        *(("collective", name, tuple(COLLECTIVES)) for name in names),
        ("timing", timing, TIMINGS), ("dtype", dtype, tuple(DTYPES)), ("format", format_, _FORMATS),
    ):  # fmt: skip
        if given not in known:
            raise ValueError(unknown_name(kind, given, known))
    return names


class _Machine:
    """Links, what they belong to, and how many ranks there are on how many nodes."""

    def __init__(
        self, source: str, links: Links, ranks: int, nodes: int, hardware: Hardware | None = None,
        nccl_version: str = _NCCL,
    ) -> None:  # fmt: skip
        self.source, self.links, self.ranks, self.nodes = source, links, ranks, nodes
        self.hardware, self.nccl_version = hardware, nccl_version
        self.nccl = _nccl_inputs(hardware, nodes, ranks // nodes, nccl_version)

    def forecast(self, collective: str, sizes: str, timing: str, dtype: str, algorithm: str | None) -> Forecast:
        """Raises ValueError for sizes that are none, and for algorithms that this layout or collective has not."""
        from commbench.cases import DTYPES
        from commbench.collectives import COLLECTIVES
        from commbench.models.prediction import MOST_SIMULATED
        from commbench.report.forecast import Forecast
        from commbench.units import parse_sizes

        spec, itemsize = COLLECTIVES[collective], DTYPES[dtype].itemsize
        requests = parse_sizes(sizes) if spec.sized else (0,)
        rows = []
        for requested in requests:
            moved = spec.message_bytes(requested, itemsize, self.ranks)
            rows.append(self._row(collective, moved, requested, timing, dtype, itemsize))
        if all(spec.sized and not row.bytes for row in rows):
            raise ValueError(
                f"--sizes {sizes}: all are less than one {dtype} a rank for {collective} on {self.ranks} ranks"
            )
        rows = list({row.bytes: row for row in reversed(rows)}.values())[::-1]  # two requests may move the same
        known = tuple(dict.fromkeys(name for row in rows for name in row.times))
        chosen = _chosen(algorithm, collective, known) if known else ()
        return Forecast(
            collective=collective, ranks=self.ranks, nodes=self.nodes, dtype=dtype, timing=timing, source=self.source,
            method="simulated" if self.ranks <= MOST_SIMULATED else "closed forms", algorithms=chosen,
            rows=tuple(_only(row, chosen) for row in rows), notes=self._notes(collective),
        )  # fmt: skip

    def _row(self, collective: str, moved: int, requested: int, timing: str, dtype: str, itemsize: int) -> Row:
        from commbench.collectives import COLLECTIVES
        from commbench.models.prediction import bus_bandwidth, predict_even
        from commbench.models.rounds import World
        from commbench.models.scale import MULTI_RAIL_RING, multi_rail_ring_s
        from commbench.report.forecast import Row

        if COLLECTIVES[collective].sized and not moved:
            return Row(bytes=0, requested_bytes=requested, times={}, busbw_Bps={}, bound_s=None, bound_busbw_Bps=None)
        found = predict_even(collective, moved, self.ranks, self.nodes, self.links, timing, itemsize=itemsize)
        times = dict(found.times)
        if self.hardware is not None and self.hardware.nics_per_node > 1:
            world = World.even(self.ranks, self.nodes)
            rings = multi_rail_ring_s(collective, moved, world, self.links)
            if rings is not None:
                times[MULTI_RAIL_RING] = max(rings, found.bound_s)

        def rate(seconds: float) -> float | None:
            return bus_bandwidth(collective, moved, self.ranks, seconds) if moved and seconds else None

        return Row(
            bytes=moved, requested_bytes=requested, times=times,
            busbw_Bps={name: rate(seconds) for name, seconds in times.items()}, bound_s=found.bound_s,
            bound_busbw_Bps=rate(found.bound_s), nccl=self._estimate(collective, moved, dtype),
        )  # fmt: skip

    def _estimate(self, collective: str, moved: int, dtype: str) -> Estimate | None:
        if self.nccl is None:
            return None
        from commbench.models.nccl import nccl_estimate
        from commbench.report.forecast import Estimate

        found = nccl_estimate(collective, moved, self.nccl, version=self.nccl_version, dtype=dtype)
        choice = f"{found.algorithm}/{found.protocol}" if found.algorithm else None
        return Estimate(
            seconds=found.seconds, busbw_Bps=found.bus_bandwidth_Bps(collective, moved, self.ranks), choice=choice
        )

    def _notes(self, collective: str) -> tuple[str, ...]:
        """A line on each kind of bandwidth above the wire's that is no error here, and on what the estimate is."""
        notes = []
        facts = self.hardware.nccl if self.hardware else None
        sharp = facts is not None and facts.nvswitch and facts.compute_capability >= 90
        if sharp and collective in ("all_reduce", "reduce_scatter", "all_gather"):
            notes.append(
                "above the bound without error: NVLS and SHARP, where switches add and copy, so that each byte passes a "
                "link once; no algorithm here, nor the bound, has such switches"
            )
        if collective == "all_reduce" and self.nodes == 2:
            notes.append(
                "above the NICs' rate without error: between two nodes a tree, or a hierarchy, sends each byte once "
                "either way, and bus bandwidth counts it almost twice: do not judge NICs by it"
            )
        if collective == "all_to_all" and 1 < self.nodes < self.ranks:
            share = (self.ranks - 1) / (self.ranks - self.ranks // self.nodes)
            notes.append(
                f"above the NICs' rate without error: part of the messages stays inside nodes, so that bus bandwidth "
                f"reaches {share:.3g} times a rank's share of the NICs"
            )
        if self.nccl is not None:
            notes.append(
                f"NCCL tuner estimate: what NCCL {self.nccl_version} puts on its own choice from the preset's graphs; "
                "below some 256 MiB far too fast; it enters neither best nor bound"
            )
        return tuple(notes)


def _nccl_inputs(hardware: Hardware | None, nodes: int, per_node: int, version: str) -> NcclInputs | None:
    from commbench.models.nccl import nccl_inputs, parse_version

    parse_version(version)
    if hardware is None or hardware.nccl is None:
        return None
    return nccl_inputs(hardware, nodes, per_node, version=version)


def _machine(
    hardware: str | None, calibration: Path | None, backend: str | None, ranks: int | None, nodes: int | None,
    nccl_version: str,
) -> _Machine:  # fmt: skip
    """Raises ValueError for links that cannot be had, and for ranks that the machine cannot hold."""
    if (hardware is None) == (calibration is None):
        raise ValueError("give either --hardware NAME (see --list-hardware) or --calibration FILE")
    if calibration is not None:
        return _calibrated(calibration, backend, ranks, nodes)
    from commbench.models.hardware import load_hardware
    from commbench.models.hardware_links import hardware_links

    if backend is not None:
        raise ValueError("--backend chooses among the links of a calibration: leave it out with --hardware")
    preset = load_hardware(str(hardware))
    nodes = 1 if nodes is None else nodes
    if nodes < 1:
        raise ValueError(f"--nodes {nodes}: there must be 1 or more")
    ranks = preset.gpus_per_node * nodes if ranks is None else ranks
    per_node = _per_node(ranks, nodes)
    return _Machine(preset.name, hardware_links(preset, per_node), ranks, nodes, preset, nccl_version)


def _calibrated(path: Path, backend: str | None, ranks: int | None, nodes: int | None) -> _Machine:
    from commbench.store.calibration import read_calibration

    found = read_calibration(path)
    if backend is None and len(found.backends) == 1:
        backend = next(iter(found.backends))
    found.backend(backend)  # complains where there is a choice and none was made
    names = list(dict.fromkeys(found.hosts))
    ranks = len(found.hosts) if ranks is None else ranks
    nodes = min(len(names), ranks) if nodes is None else nodes
    per_node = _per_node(ranks, nodes)
    # Other hosts than those that were calibrated have no names; only how many there are counts.
    hosts = [names[n] if nodes == len(names) else f"host {n}" for n in range(nodes) for _ in range(per_node)]
    links = found.links_for(str(backend), hosts)
    return _Machine(f"{backend} links of {found.path}", links, ranks, nodes)


def _per_node(ranks: int, nodes: int) -> int:
    if ranks < 2:
        raise ValueError(f"{ranks} ranks have nobody to talk to: --ranks must be 2 or more")
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be shared out equally over {nodes} nodes: change --ranks or --nodes")
    return ranks // nodes


def _chosen(algorithm: str | None, collective: str, known: tuple[str, ...]) -> tuple[str, ...]:
    from commbench.registry import unknown_name

    if algorithm is None:
        return known
    names = [name.strip() for name in algorithm.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(f"{collective} algorithm here", name, known))
    if not names:
        raise ValueError(f"--algorithm is empty: known for {collective} here are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _only(row: Row, algorithms: tuple[str, ...]) -> Row:
    from dataclasses import replace

    return replace(row, times={name: row.times[name] for name in algorithms if name in row.times})


def _list_hardware() -> int:
    from commbench.models.hardware import hardware_names, load_hardware

    presets = [load_hardware(name) for name in hardware_names()]
    wide = max(len(preset.name) for preset in presets)
    for preset in presets:
        print(
            f"{preset.name:<{wide}}  {preset.gpus_per_node:>2} GPUs a node, {preset.link_Bps / 1e9:.0f} GB/s each; "
            f"{preset.nics_per_node:>2} NICs, {preset.nic_Bps / 1e9:.0f} GB/s each; {preset.description}"
        )
    return 0


def _width() -> int:
    import shutil
    import sys

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
