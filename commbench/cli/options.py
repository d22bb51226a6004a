"""The options of ``commbench run``, from the command line and from a TOML file, checked in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from commbench.algorithms.names import check_algorithms, expand_algorithms
from commbench.backends import BACKENDS, REGISTRY
from commbench.cases import BUFFERS, DTYPES, EXECUTIONS, PLACEMENTS, REDUCE_OPS, TIMINGS, Sweep, parse_group
from commbench.cli.errors import UsageError
from commbench.collectives import COLLECTIVES, ROUTED
from commbench.launch.bind import BINDINGS
from commbench.launch.order import ONCE, Launches, parse_auto
from commbench.launch.variants import (
    Variant,
    VariantSet,
    gather_variants,
    make_variant,
    parse_variant,
    variant_set,
    why_not_set,
)
from commbench.registry import unknown_name
from commbench.units import parse_duration, parse_fraction, parse_sizes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "bf16": "bfloat16", "fp16": "float16",
            "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}  # fmt: skip


def names_of(kind: str, known: tuple[str, ...]) -> Callable[[Any], tuple[str, ...]]:
    def parse(value: Any) -> tuple[str, ...]:
        found = []
        for name in items_of(value):
            if name not in known:
                raise ValueError(unknown_name(kind, name, known))
            found.append(name)
        return tuple(dict.fromkeys(found))

    return parse


def items_of(value: Any) -> list[str]:
    """A comma list or a TOML array, as stripped strings; at least one."""
    items = [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    items = [item.strip() for item in items if item.strip()]
    if not items:
        raise ValueError("an empty list: name at least one")
    return items


def _collectives(value: Any) -> tuple[str, ...]:
    if routed := next((name for name in items_of(value) if name in ROUTED), None):
        raise ValueError(f"{routed} has tokens and experts in place of sizes: measure it with commbench moe")
    if items_of(value) == ["all"]:
        return tuple(COLLECTIVES)
    return names_of("collective", tuple(COLLECTIVES))(value)


def _dtypes(value: Any) -> tuple[str, ...]:
    if items_of(value) == ["all"]:
        return tuple(DTYPES)
    return names_of("dtype", tuple(DTYPES))([_ALIASES.get(item, item) for item in items_of(value)])


def _ops(value: Any) -> tuple[str, ...]:
    return REDUCE_OPS if items_of(value) == ["all"] else names_of("reduce op", REDUCE_OPS)(value)


def integer_of(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        # A TOML file may say 2.5 or true, which int() would take.
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"{value!r} is not a whole number")  # noqa: TRY004  pydantic reports a ValueError
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
        if number < least:
            raise ValueError(f"{value} is too small: it must be {least} or more")
        return number

    return parse


def _launches(value: Any) -> Launches:
    if isinstance(value, str) and value.startswith("auto"):
        return parse_auto(value)
    return Launches.fixed(integer_of(1)(value))


def _variants(value: Any) -> tuple[Variant, ...]:
    """Texts as on the command line, or a TOML table of tables: a name, and variables with their values."""
    if isinstance(value, dict):
        found = [make_variant(name, _settings(name, settings)) for name, settings in value.items()]
    else:
        found = [parse_variant(_text(item)) for item in (value if isinstance(value, (list, tuple)) else [value])]
    gather_variants(found, ())
    return tuple(found)


def _settings(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"variant {name!r} is not a table of variables")  # noqa: TRY004  as above
    for variable, setting in value.items():
        if isinstance(setting, bool) or not isinstance(setting, (str, int)):
            line = f"variant {name!r}: {variable} is neither text nor a whole number: put it in quotes"
            raise ValueError(line)  # noqa: TRY004  as above
    return {variable: str(setting) for variable, setting in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text: put it in quotes")  # noqa: TRY004  as above
    return value


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "backend": lambda value: names_of("backend", tuple(REGISTRY))(value),
    "collective": _collectives,
    "sizes": lambda value: parse_sizes(",".join(items_of(value))),
    "dtype": _dtypes,
    "op": _ops,
    "placement": names_of("placement", PLACEMENTS),
    "group": lambda value: tuple(dict.fromkeys(parse_group(item) for item in items_of(value))),
    "root": integer_of(0),
    "timing": names_of("timing", TIMINGS),
    "execution": names_of("execution", EXECUTIONS),
    "buffers": names_of("kind of buffer", BUFFERS),
    "precision": lambda value: parse_fraction(str(value)),
    "max_time": lambda value: parse_duration(str(value)),
    "budget": lambda value: None if str(value) == "auto" else parse_duration(str(value)),
    "ranks": integer_of(1),
    "nodes": integer_of(1),
    "launches": _launches,
    "variant": _variants,
    "variants": lambda value: tuple(variant_set(name) for name in dict.fromkeys(items_of(value))),
    "spread": lambda value: parse_duration(str(value)),
    "bind": lambda value: names_of("binding", BINDINGS)(value)[0],
    "cache": lambda value: names_of("cache", ("rotate", "warm"))(value)[0],
    "iters": integer_of(1),
    "soak": lambda value: parse_duration(str(value)),
    "deadline": lambda value: parse_duration(str(value)),
    "seed": integer_of(0),
    "out": _text,
    "label": _text,
}


class RunOptions(BaseModel):
    """Every option of ``commbench run`` with its default; the keys of a TOML file are these names (``for`` is soak)."""

    model_config = ConfigDict(extra="forbid")
    elsewhere: ClassVar[frozenset[str]] = frozenset()  # fields that are not this command's to choose
    routed: ClassVar[bool] = False  # whether tokens are what is sent

    backend: tuple[str, ...] = Sweep().backends
    collective: tuple[str, ...] = Sweep().collectives
    sizes: tuple[int, ...] = Sweep().sizes
    dtype: tuple[str, ...] = ("float32",)
    op: tuple[str, ...] = ("sum",)
    placement: tuple[str, ...] = ("out",)
    algorithm: tuple[str, ...] = ("library",)
    group: tuple[str, ...] = ("world",)
    root: int = 0
    timing: tuple[str, ...] = TIMINGS
    execution: tuple[str, ...] = ("eager",)
    buffers: tuple[str, ...] = ("plain",)
    precision: float = 0.02
    max_time: float = 5.0
    budget: float | None = None
    ranks: int | None = None
    nodes: int | None = None
    launches: Launches = ONCE
    variant: tuple[Variant, ...] = ()
    variants: tuple[VariantSet, ...] = ()
    spread: float | None = None
    bind: str = "none"
    cache: str = "rotate"
    iters: int | None = None
    soak: float | None = None
    deadline: float = 30.0
    seed: int | None = None
    out: Path = Path("results")
    label: str = ""

    @field_validator(*_PARSERS, mode="before")
    @classmethod
    def _parse(cls, value: Any, info: Any) -> Any:
        return None if value is None else _PARSERS[info.field_name](value)

    @field_validator("backend", mode="after")
    @classmethod
    def _whole(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        odd = next((name for name in names if BACKENDS[name].dispatches and not cls.routed), None)
        if odd is not None:
            raise ValueError(f"{odd} has dispatch and combine alone: measure it with commbench moe")
        return names

    @field_validator("algorithm", mode="before")
    @classmethod
    def _parse_algorithm(cls, value: Any, info: Any) -> Any:
        # Which there are depends on these two, which are read before; not there: they are wrong themselves.
        if not {"collective", "backend"} <= info.data.keys():
            return value
        return check_algorithms(items_of(value), info.data["collective"], info.data["backend"])

    @field_validator("variants", mode="after")
    @classmethod
    def _fit(cls, sets: tuple[VariantSet, ...], info: Any) -> tuple[VariantSet, ...]:
        if {"collective", "backend", "variant"} <= info.data.keys():
            reasons = (why_not_set(one, info.data["backend"], info.data["collective"]) for one in sets)
            reason = next(filter(None, reasons), None)
            if reason is not None:
                raise ValueError(reason)
            gather_variants(info.data["variant"], sets)
        return sets

    @field_validator("spread", mode="after")
    @classmethod
    def _several(cls, spread: float | None, info: Any) -> float | None:
        if spread is not None and "launches" in info.data and not info.data["launches"].several:
            raise ValueError("there is one launch, which cannot be spread over a time: add --launches, such as 6")
        return spread

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """Those of the command and of the sets that it names; the nameless one where there are none."""
        return gather_variants(self.variant, self.variants)

    def sweep(self, seed: int) -> Sweep:
        """The sweep that these options describe."""
        algorithms, left_out = expand_algorithms(self.algorithm, self.collective)
        return Sweep(
            backends=self.backend, collectives=self.collective, sizes=self.sizes, dtypes=self.dtype, ops=self.op,
            placements=self.placement, groups=self.group, timings=self.timing, algorithms=algorithms,
            left_out=left_out, root=self.root, executions=self.execution, buffers=self.buffers, cache=self.cache,
            precision=self.precision, max_time_s=self.max_time, budget_s=self.budget, iterations=self.iters,
            soak_s=self.soak, deadline_s=self.deadline, label=self.label,
            seed=self.seed if self.seed is not None else seed,
        )  # fmt: skip


Options = TypeVar("Options", bound="RunOptions")


def read_options(file: Path | None, given: dict[str, Any]) -> RunOptions:
    """Options of ``commbench run``, see ``read_as``."""
    return read_as(RunOptions, file, given)


def read_as(
    kind: type[Options], file: Path | None, given: dict[str, Any], usual: dict[str, Any] | None = None,
    besides: tuple[str, ...] = (),
) -> Options:  # fmt: skip
    """Options from a TOML file overridden by those ``given`` on the command line (None: not given).

    ``usual`` stand in for what neither says; keys of the file that are ``besides`` the options are not read here. Raises UsageError with one line that names the option and what to write
    instead.
    """
    values = read_toml(file) if file is not None else {}
    values = {key: value for key, value in values.items() if key not in besides}
    given = {key: value for key, value in given.items() if value is not None}
    foreign = next((key for key in values if key in kind.elsewhere), None)
    if foreign is not None:
        raise UsageError(f"{file}: {unknown_name('key', foreign, _keys(kind))}")
    try:
        return kind(**{**(usual or {}), **values, **given})
    except ValidationError as error:
        raise UsageError(_one_line(error, file, given, kind)) from None


def _keys(kind: type[RunOptions]) -> list[str]:
    return [_written(name) for name in kind.model_fields if name not in kind.elsewhere]


def read_toml(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            values = tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"cannot read sweep file {file} ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"sweep file {file} is not TOML: {error}") from None
    # ``for`` cannot be the name of a field.
    return {"soak" if key == "for" else key.replace("-", "_"): value for key, value in values.items()}


def _one_line(error: ValidationError, file: Path | None, given: dict[str, Any], kind: type[RunOptions]) -> str:
    """The first thing that is wrong, under the name that the user gave it."""
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"{file}: {unknown_name('key', key, _keys(kind))}"
    where = f"--{_written(key).replace('_', '-')}" if key in given else f"{file}: {_written(key)}"
    return f"{where}: {first.get('ctx', {}).get('error', first['msg'])}"


def _written(field: str) -> str:
    return "for" if field == "soak" else field
