"""The options of ``commbench moe``: those of ``commbench run`` that mean something here, and what routes tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from commbench.backends import BACKENDS
from commbench.cases import Sweep
from commbench.cli.errors import UsageError
from commbench.cli.options import RunOptions, integer_of, items_of, names_of, read_as, read_toml
from commbench.collectives import ROUTED
from commbench.moe.exchange import ALGORITHMS
from commbench.moe.placement import canonical_placement
from commbench.moe.routing import parse_routing, why_not
from commbench.units import parse_fraction, parse_sizes
from commbench.workloads import COUNTS, MODES, SCALE_BLOCK, Workload

PHASES = (
    "total", "layout", "quantise", "counts", "send", "recv", "forward", "permute", "gather", "reduce", "combine",
)  # fmt: skip
DTYPES = ("bfloat16", "float8_e4m3fn")
DISPATCH = tuple(name.removeprefix("own:") for name in ALGORITHMS)
_OF_PROFILE = ("tokens", "hidden", "experts", "topk", "routing", "mode", "dtype")
_ELSEWHERE = frozenset({"collective", "sizes", "op", "placement", "algorithm", "group", "root", "buffers", "cache"})


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is neither true nor false")


def _tokens(value: Any) -> tuple[int, ...]:
    found = parse_sizes(",".join(items_of(value)))
    if min(found) < 1:
        raise ValueError("tokens: at least one a rank")
    return found


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "tokens": _tokens,
    "hidden": integer_of(2),
    "experts": integer_of(1),
    "topk": integer_of(1),
    "mode": names_of("mode", MODES),
    "dispatch": names_of("way to dispatch", DISPATCH),
    "experts_on": lambda value: tuple(dict.fromkeys(canonical_placement(item) for item in items_of(value))),
    "routing": lambda value: tuple(dict.fromkeys(parse_routing(item).text for item in items_of(value))),
    "routing_fixed": _flag,
    "phases": names_of("phase", PHASES),
    "counts": names_of("way to learn counts", COUNTS),
    "masked": lambda value: 0.0 if str(value) in ("0", "0.0", "0%") else parse_fraction(str(value)),
    "uneven_tokens": _flag,
    "uneven_experts": _flag,
}


class MoeOptions(RunOptions):
    """Every option of ``commbench moe`` with its default; the keys of a TOML file are these names."""

    elsewhere: ClassVar[frozenset[str]] = _ELSEWHERE
    routed: ClassVar[bool] = True

    dtype: tuple[str, ...] = ("bfloat16",)
    timing: tuple[str, ...] = ("isolated",)
    tokens: tuple[int, ...] = (1, 16, 128, 1024)
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    mode: tuple[str, ...] = ("throughput",)
    dispatch: tuple[str, ...] = ("flat",)
    experts_on: tuple[str, ...] = ("contiguous",)
    routing: tuple[str, ...] = ("uniform",)
    routing_fixed: bool = False
    phases: tuple[str, ...] = PHASES
    counts: tuple[str, ...] = ("exchanged",)
    masked: float = 0.0
    uneven_tokens: bool = False
    uneven_experts: bool = False

    @field_validator(*_PARSERS, mode="before")
    @classmethod
    def _parse_moe(cls, value: Any, info: Any) -> Any:
        return _PARSERS[info.field_name](value)

    @field_validator("dtype", mode="after")
    @classmethod
    def _sent(cls, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        odd = next((name for name in dtypes if name not in DTYPES), None)
        if odd is not None:
            raise ValueError(f"tokens are sent as bf16 or fp8, not {odd}")
        return dtypes

    @property
    def shown_phases(self) -> tuple[str, ...]:
        """Those that were asked for; none where all are, a library's own included."""
        return () if set(self.phases) == set(PHASES) else self.phases

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return tuple(
            Workload(
                tokens=tokens, hidden=self.hidden, experts=self.experts, topk=self.topk, mode=mode, routing=routing,
                experts_on=where, masked=self.masked, uneven_tokens=self.uneven_tokens,
                uneven_experts=self.uneven_experts, fixed=self.routing_fixed, counts=counts,
            )
            for mode, counts, where, routing, tokens in itertools.product(
                self.mode, self.counts, self.experts_on, self.routing, self.tokens
            )
            # A low-latency dispatch exchanges no counts, so there is nothing to know.
            if not (mode == "low_latency" and counts != self.counts[0])
        )  # fmt: skip

    def sweep(self, seed: int) -> Sweep:
        """The sweep that these options describe."""
        own = tuple(f"own:{name}" for name in self.dispatch)
        with_own = [name for name in self.backend if BACKENDS[name].dispatches]
        algorithms = (*own, "library") if with_own else own
        left_out = [(name, "library") for name in self.backend if name not in with_own]
        left_out += [(name, algorithm) for name in with_own for algorithm in own]
        return Sweep(
            backends=self.backend, collectives=tuple(ROUTED) if "combine" in self.phases else ("moe_dispatch",),
            dtypes=self.dtype, timings=self.timing, algorithms=algorithms, left_out=tuple(left_out),
            workloads=self.workloads, executions=self.execution, precision=self.precision, max_time_s=self.max_time,
            budget_s=self.budget, iterations=self.iters, soak_s=self.soak, deadline_s=self.deadline, label=self.label,
            seed=self.seed if self.seed is not None else seed,
        )  # fmt: skip


def read_moe_options(file: Path | None, given: dict[str, Any], profile: str | None) -> MoeOptions:
    """Options from a TOML file, those ``given`` and the profile behind both. Raises UsageError with one line."""
    from commbench.moe.profiles import profile as profile_of

    name = profile or (read_toml(file).pop("profile", None) if file is not None else None)
    try:
        shape = profile_of(str(name)) if name is not None else None
    except ValueError as error:
        raise UsageError(f"{'--profile' if profile else f'{file}: profile'}: {error}") from None
    usual = {} if shape is None else {key: getattr(shape, key) for key in _OF_PROFILE}
    return read_as(MoeOptions, file, given, usual, besides=("profile",))


def check_workloads(options: MoeOptions, ranks: int, host_of: tuple[int, ...]) -> None:
    """Raises UsageError for the first workload that cannot be routed on these ranks."""
    if options.hidden % 2:
        raise UsageError(f"--hidden {options.hidden}: tokens are of an even number of values")
    if options.hidden % SCALE_BLOCK and "float8_e4m3fn" in options.dtype:
        raise UsageError(
            f"--hidden {options.hidden}: FP8 has one scale for {SCALE_BLOCK} values, so take a multiple of that, or bf16"
        )
    for workload in options.workloads:
        reason = why_not(workload, ranks, host_of)
        if reason is not None:
            raise UsageError(reason)


def check_picture(file: Path) -> None:
    """Raises UsageError where a figure cannot be drawn into a file, before hours are spent on what it shows."""
    from commbench.report.figures import SUFFIXES

    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {file}: no picture's name: end it in {', '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {file}: there is no directory {file.parent}: make it, or choose another place")
