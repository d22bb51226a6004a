"""The algorithms that commbench carries out itself, as a case names them: ``own:ring``, or ``own:ring/8`` in 8 pieces.

What is executed and what is predicted for it are the same schedule, made here.
"""

from __future__ import annotations

import re
from functools import lru_cache

from commbench.cases import OWN
from commbench.registry import unknown_name
from commbench.schedules.catalogue import ALGORITHMS, build, buildable, pieces_for
from commbench.schedules.schedule import Schedule

MOST_GIVEN_PIECES = 1024
_NAME = re.compile(r"^own:(?P<algorithm>[a-z_]+)(?:/(?P<pieces>[1-9][0-9]*))?$")


def parse_own(name: str) -> tuple[str, int | None]:
    """The schedule's name and the number of pieces if one is given. Raises ValueError."""
    found = _NAME.match(name)
    if not found:
        raise ValueError(f"{name!r} is not an algorithm: write own:NAME, or own:NAME/8 for 8 pieces, such as own:ring")
    pieces = int(found["pieces"]) if found["pieces"] else None
    if pieces is not None and pieces > MOST_GIVEN_PIECES:
        raise ValueError(f"{name!r} has too many pieces: {MOST_GIVEN_PIECES} at most")
    return found["algorithm"], pieces


def why_not_own(collective: str, name: str, hosts: tuple[int, ...]) -> str | None:
    """One line on why ranks on these hosts cannot do the collective so, or None. ``name`` is one that parses."""
    algorithm, _ = parse_own(name)
    known = ALGORITHMS[collective]
    if algorithm not in known:
        return f"{collective} has no {algorithm}: known are {', '.join(OWN + other for other in known)}"
    return buildable(collective, algorithm, hosts)


def own_pieces(collective: str, name: str, message_bytes: int) -> int:
    """In how many pieces a message is sent: as the name says, or by the rule of :func:`pieces_for`."""
    algorithm, given = parse_own(name)
    return given or pieces_for(collective, algorithm, message_bytes)


def own_schedule(collective: str, name: str, message_bytes: int, hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """The schedule that is executed for a case: its pieces as given or by the rule, all its channels in one.

    ``hosts[rank]`` numbers the host of a rank of the group. Raises ValueError for a name that is not known, and
    ScheduleError where :func:`why_not_own` has a reason.
    """
    pieces = own_pieces(collective, name, message_bytes)
    return _merged(build(collective, parse_own(name)[0], len(hosts), root, pieces, hosts))


@lru_cache(maxsize=64)
def _merged(schedule: Schedule) -> Schedule:
    return schedule.merged()


def own_names(collectives: tuple[str, ...]) -> tuple[str, ...]:
    """Every algorithm that at least one of the collectives has."""
    return tuple(dict.fromkeys(OWN + name for collective in collectives for name in ALGORITHMS[collective]))


def check_own(name: str, collectives: tuple[str, ...]) -> str:
    """The name if some of the collectives have such an algorithm. Raises ValueError with a near name."""
    algorithm, pieces = parse_own(name)
    known = own_names(collectives)
    if algorithm == "all" and pieces is not None:
        raise ValueError(f"{name!r}: pieces go with the name of one algorithm, such as own:ring/{pieces}")
    if (others := [one for one in ALGORITHMS if algorithm in ALGORITHMS[one]]) and OWN + algorithm not in known:
        of = f"no {OWN}{algorithm} for {', '.join(collectives)}, it is for {', '.join(others)}"
        raise ValueError(f"{of}: known are {', '.join(sorted(known))}")
    if OWN + algorithm not in known:
        raise ValueError(unknown_name("algorithm", OWN + algorithm, known))
    return name
