"""Settings as a factor of a run: a variant is a name for environment variables that the ranks of its launches see.

Named sets of variants are data, in ``variants.json``: what a set is for, the backends that it is of, and where its
variables are documented. Sets of algorithms are made from what ``backends.forcing`` knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from commbench.backends.forcing import names, nccl_environment, open_mpi_settings
from commbench.provenance.env import PREFIXES, collect_env
from commbench.registry import unknown_name

DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORM = "NAME:VAR=VALUE,VAR=VALUE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A name, which is empty where no variants were asked for, and variables with their values.

    ``backends``: those whose launches it is for; none: all.
    """

    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSet:
    """Variants that ship with commbench. ``collective``: the only one that they mean anything to, None where all."""

    name: str
    about: str
    backends: tuple[str, ...]
    collective: str | None
    variants: tuple[Variant, ...]
    sources: tuple[str, ...]


def parse_variant(text: str) -> Variant:
    """``tcp:OMPI_MCA_pml=ob1,OMPI_MCA_btl="self,tcp"``; ``default:`` alone sets nothing.

    A value may hold ``=``; a comma belongs to it inside quotes (single or double), or behind a backslash, which takes
    any character as it is. Raises ValueError with one line that says what to write.
    """
    name, colon, rest = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is no variant: write {_FORM}, or {DEFAULT}: for one without settings")
    settings: dict[str, str] = {}
    for item in _split(rest, text) if rest.strip() else ():
        variable, equals, value = item.partition("=")
        if not equals:
            raise ValueError(
                f"{item!r} in {text!r} is not VAR=VALUE: a value that holds a comma goes in quotes, "
                "as in tcp:OMPI_MCA_btl='self,tcp'"
            )
        if variable.strip() in settings:
            raise ValueError(f"{text!r} sets {variable.strip()} twice")
        settings[variable.strip()] = value
    return make_variant(name.strip(), settings)


def make_variant(name: str, settings: Mapping[str, str]) -> Variant:
    """A checked variant. Raises ValueError with one line."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a variant: use up to 40 letters, digits and any of _ . + -")
    for variable, value in settings.items():
        if not _VARIABLE.fullmatch(variable) or not variable.startswith(PREFIXES):
            raise ValueError(
                f"variant {name!r} may not set {variable!r}: only variables that begin with {', '.join(PREFIXES)}"
            )
        if "\0" in value:
            raise ValueError(f"variant {name!r}: the value of {variable} holds a null character")
    if bool(settings) != (name != DEFAULT):
        raise ValueError(
            f"variant {DEFAULT!r} is the one without settings: give this one another name"
            if settings
            else f"variant {name!r} sets nothing: write {_FORM}, or {DEFAULT}: for one without settings"
        )
    return Variant(name=name, settings=dict(settings))


def _split(text: str, whole: str) -> list[str]:
    """At the commas that are neither quoted nor behind a backslash; quotes and backslashes are gone from the parts."""
    parts, quote = [""], ""
    letters = iter(text)
    for letter in letters:
        if letter == "\\":
            parts[-1] += next(letters, "\\")
        elif letter == quote:
            quote = ""
        elif quote:
            parts[-1] += letter
        elif letter in "\"'":
            quote = letter
        elif letter == ",":
            parts.append("")
        else:
            parts[-1] += letter
    if quote:
        raise ValueError(f"{whole!r} has a quote {quote} that nothing closes")
    return parts


def gather_variants(given: Sequence[Variant], sets: Sequence[VariantSet]) -> tuple[Variant, ...]:
    """All variants of a run; none given gives the nameless one. One alone gets ``default`` beside it, to be compared
    with. Raises ValueError where two share a name."""
    found = {variant.name: variant for one in sets for variant in one.variants}
    names_given = [variant.name for variant in given]
    for index, name in enumerate(names_given):
        if name in names_given[:index] or (name in found and name != DEFAULT):
            raise ValueError(f"two variants are called {name!r}: give each a name of its own")
    found |= {variant.name: variant for variant in given}
    if len(found) == 1 and DEFAULT not in found:
        found = {DEFAULT: Variant(name=DEFAULT), **found}
    return tuple(found.values()) or (Variant(),)


def overridden(variants: Sequence[Variant], environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By variant the variables that are set already, and that it sets to something else, with the values they have."""
    known = collect_env(environ)
    found = {
        v.name: {n: known[n] for n, value in v.settings.items() if environ.get(n, value) != value} for v in variants
    }
    return {name: values for name, values in found.items() if values}


# -- sets that ship ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def variant_sets() -> dict[str, VariantSet]:
    text = resources.files("commbench.launch").joinpath("variants.json").read_text(encoding="utf-8")
    return {name: _read_set(name, entry) for name, entry in json.loads(text).items()}


def variant_set(name: str) -> VariantSet:
    """Raises ValueError with a near name."""
    known = variant_sets()
    if name not in known:
        raise ValueError(unknown_name("set of variants", name, known))
    return known[name]


def why_not_set(one: VariantSet, backends: Sequence[str], collectives: Sequence[str]) -> str | None:
    """Why a sweep has no use for a set, and what to do; None where it has."""
    if not set(one.backends) & set(backends):
        which = " or ".join(one.backends)
        return f"{one.name} is for the backend {which}, which is not in the sweep: add --backend {one.backends[0]}"
    if one.collective is not None and tuple(collectives) != (one.collective,):
        return f"{one.name} tells {one.collective} apart and nothing else: ask for --collective {one.collective} alone"
    return None


def _read_set(name: str, entry: Mapping[str, Any]) -> VariantSet:
    backends, collective = tuple(entry["backends"]), entry.get("collective")
    given: dict[str, Mapping[str, str]] = dict(entry.get("variants", {}))
    if collective is not None:
        given |= _algorithms(backends[0], collective, entry.get("algorithms") or names(backends[0], collective))
    made = [replace(make_variant(key, settings), backends=backends) for key, settings in given.items()]
    return VariantSet(
        name=name, about=entry["about"], backends=backends, collective=collective,
        variants=(Variant(name=DEFAULT), *made), sources=tuple(entry["sources"]),
    )  # fmt: skip


def _algorithms(backend: str, collective: str, chosen: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """By name (``ring:ll`` becomes ``ring-ll``) what makes a library use an algorithm, whatever its version."""
    found: dict[str, Mapping[str, str]] = {}
    for algorithm in chosen:
        forced = {collective: algorithm}
        if backend == "nccl":
            settings = nccl_environment(forced, per_function=False)
        else:
            settings = {f"OMPI_MCA_{name}": value for name, value in open_mpi_settings(forced).items()}
        found[algorithm.replace(":", "-")] = settings
    return found
