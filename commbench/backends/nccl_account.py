"""What a backend over NCCL knows of NCCL besides its calls: which GPU is whose, what NCCL was told to use, what its log
says that it used, and what its own model expects.

Nothing here loads NCCL or torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from commbench.backends.base import BackendError, Context
from commbench.backends.forcing import Chosen, can_force, nccl_environment, nccl_function, nccl_name
from commbench.cases import Case
from commbench.measure.operation import Operation
from commbench.models.nccl import NcclInputs, nccl_estimate
from commbench.provenance.env import collect_env
from commbench.provenance.nccl_choices import Choice, NcclLogFile, NcclLogSwitch, log_reset
from commbench.provenance.nccl_tuner import VARIABLE, GraphDump, nccl_variable, processor, tuner_inputs

# NCCL's own words: "FP8 reduction support begins with sm90 capable devices".
FP8_REDUCTIONS = (9, 0)
# From NCCL 2.30 on: two ranks may share a GPU, to see that something works (its user guide: experimental).
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARING_SINCE = 23000
_LISTS_PER_FUNCTION = 22400  # NCCL 2.24 takes NCCL_ALGO for one function


class Gpu(NamedTuple):
    """A rank's device: what tells it from others, and its compute capability."""

    uuid: str
    major: int
    minor: int


def sharing_allowed() -> bool:
    """Whether the user lets ranks share a GPU: what is then timed is how they hinder one another."""
    return nccl_variable(SHARING) == "1"


def device_number(context: Context, count: int) -> int:
    """Which of the ``count`` devices that this rank sees is its own. Raises BackendError where there are too few."""
    if sharing_allowed():
        return context.local_rank % count
    # A launcher that binds GPUs shows each rank its own one only, as number 0.
    number = context.local_rank if count > 1 else 0
    if number >= count:
        raise BackendError(
            f"rank {context.rank} is local rank {number}, but its host has {count} GPUs: start at most one rank a GPU"
        )
    return number


def shared_device(devices: list[tuple[str, str]]) -> str | None:
    """What is wrong where two ranks have one device; ``devices[rank]`` is (host, the device's UUID)."""
    first: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        if first.setdefault(device, rank) != rank:
            return f"ranks {first[device]} and {rank} on {device[0]} have the same GPU: start at most one rank a GPU"
    return None


