"""Which experts the tokens of each rank go to: seeded, new in every iteration, the same whichever rank works it out.

``uniform``
    K different experts, every set equally likely: the top k of random scores, as DeepEP's tests.
``group_limited:G``
    The top k of random scores within the G groups of experts that hold the highest ones. A group is a host's experts,
    and G at most the number of hosts, as DeepEP's internode test. ``group_limited:G/N`` has N groups of neighbouring
    expert ids whatever the hosts, as DeepSeek's models (``topk_group`` of ``n_group``).
``zipf:S``
    Expert i of an order that is always the same is chosen in proportion to i to the power -S, but never more than by
    every token, which the heaviest of a large top k would be.
``hotspot:K``
    Experts 0 to K-1 get ``HOT_SHARE`` of all selections (less where K different ones a token cannot be as much): with
    contiguous experts an incast to the first ranks. 0.8, as in the 80/20 rule: far from uniform at any usual size, with
    enough left that the other ranks still send and receive.
``ramp``
    In proportion to expert id + 1/2: from next to nothing to twice the mean.
``imbalance:X``
    Rank 0 receives exactly X times the ranks' mean of selections, the others equal shares, their experts also; counted
    over all ranks, so that chance does not blur it.
``local:P``
    A share P of selections goes to experts of the own rank, the rest to all others alike.
``file:PATH``
    Recorded expert ids (commbench/moe/routing_file.py).

Ranks of experts are those before any balancing: eplb is to mend what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commbench.moe import draws, imbalance
from commbench.moe.placement import canonical_placement, homes, parse_placement, share_out
from commbench.moe.routing_file import Recorded, read_recorded
from commbench.registry import unknown_name
from commbench.workloads import Workload

HOT_SHARE = 0.8
ZIPF_ORDER = 0x5EED  # one order of experts for all seeds: runs of different seeds have the same load
KINDS = ("uniform", "group_limited:G", "zipf:S", "hotspot:K", "ramp", "imbalance:X", "local:P", "file:PATH")
_WRITE = {
    "group_limited": "how many groups, such as group_limited:4, or of how many as well, such as group_limited:4/8",
    "zipf": "an exponent from 0 to 10, such as zipf:1.2",
    "hotspot": "how many experts, such as hotspot:4",
    "imbalance": "the most loaded rank's load over the mean, 1 at least, such as imbalance:2.0",
    "local": "a share from 0 to 1, such as local:0.8",
    "file": "a path, such as file:routing.npz",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How tokens choose experts. ``value``: the number after the colon; ``groups``: N of group_limited:G/N, 0 where
    hosts are the groups; ``path``: a file's."""

    kind: str
    value: float = 0.0
    groups: int = 0
    path: str = ""

    @property
    def text(self) -> str:
        """The one way to write it that tables and cases use."""
        if self.kind in ("uniform", "ramp"):
            return self.kind
        if self.kind == "file":
            return f"file:{self.path}"
        of = f"/{self.groups}" if self.groups else ""
        return f"{self.kind}:{self.value:.12g}{of}"


def parse_routing(text: str) -> Routing:
    """A routing as written on the command line. Raises ValueError, one line."""
    kind, colon, rest = text.strip().partition(":")
    if kind in ("uniform", "ramp"):
        if colon:
            raise ValueError(f"routing {text!r} has nothing to say after the colon: write {kind}")
        return Routing(kind=kind)
    if kind not in _WRITE:
        raise ValueError(unknown_name("routing", text, KINDS))
    found = _value(kind, rest)
    if found is None:
        raise ValueError(f"routing {text!r} does not say what it needs: write {_WRITE[kind]}")
    return found


def _value(kind: str, rest: str) -> Routing | None:
    if kind == "file":
        return Routing(kind=kind, path=rest) if rest else None
    if kind in ("group_limited", "hotspot"):
        match = re.fullmatch(r"(\d{1,9})(?:/(\d{1,9}))?", rest)
        if not match or int(match[1]) < 1 or (match[2] and (kind == "hotspot" or int(match[2]) < int(match[1]))):
            return None
        return Routing(kind=kind, value=float(match[1]), groups=int(match[2] or 0))
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", rest):
        return None
    value = float(f"{float(rest):.12g}")
    low, high = {"zipf": (0.0, 10.0), "imbalance": (1.0, 1e9), "local": (0.0, 1.0)}[kind]
    return Routing(kind=kind, value=value) if low <= value <= high else None


Draw = Callable[[np.random.Generator, int, int], NDArray[np.int64]]
"""(generator, rank, iteration) → [T, K] expert ids, -1 masked."""


