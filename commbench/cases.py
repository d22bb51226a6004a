"""The vocabulary of a sweep: element types, reduce ops, groups of ranks, cases, and how a sweep becomes cases."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from commbench.collectives import EVERY, Collective
from commbench.registry import unknown_name
from commbench.workloads import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtype:
    """An element type. ``exact_integer``: every whole number up to it is representable."""

    name: str
    itemsize: int
    kind: str  # "float", "int" or "uint"
    exact_integer: int


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype(name="float64", itemsize=8, kind="float", exact_integer=2**53),
        Dtype(name="float32", itemsize=4, kind="float", exact_integer=2**24),
        Dtype(name="float16", itemsize=2, kind="float", exact_integer=2**11),
        Dtype(name="bfloat16", itemsize=2, kind="float", exact_integer=2**8),
        Dtype(name="float8_e4m3fn", itemsize=1, kind="float", exact_integer=2**4),
        Dtype(name="float8_e5m2", itemsize=1, kind="float", exact_integer=2**3),
        Dtype(name="int8", itemsize=1, kind="int", exact_integer=2**7 - 1),
        Dtype(name="uint8", itemsize=1, kind="uint", exact_integer=2**8 - 1),
        Dtype(name="int32", itemsize=4, kind="int", exact_integer=2**31 - 1),
        Dtype(name="uint32", itemsize=4, kind="uint", exact_integer=2**32 - 1),
        Dtype(name="int64", itemsize=8, kind="int", exact_integer=2**63 - 1),
        Dtype(name="uint64", itemsize=8, kind="uint", exact_integer=2**64 - 1),
    )
}
REDUCE_OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
PLACEMENTS = ("out", "in")
TIMINGS = ("isolated", "streamed")
EXECUTIONS = ("eager", "graph")
BUFFERS = ("plain", "registered", "symmetric")
OWN = "own:"
GROUP_KINDS = ("world", "node", "rail")
_PAIR = re.compile(r"^pair:(\d+)-(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the ranks are: ``hosts[rank]`` is the host's name."""

    hosts: tuple[str, ...]

    @property
    def world(self) -> int:
        return len(self.hosts)

    @property
    def host_of(self) -> tuple[int, ...]:
        """Per rank the index of its host, numbered in order of first appearance."""
        order = {host: index for index, host in enumerate(dict.fromkeys(self.hosts))}
        return tuple(order[host] for host in self.hosts)

    def by_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in order of first appearance."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())


def is_own(algorithm: str) -> bool:
    """Whether a case's algorithm is one that commbench carries out itself, on the backend's messages."""
    return algorithm.startswith(OWN)


def parse_group(text: str) -> str:
    """The group's name if it is one: world, node, rail or pair:A-B with A below B. Raises ValueError."""
    pair = _PAIR.match(text)
    if pair:
        first, second = sorted((int(pair[1]), int(pair[2])))
        if first == second:
            raise ValueError(f"group {text!r} names one rank twice: write two different ranks, such as pair:0-1")
        return f"pair:{first}-{second}"
    if text not in GROUP_KINDS:
        raise ValueError(unknown_name("group", text, (*GROUP_KINDS, "pair:A-B")))
    return text


