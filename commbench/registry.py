"""Named things that are imported only when used, with a near name suggested for a wrong one."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that is not in ``known``: the nearest, then the list."""
    names = sorted(known)
    import difflib  # not before it is needed: every rank loads this module

    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}"


class Registry:
    """Maps a name to a ``module:attribute`` target, resolved on the first ``load``."""

    def __init__(self, kind: str, targets: dict[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def check(self, name: str) -> str:
        """The name itself; ValueError with a suggestion if nothing is registered under it."""
        if name not in self._targets:
            raise ValueError(unknown_name(self.kind, name, self._targets))
        return name

    def load(self, name: str) -> Any:
        """The object registered as ``name``; ValueError for an unknown one, ImportError from its module."""
        module, _, attribute = self._targets[self.check(name)].partition(":")
        return getattr(importlib.import_module(module), attribute)