def version_text(code: int) -> str:
    """What NCCL_VERSION (nccl.h, from 2.9 on) stands for: 22304 is 2.23.4."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


class NcclAccount:
    """One rank's. ``version``: NCCL's own, as a number; ``modelled``: whether its tuner is that of NCCL's model. Make it
    and ``compare`` before the first communicator, since NCCL reads variables once that are set here."""

    def __init__(self, version: int, forced: Mapping[str, str], *, modelled: bool = True) -> None:
        self._version = version
        self._modelled = modelled
        self._log: NcclLogFile | None = None  # of all calls
        self._switch: NcclLogSwitch | None = None  # for single calls
        self._dump: GraphDump | None = None  # at rank 0
        self._tuner: NcclInputs | str | None = None  # None until it is asked for
        self._ranks: tuple[tuple[str, ...], list[Gpu], list[tuple[str, str]]] = ((), [], [])
        self.shares = False  # whether ranks share a GPU
        self.gpu: str | None = None  # the UUID of this rank's own
        self._unforced: str | None = None
        self._forced = bool(forced)
        if forced:
            self._force(forced)

    def _force(self, forced: Mapping[str, str]) -> None:
        lists = self._version >= _LISTS_PER_FUNCTION
        algorithm = next(iter(forced.values()))
        if lists or can_force("nccl", "all_reduce", algorithm):
            os.environ.update(nccl_environment(forced, per_function=lists))
        else:
            # What starts the iterations together is an all_reduce.
            version = version_text(self._version)
            self._unforced = f"NCCL {version} would take {algorithm} for every operation, which all_reduce has not"

    def why_not_forced(self) -> str | None:
        """Why NCCL was not told to use the algorithm that it was to be told of."""
        return self._unforced

    def compare(self, context: Context, mine: Gpu) -> None:
        """One device a rank: of a shared one NCCL says no more than "invalid usage". Raises BackendError."""
        self.gpu = mine.uuid
        found = context.agree([list(mine), list(processor())], list)
        gpus = [Gpu(*gpu) for gpu, _ in found]
        self._ranks = (context.hosts, gpus, [(architecture, vendor) for _, (architecture, vendor) in found])
        shared = shared_device([(host, gpu.uuid) for host, gpu in zip(context.hosts, gpus, strict=True)])
        if shared and not (sharing_allowed() and self._version >= _SHARING_SINCE):
            raise BackendError(shared)
        self.shares = shared is not None
        # Not before: a start that fails above leaves no file behind.
        reset = log_reset(self._version)
        if context.agree(reset is not None, all) and reset is not None:
            self._switch = NcclLogSwitch(os.environ, reset)
        elif self._forced:
            self._log = NcclLogFile(os.environ)
        if context.rank == 0 and self._modelled:
            self._dump = GraphDump(os.environ)

    @property
    def capability(self) -> tuple[int, int]:
        """The least compute capability of all ranks' devices."""
        return min((gpu.major, gpu.minor) for gpu in self._ranks[1])

    def why_not(self, case: Case) -> str | None:
        """Why NCCL has no such operation on these devices; types are left to the caller."""
        if case.reduce_op in ("band", "bor", "bxor"):
            return f"NCCL has no reduce operation {case.reduce_op!r}"
        if case.reduce_op and case.dtype.startswith("float8") and self.capability < FP8_REDUCTIONS:
            least = ".".join(map(str, self.capability))
            return f"NCCL reduces {case.dtype} from compute capability 9.0 on, and a GPU of this job has {least}"
        return None

    def settings(self) -> dict[str, str]:
        """NCCL's variables, but those that are commbench's; under ``nccl graphs`` why there is no estimate."""
        chosen = {name: value for name, value in collect_env(os.environ).items() if name.startswith("NCCL_")}
        if self._log is not None:
            chosen.pop("NCCL_DEBUG_FILE")
        if self._dump is not None:
            tuner = self._tuner_inputs(self._dump)
            if self._dump.private:
                chosen.pop(VARIABLE)
            if isinstance(tuner, str):
                chosen["nccl graphs"] = tuner
        return chosen

    def _tuner_inputs(self, dump: GraphDump) -> NcclInputs | str:
        """Those of the communicator of all ranks, or why there are none.

        The first call, for ``settings``, reads the graphs: it must come before other communicators are made, since
        theirs take the place of those.
        """
        if self._tuner is None:
            hosts, gpus, processors = self._ranks
            capabilities = [10 * gpu.major + gpu.minor for gpu in gpus]
            try:
                self._tuner = tuner_inputs(dump.graphs(), hosts, capabilities, processors)
            except ValueError as error:
                self._tuner = str(error)
            if nccl_variable("NCCL_COLLNET_ENABLE") not in (None, "", "0"):
                self._tuner = "do not tell whether NCCL_COLLNET_ENABLE is in effect"
        return self._tuner

    def estimate(self, case: Case, members: tuple[int, ...]) -> float | None:
        """Seconds, as NCCL's own tuner reckons; None where it is not known, or on another rank than 0."""
        tuner = None if self._dump is None else self._tuner_inputs(self._dump)
        if not isinstance(tuner, NcclInputs) or members != tuple(range(tuner.ranks)):
            return None
        try:
            return nccl_estimate(
                case.collective, case.bytes, tuner, version=version_text(self._version),
                algo=nccl_variable("NCCL_ALGO"), proto=nccl_variable("NCCL_PROTO"), dtype=case.dtype,
                reduce_op=case.reduce_op,
            ).seconds  # fmt: skip
        except ValueError:  # a version that is not modelled, or a list that NCCL refuses
            return None

    def tainted(self) -> str | None:
        """Why no time of this job is to be compared with others."""
        return "several ranks on one GPU: no timing" if self.shares else None

    def chosen(self, case: Case, operation: Operation | None) -> list[Chosen] | None:
        """What this rank's NCCL says that it takes for such an operation, which is performed (or captured) once more
        where the log can be turned on for that alone; all ranks must ask. None where it does not say.

        A communicator's first rank alone writes, of collectives that NCCL chooses for.
        """
        if self._switch is not None:
            found: list[Choice] = []
            if operation is not None:
                found = self._switch.choices(partial(_once_more, operation, case.execution == "graph"))
        elif self._log is not None:
            found = self._log.choices()
        else:
            return None
        return sorted(
            {
                Chosen(nccl_name(one.algorithm), nccl_name(one.protocol), one.channel_count)
                for one in found
                if one.function in (None, nccl_function(case.collective))
                and one.message_bytes(case.ranks) == case.bytes
            },
            key=str,
        )

    def close(self) -> None:
        for log in (self._log, self._switch):
            if log is not None:
                log.close()
        if self._dump is not None:
            self._dump.close()


def _once_more(operation: Operation, graph: bool) -> None:
    """Whatever NCCL decides, it decides when the call returns."""
    if graph and operation.capture is not None:
        operation.capture()
    else:
        operation.run()
