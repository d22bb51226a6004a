"""A case's operations on their buffers, once it is known on every rank that memory and library have room for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commbench.cases import Case
from commbench.measure.buffers import buffer_sets
from commbench.measure.control import Control
from commbench.measure.data import Data
from commbench.measure.operation import Operation

MAX_STREAMED_SETS = 128
SMALL_BYTES = 64 << 20  # below this, memory is not worth a round of messages
MEMORY_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """This rank's operations and their data (none for a rank outside the groups), or why no rank has any."""

    operations: list[Operation]
    pattern: Data | None = None
    refusal: str | None = None


def prepare(
    case: Case, involved: int, control: Control, make_data: Callable[[], Data | None], make: Callable[[], Operation],
    free_bytes: Callable[[], float], set_bytes: int | None = None, work_bytes: int | None = None,
    most_sets: int = MAX_STREAMED_SETS,
) -> Prepared:  # fmt: skip
    """Make the operations and try one, on every rank in step.

    ``involved`` counts the ranks of all groups; ``make_data`` gives this rank's data, None where it takes no part, ``make``
    the operation on fresh buffers and ``free_bytes`` what buffers may take on this rank; ``set_bytes``: what the buffers
    of one operation take, by default an input and an output of a message; ``work_bytes``: what an operation takes beside
    them, by default as much again; ``most_sets``: of buffers. Raises RuntimeError where some ranks can and others cannot.
    """
    each = 2 * case.bytes if set_bytes is None else set_bytes
    beside = each if work_bytes is None else work_bytes
    sets = _sets(case, each, most_sets, repeatable=False)
    refusal = _no_room(each * sets + beside, each + beside, control, free_bytes)
    if refusal is not None:
        return Prepared(operations=[], refusal=refusal)
    operations: list[Operation] = []
    pattern = make_data()

    def first() -> None:
        if pattern is not None:
            operations.append(make())
            pattern.fill(operations[0].input, 0)
            operations[0].upload()

    # Made on all before it is tried on any: a rank that cannot make it would leave its peers inside the collective.
    steps: list[Callable[[], Any]] = [first, lambda: operations[0].run() if operations else None]
    if case.execution == "graph":
        graphs: list[Callable[[], Any]] = []
        steps += [lambda: graphs.extend(_captured(operations)), lambda: _launch(graphs, operations)]
    for step in steps:
        refusal = _refusal(case, _attempt(step), involved, control)
        if refusal is not None:
            return Prepared(operations=[], refusal=refusal)
    repeatable: bool = control.agree(not operations or operations[0].repeatable, all)
    if pattern is not None:
        operations += [make() for _ in range(_sets(case, each, most_sets, repeatable=repeatable) - 1)]
    return Prepared(operations=operations, pattern=pattern)


def _captured(operations: list[Operation]) -> list[Callable[[], Any]]:
    return [operation.capture() for operation in operations if operation.capture is not None]


def _launch(graphs: list[Callable[[], Any]], operations: list[Operation]) -> None:
    for launch, operation in zip(graphs, operations, strict=True):
        launch()
        operation.finish()


def _attempt(step: Callable[[], Any]) -> str | None:
    """What the library said if it would not, in one line."""
    try:
        step()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as problem:
        text = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
        return f"{type(problem).__name__}: {text}"
    return None


def _refusal(case: Case, error: str | None, involved: int, control: Control) -> str | None:
    """The reason where every rank was refused: it is the library's way. Raises RuntimeError where only some were."""
    errors = control.agree(error, lambda all_: [text for text in all_ if text is not None])
    if not errors:
        return None
    if len(errors) < involved:
        raise RuntimeError(errors[0])
    return f"{case.backend} refuses it: {errors[0]}"


def _no_room(need: int, of_one: int, control: Control, free_bytes: Callable[[], float]) -> str | None:
    """Why the buffers do not fit somewhere, agreed by all ranks. ``of_one``: what a single set needs."""
    if of_one < 4 * SMALL_BYTES:
        return None
    have = control.agree(free_bytes(), min) * MEMORY_SHARE
    return None if need <= have else f"needs {need / 1e9:.1f} GB a rank and {have / 1e9:.1f} GB is available"


def _sets(case: Case, set_bytes: int, most: int, *, repeatable: bool) -> int:
    """How many buffer sets a case rotates through, the same on every rank."""
    if case.timing == "streamed":
        # An operation that overwrites its input needs a set each: at least two make a stream.
        return buffer_sets(set_bytes, case.cache, most=most, least=1 if repeatable else min(2, most))
    return min(most, buffer_sets(set_bytes, case.cache))


def host_memory() -> float:
    """Bytes that the kernel says new processes could have, or infinity where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return float(sys.maxsize)