class Router:
    """The selections of every rank in every iteration of one workload.

    ``host_of[rank]`` numbers the hosts. Raises ValueError, one line, for a routing that the workload cannot have.
    """

    def __init__(self, workload: Workload, ranks: int, host_of: Sequence[int], seed: int) -> None:
        _check(workload, ranks, host_of)
        self.workload, self.ranks, self.seed = workload, ranks, seed
        self.routing = parse_routing(workload.routing)
        self.homes = homes(workload, ranks)
        self._tokens = np.array([tokens_of(workload, rank) for rank in range(ranks)], dtype=np.int64)
        self._recorded: Recorded | None = None
        self._expected = np.full(workload.experts, self._valid() / workload.experts)
        self._dealt: tuple[int, NDArray[np.int64]] | None = None  # of the last iteration: what each rank sends where
        makers: dict[str, Callable[[], Draw]] = {
            "uniform": self._uniform, "group_limited": lambda: self._group_limited(host_of), "zipf": self._zipf,
            "hotspot": self._hotspot, "ramp": self._ramp, "imbalance": self._imbalance, "local": self._local,
            "file": self._file,
        }  # fmt: skip
        self._draw = makers[self.routing.kind]()

    def tokens(self, rank: int) -> int:
        """How many tokens a rank has."""
        return int(self._tokens[rank])

    def expected_load(self) -> NDArray[np.float64]:
        """[E] selections of all ranks in one iteration that each expert is expected to get (the mean over iterations of
        a file; groups of unequal size count as equal)."""
        return self._expected.copy()

    def selections(self, rank: int, iteration: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[T, K] expert ids, -1 where there is none and otherwise different within a token, and [T, K] weights, which
        add up to one over a token's valid selections (a file's own where it has some) and are zero for masked ones."""
        turn = 0 if self.workload.fixed else iteration
        rng = np.random.default_rng([self.seed, rank, turn])
        ids = self._draw(rng, rank, turn)
        if self.workload.masked and self.routing.kind != "imbalance":
            ids = _mask(rng, ids, self.workload.masked)
        weights = self._recorded.weights_of(rank, turn, len(ids)) if self._recorded else None
        if weights is None:
            weights = rng.random(ids.shape, dtype=np.float32) + np.float32(2**-10)
            weights[ids < 0] = 0
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.float32(2**-20))
        return ids, np.where(ids < 0, np.float32(0), weights)

    def _valid(self) -> float:
        """Selections of all ranks in one iteration that are expected to go anywhere."""
        return float(self._tokens.sum()) * self.workload.topk * (1 - self.workload.masked)

    def _uniform(self) -> Draw:
        topk, experts = self.workload.topk, self.workload.experts
        return lambda rng, rank, turn: draws.subsets(rng, self.tokens(rank), topk, experts)

    def _group_limited(self, host_of: Sequence[int]) -> Draw:
        if self.routing.groups:
            group_of = np.arange(self.workload.experts) * self.routing.groups // self.workload.experts
        else:
            group_of = np.asarray(host_of, dtype=np.int64)[self.homes]
        sizes = np.bincount(group_of)
        sizes = np.sort(sizes[sizes > 0])
        most = min(int(self.routing.value), len(sizes))
        left, topk = int(sizes[:most].sum()), self.workload.topk
        if left < topk:
            raise ValueError(
                f"{self.routing.text} leaves a token {left} experts to choose {topk} from: allow more groups, or lower topk"
            )
        return lambda rng, rank, turn: draws.group_limited(rng, self.tokens(rank), topk, group_of, most)

    def _zipf(self) -> Draw:
        place_of = np.random.default_rng([ZIPF_ORDER, self.workload.experts]).permutation(self.workload.experts)
        weights = np.power(place_of + 1.0, -self.routing.value, dtype=np.float64)
        return self._alike(draws.shares(weights, self.workload.topk))

    def _ramp(self) -> Draw:
        return self._alike(draws.shares(np.arange(0.5, self.workload.experts), self.workload.topk))

    def _hotspot(self) -> Draw:
        hot, experts, topk = int(self.routing.value), self.workload.experts, self.workload.topk
        share = min(1.0, HOT_SHARE * topk / hot)
        if hot >= experts or share <= topk / experts:
            raise ValueError(
                f"{self.routing.text} is no hotspot: {hot} of {experts} experts would get no more than an equal share; "
                f"use fewer than {HOT_SHARE * experts:.0f}"
            )
        rest = (topk - hot * share) / (experts - hot)
        if rest > 1:
            raise ValueError(
                f"{self.routing.text} leaves {experts - hot} experts too few for a topk of {topk}: lower topk"
            )
        return self._alike(np.where(np.arange(experts) < hot, share, rest))

    def _local(self) -> Draw:
        topk, experts, share = self.workload.topk, self.workload.experts, self.routing.value
        kind, _ = parse_placement(self.workload.experts_on)
        if kind == "eplb":
            raise ValueError(f"{self.routing.text} and experts placed by {kind}, which moves them, exclude each other")
        own = np.bincount(self.homes, minlength=self.ranks)
        if share * topk > own.min() or (1 - share) * topk > experts - own.max():
            low, high = max(0.0, 1 - (experts - own.max()) / topk), min(1.0, own.min() / topk)
            raise ValueError(
                f"{self.routing.text} cannot be reached: a token has {topk} different experts, of which a rank has "
                f"{own.min()} and the others {experts - own.max()}: use from {low:.4g} to {high:.4g}"
            )

        def chances(rank: int) -> NDArray[np.float64]:
            others = (1 - share) * topk / max(experts - int(own[rank]), 1)
            found = np.full(experts, others)
            found[self.homes == rank] = share * topk / max(int(own[rank]), 1)
            return found

        by_rank = np.stack([chances(rank) for rank in range(self.ranks)])
        self._expected = (1 - self.workload.masked) * (self._tokens @ by_rank)
        return lambda rng, rank, turn: draws.by_chances(rng, self.tokens(rank), topk, by_rank[rank])

    def _alike(self, chances: NDArray[np.float64]) -> Draw:
        """Tokens of all ranks choose with the same chances."""
        topk = self.workload.topk
        self._expected = self._valid() / topk * chances
        return lambda rng, rank, turn: draws.by_chances(rng, self.tokens(rank), topk, chances)

    def _imbalance(self) -> Draw:
        topk, everyone = self.workload.topk, int(self._tokens.sum())
        totals = imbalance.totals(
            self.routing.text, self.routing.value, self.homes, self.ranks, everyone, topk, round(self._valid())
        )
        self._expected = totals[: self.workload.experts].astype(np.float64)

        def draw(rng: np.random.Generator, rank: int, turn: int) -> NDArray[np.int64]:
            if self._dealt is None or self._dealt[0] != turn:
                all_ranks = np.random.default_rng([self.seed, self.ranks, turn])
                self._dealt = (turn, draws.spread(all_ranks, totals, self._tokens, topk))
            ids = draws.by_counts(rng, self.tokens(rank), topk, self._dealt[1][rank])
            return np.where(ids < self.workload.experts, ids, np.int64(-1))

        return draw

    def _file(self) -> Draw:
        recorded = read_recorded(self.routing.path, self.workload, self.ranks)
        self._recorded = recorded
        self._expected = recorded.load(self._tokens, self.workload.experts) * (1 - self.workload.masked)
        return lambda rng, rank, turn: recorded.ids_of(rank, turn, self.tokens(rank))


def tokens_of(workload: Workload, rank: int) -> int:
    """How many tokens a rank has: as many as the others, or one less than the rank before it, but one at least."""
    return max(1, workload.tokens - rank) if workload.uneven_tokens else workload.tokens


def why_not(workload: Workload, ranks: int, host_of: Sequence[int]) -> str | None:
    """Why a workload cannot be routed and placed over these ranks, in one line, or None. Reads a routing's file."""
    try:
        Router(workload, ranks, host_of, 0)
    except ValueError as error:
        return str(error)
    return None