def group_members(group: str, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The world ranks of every group of a kind; the groups do not overlap and run at the same time.

    Ranks ascend within a group: torch.distributed orders them so, whatever it is given. ``rail`` joins the ranks
    with the same local rank on every host. Raises ValueError for a pair outside the world.
    """
    pair = _PAIR.match(group)
    if pair:
        first, second = sorted((int(pair[1]), int(pair[2])))
        if second >= layout.world:
            raise ValueError(f"group {group!r} is outside the world: ranks are 0 to {layout.world - 1}")
        return ((first, second),)
    if group == "world":
        return (tuple(range(layout.world)),)
    by_host = layout.by_host()
    if group == "node":
        return by_host
    local_ranks = max(len(ranks) for ranks in by_host)
    return tuple(tuple(sorted(ranks[i] for ranks in by_host if i < len(ranks))) for i in range(local_ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to measure. ``bytes`` is what is moved, ``requested_bytes`` what was asked for.

    ``reduce_op`` is None where nothing is reduced, ``dtype`` stays (it sets the element). ``workload`` is what a routed
    collective sends. ``skip`` says why the case cannot be run, known before any rank starts.
    """

    collective: str
    backend: str
    algorithm: str = "library"
    group: str = "world"
    bytes: int
    requested_bytes: int
    dtype: str = "float32"
    reduce_op: str | None = "sum"
    placement: str = "out"
    timing: str = "isolated"
    root: int = 0
    execution: str = "eager"
    cache: str = "rotate"
    buffers: str = "plain"
    ranks: int
    nodes: int
    workload: Workload | None = None
    skip: str | None = None

    @property
    def spec(self) -> Collective:
        return EVERY[self.collective]

    @property
    def itemtype(self) -> Dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.itemtype.itemsize

    @property
    def elements(self) -> int:
        """Elements of the whole message."""
        return self.bytes // self.itemsize

    @property
    def block_elements(self) -> int:
        return self.spec.block_elements(self.elements, self.ranks)

    @property
    def case_id(self) -> str:
        """The same 12 hex digits for the same case in any run: what runs are compared by."""
        import hashlib  # where it is needed: every rank loads this module, and few name cases

        identity = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "skip"}
        if self.buffers == "plain":  # what all were before there was a choice
            del identity["buffers"]
        if self.workload is None:
            del identity["workload"]
        return hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """What a message to a person calls this case."""
        op = f" {self.reduce_op}" if self.reduce_op else ""
        by = "" if self.algorithm == "library" else f" by {self.algorithm}"
        where = "" if self.group == "world" else f" in {self.group}"
        graph = "" if self.execution == "eager" else f" {self.execution}"
        buffers = "" if self.buffers == "plain" else f" {self.buffers} buffers"
        what = f"{self.bytes} B" if self.workload is None else self.workload.title
        placement = f" {self.placement}" if self.workload is None else ""
        how = f"{self.dtype}{op}{placement} {self.timing}{graph}{buffers}"
        return f"{self.backend} {self.collective} {what} {how}{by}{where}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        workload = values.get("workload")
        return cls(**{**values, "workload": None if workload is None else Workload(**workload)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What to measure and how, as every rank needs to know it. Times in seconds.

    ``budget_s`` None means 0.3 s a case, 1 s where it is routed. ``iterations`` fixes the count and turns the stopping
    rule off. ``left_out``: pairs of a collective or a backend and an algorithm of which no cases are made.
    ``workloads``: what routed collectives send, in place of ``sizes``.
    """

    backends: tuple[str, ...] = ("gloo", "mpi")
    collectives: tuple[str, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    sizes: tuple[int, ...] = tuple(8 ** (i + 1) for i in range(8))
    dtypes: tuple[str, ...] = ("float32",)
    ops: tuple[str, ...] = ("sum",)
    placements: tuple[str, ...] = ("out",)
    groups: tuple[str, ...] = ("world",)
    timings: tuple[str, ...] = TIMINGS
    executions: tuple[str, ...] = ("eager",)
    buffers: tuple[str, ...] = ("plain",)
    algorithms: tuple[str, ...] = ("library",)
    left_out: tuple[tuple[str, str], ...] = ()
    workloads: tuple[Workload, ...] = ()
    root: int = 0
    cache: str = "rotate"
    precision: float = 0.02
    max_time_s: float = 5.0
    budget_s: float | None = None
    iterations: int | None = None
    soak_s: float | None = None
    deadline_s: float = 30.0
    label: str = ""
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sweep:
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        given["left_out"] = tuple(tuple(pair) for pair in given.get("left_out", ()))
        given["workloads"] = tuple(Workload(**workload) for workload in given.get("workloads", ()))
        return cls(**given)

    def expand(self, layout: Layout) -> tuple[Case, ...]:
        """Every case, in the order it is run: by backend, collective and its settings, sizes ascending within.

        Two requested sizes that round to the same size give one case. Raises ValueError for a pair or root
        outside the world.
        """
        if not 0 <= self.root < layout.world:
            raise ValueError(f"root {self.root} is outside the world: ranks are 0 to {layout.world - 1}")
        found: dict[Case, None] = {}
        for backend, name in itertools.product(self.backends, self.collectives):
            for case in self._cases_of(backend, EVERY[name], layout):
                found.setdefault(case)
        return _without_repeats(tuple(found))

    def _cases_of(self, backend: str, spec: Collective, layout: Layout) -> Iterator[Case]:
        ops: tuple[str | None, ...] = self.ops if spec.reduces else (None,)
        # A barrier carries no data: one size, type, placement and kind of buffer say all there is to say.
        dtypes = self.dtypes if spec.sized else self.dtypes[:1]
        dtypes = dtypes if spec.dtype is None else (spec.dtype,)
        placements = self.placements if spec.sized else ("out",)
        kinds = self.buffers if spec.sized else ("plain",)
        sizes: tuple[int | Workload, ...] = self.sizes if spec.sized else (0,)
        if spec.routed:
            sizes = self.workloads
        left_out = {name for one, name in self.left_out if one in (spec.name, backend)}
        algorithms = [name for name in self.algorithms if name not in left_out]
        for group, algorithm, dtype, op, placement, timing, execution, buffers, asked in itertools.product(
            self.groups, algorithms, dtypes, ops, placements, self.timings, self.executions, kinds, sizes
        ):
            members = group_members(group, layout)
            host_of = layout.host_of
            counts = sorted({len(ranks) for ranks in members})
            ranks = counts[-1]
            if isinstance(asked, Workload):
                workload, size = asked, asked.message_bytes(dtype)
                moved = size
            else:
                workload, size = None, asked
                moved = spec.message_bytes(size, DTYPES[dtype].itemsize, ranks)
            yield Case(
                collective=spec.name, backend=backend, algorithm=algorithm, group=group, bytes=moved,
                requested_bytes=size, dtype=dtype, reduce_op=op, placement=placement, timing=timing,
                root=self.root if spec.rooted else 0, execution=execution, cache=self.cache, buffers=buffers, ranks=ranks,
                nodes=max(len({host_of[rank] for rank in ranks_}) for ranks_ in members), workload=workload,
                skip=_why_not(spec, size, moved, dtype, op, placement, group, counts, self.root),
            )  # fmt: skip


def _why_not(
    spec: Collective, size: int, moved: int, dtype: str, op: str | None, placement: str, group: str,
    counts: list[int], root: int,
) -> str | None:  # fmt: skip
    """Why a case has no meaning at all, whatever the backend; None where it has one."""
    if counts[-1] < 2:
        return f"a {group} group of one rank has nobody to talk to"
    if len(counts) > 1:
        return f"{group} groups differ in size ({counts[0]} to {counts[-1]} ranks): one message size would mean several"
    if spec.rooted and root >= counts[0]:
        return f"root {root} is outside a {group} group of {counts[0]} ranks"
    if placement == "in" and not spec.in_place:
        return f"{spec.name} has no in-place form"
    if spec.sized and moved == 0:
        return f"{size} B is less than one {dtype} a rank for {counts[-1]} ranks"
    if op in ("band", "bor", "bxor") and DTYPES[dtype].kind == "float":
        return f"bitwise {op} is not defined for {dtype}"
    return None


def _without_repeats(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Of the cases that move the same bytes the one whose request is nearest, so that an exact request wins."""
    best: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        key = tuple(getattr(case, f.name) for f in fields(case) if f.name not in ("requested_bytes", "skip"))
        if case.skip and case.bytes == 0:
            key = (*key, case.requested_bytes)
        known = best.get(key)
        if known is None or abs(case.requested_bytes - case.bytes) < abs(known.requested_bytes - known.bytes):
            best[key] = case
    return tuple(best.values())
