"""Where NCCL's own log and our model of its tuner differ: a wrong graph, another version, a tuner plugin."""

from __future__ import annotations

from dataclasses import dataclass

from commbench.importers.nccl_log import Choice, NcclLog, TuningTable
from commbench.models.nccl import Cost, NcclInputs, nccl_estimate, nccl_table, parse_version
from commbench.models.nccl.enabling import allowed
from commbench.models.nccl.inputs import FUNCTION_OF

_PRINTED = 0.051  # one decimal of a microsecond or GB/s, and the rounding of floats


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDifference:
    """One entry that differs by more than its printed digit; a side where NCCL may not use it is None."""

    function: str
    algorithm: str
    protocol: str
    logged: Cost | None
    modelled: Cost | None

    def __str__(self) -> str:
        name = f"{self.function} {self.algorithm} {self.protocol}"
        return f"{name}: NCCL has {_text(self.logged)}, the model {_text(self.modelled)}"


def _text(cost: Cost | None) -> str:
    if cost is None:
        return "it disabled"
    return f"{cost.latency_s * 1e6:.1f} us and {cost.bandwidth_Bps / 1e9:.1f} GB/s"


def table_differences(
    table: TuningTable, inputs: NcclInputs, *, version: str, algo: str | None = None, proto: str | None = None
) -> tuple[TableDifference, ...]:
    """The entries in which a logged table and the model's for ``inputs`` differ, in the table's order.

    Entries that both have disabled do not count, whatever their latency. Raises ValueError as nccl_estimate does.
    """
    known = parse_version(version)
    modelled = nccl_table(inputs, known)
    may = allowed(inputs, known, algo, proto)
    found = []
    for entry in dict.fromkeys([*table.costs, *modelled]):
        logged = _usable(table.costs.get(entry))
        ours = _usable(modelled.get(entry)) if entry in may else None
        if not _alike(logged, ours):
            function, algorithm, protocol = entry
            found.append(
                TableDifference(function=function, algorithm=algorithm, protocol=protocol, logged=logged, modelled=ours)
            )
    return tuple(found)


def _usable(cost: Cost | None) -> Cost | None:
    return cost if cost is not None and cost.bandwidth_Bps > 0.05e9 else None


def _alike(logged: Cost | None, ours: Cost | None) -> bool:
    if logged is None or ours is None:
        return logged is ours
    near = abs(logged.latency_s - ours.latency_s) <= _PRINTED * 1e-6
    return near and abs(logged.bandwidth_Bps - ours.bandwidth_Bps) <= _PRINTED * 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceDifference:
    """A logged choice that the model would have made otherwise; None is nothing to choose from."""

    choice: Choice
    collective: str
    algorithm: str | None
    protocol: str | None

    def __str__(self) -> str:
        ours = f"{self.algorithm} {self.protocol}" if self.algorithm else "nothing"
        took = f"{self.choice.algorithm} {self.choice.protocol}"
        return f"{self.collective} of {self.choice.logged_bytes} B logged: NCCL took {took}, the model {ours}"


def choice_differences(
    log: NcclLog, inputs: NcclInputs, *, version: str, algo: str | None = None, proto: str | None = None,
    function: str = "AllReduce",
) -> tuple[ChoiceDifference, ...]:  # fmt: skip
    """Each distinct choice in ``log`` that differs from the model's; ``function`` is what old logs leave out.

    Data types and reduce ops are not in the log: float32 sums are assumed.
    """
    collectives = {name: collective for collective, name in FUNCTION_OF.items()}
    found: dict[tuple[str, int, str, str], ChoiceDifference] = {}
    for choice in log.choices:
        collective = collectives.get(choice.function or function)
        if collective is None:
            continue
        size = choice.message_bytes(inputs.ranks)
        ours = nccl_estimate(collective, size, inputs, version=version, algo=algo, proto=proto)
        if (ours.algorithm, ours.protocol) != (choice.algorithm, choice.protocol):
            key = (collective, size, choice.algorithm, choice.protocol)
            found.setdefault(
                key,
                ChoiceDifference(
                    choice=choice, collective=collective, algorithm=ours.algorithm, protocol=ours.protocol
                ),
            )
    return tuple(found.values())