def canonical(workload: Workload) -> tuple[str, str]:
    """A workload's routing and placement as they are written in cases. Raises ValueError for what is neither."""
    return parse_routing(workload.routing).text, canonical_placement(workload.experts_on)


def _check(workload: Workload, ranks: int, host_of: Sequence[int]) -> None:
    if len(host_of) != ranks:
        raise ValueError(f"{len(host_of)} hosts' numbers for {ranks} ranks")
    for name in ("tokens", "hidden", "experts", "topk"):
        if getattr(workload, name) < 1:
            raise ValueError(f"{name} {getattr(workload, name)} is below one")
    if workload.topk > workload.experts:
        raise ValueError(
            f"topk {workload.topk} is more than {workload.experts} experts: a token goes to different experts, "
            f"so use at most {workload.experts}"
        )
    if not 0 <= workload.masked < 1:
        raise ValueError(f"a masked share of {workload.masked:g} is not from 0 to below 1")
    _, redundant = parse_placement(workload.experts_on)
    share_out(workload, ranks, redundant)


def _mask(rng: np.random.Generator, ids: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """The ids with a share of them, rounded at random to a whole number, replaced by -1."""
    count = int(share * ids.size + rng.random())
    flat = ids.ravel().copy()
    flat[rng.choice(flat.size, size=count, replace=False)] = -1
    return flat.reshape(ids.shape)
