"""Slurm's compressed lists: host names ``n[01-03,7]`` and task counts ``4(x2),3``.

The grammar is that of Slurm's own output (sbatch and srun manuals, environment variables
SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 100_000
_NAME = re.compile(r"^[A-Za-z0-9_.\-]*$")
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")
_COUNT = re.compile(r"^(\d+)(?:\(x(\d+)\))?$")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Host names in order: ``n[01-03,7],login`` gives n01 n02 n03 n7 login.

    Several brackets in one name multiply, the last one running fastest. Raises ValueError for anything
    that is not such a list, and for one of more than ``MAX_HOSTS`` hosts.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text.strip()):
        hosts.extend(itertools.islice(_expand(entry, text), MAX_HOSTS + 1 - len(hosts)))
        if len(hosts) > MAX_HOSTS:
            raise ValueError(f"host list {text[:60]!r} names more than {MAX_HOSTS} hosts")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Tasks per node in node order: ``4(x2),3`` gives 4 4 3. Raises ValueError."""
    counts: list[int] = []
    for entry in text.strip().split(","):
        match = _COUNT.match(entry)
        repeats = int(match[2] or 1) if match else 0
        if not match or not repeats or len(counts) + repeats > MAX_HOSTS:
            raise ValueError(f"{text[:60]!r} is not a list of task counts such as 4(x2),3")
        counts.extend([int(match[1])] * repeats)
    return tuple(counts)


def _split_outside_brackets(text: str) -> list[str]:
    entries, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"host list {text[:60]!r} has unbalanced brackets")
        if character == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"host list {text[:60]!r} has unbalanced brackets")
    return [*entries, text[start:]]


def _expand(entry: str, text: str) -> Iterator[str]:
    # Brackets are balanced and not nested by now: odd pieces are their contents.
    pieces = re.split(r"[\[\]]", entry)
    if not entry or not all(_NAME.match(piece) for piece in pieces[::2]):
        raise ValueError(f"host list {text[:60]!r} holds a name that is no host name: {entry[:60]!r}")
    return _product([(piece,) if i % 2 == 0 else _numbers(piece, text) for i, piece in enumerate(pieces)])


def _product(choices: list[tuple[str, ...]]) -> Iterator[str]:
    return ("".join(parts) for parts in itertools.product(*choices))


def _numbers(body: str, text: str) -> tuple[str, ...]:
    found: list[str] = []
    for part in body.split(","):
        match = _RANGE.match(part)
        if not match:
            raise ValueError(f"host list {text[:60]!r} has a range that is not such as 01-03: {part[:60]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_HOSTS - len(found):
            raise ValueError(f"host list {text[:60]!r} has a range that is reversed or too long: {part[:60]!r}")
        found.extend(f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return tuple(found)
