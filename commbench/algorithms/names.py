"""Which algorithms can be asked for by name."""

from __future__ import annotations

from collections.abc import Sequence

from commbench.backends.forcing import LIBRARY, check_forced
from commbench.cases import is_own
from commbench.schedules.own import check_own, own_names

ALL_OWN = "own:all"


def check_algorithms(names: Sequence[str], collectives: tuple[str, ...], backends: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each once. Raises ValueError with a near name for one that none of the collectives has.

    A name without ``own:`` is of an algorithm that one of the backends can be told to use.
    """
    for name in names:
        if is_own(name) and name != ALL_OWN:
            check_own(name, collectives)
        elif name not in (LIBRARY, ALL_OWN):
            check_forced(name, backends, collectives, (LIBRARY, ALL_OWN, *own_names(collectives)))
    return tuple(dict.fromkeys(names))


def expand_algorithms(
    names: tuple[str, ...], collectives: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Checked names with ``own:all`` written out, and the (collective, algorithm) pairs that it does not mean."""
    every = own_names(collectives)
    found = tuple(dict.fromkeys(one for name in names for one in (every if name == ALL_OWN else (name,))))
    left_out = tuple(
        (collective, name)
        for collective in collectives
        for name in every
        if ALL_OWN in names and name not in names and name not in own_names((collective,))
    )
    return found, left_out
