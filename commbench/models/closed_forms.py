"""The textbooks' formulas: rounds·α + bytes·β + reduced bytes·γ, for links that are all alike and full duplex.

Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005) [TRG], also in the comments of MPICH's
sources; Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) [PY]; Sanders, Speck and Träff, Parallel Computing
35 (2009) [SST]; Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997) [B]; Hensgen, Finkel and Manber, Int. J.
Parallel Program. 17 (1988) [HFM]. For numbers of ranks that are no power of two the forms are those of
this package's schedules, which hand the data of some ranks to their neighbours first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from commbench.registry import unknown_name


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """``rounds`` in which messages follow one another; ``moved`` and ``reduced``: parts of the message that do."""

    rounds: int
    moved: Fraction
    reduced: Fraction = Fraction(0)

    def seconds(self, message_bytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """rounds·α + moved·m·β + reduced·m·γ, α in seconds a message, β and γ in seconds a byte."""
        return self.rounds * alpha + message_bytes * (float(self.moved) * beta + float(self.reduced) * gamma)


def closed_form(collective: str, algorithm: str, ranks: int, pieces: int = 1) -> ClosedForm:
    """The formula of an algorithm for at least 2 ranks; ``pieces`` counts only for those that are pipelined.

    Raises ValueError where there is none.
    """
    known = _FORMS.get((collective, algorithm))
    if known is None:
        raise ValueError(unknown_name("closed form", f"{collective}:{algorithm}", map(":".join, _FORMS)))
    return known(ranks, pieces)


def _log(n: int) -> int:
    """⌈log2 n⌉."""
    return (n - 1).bit_length()


def _core(n: int) -> tuple[int, int]:
    """⌊log2 n⌋, and 2^⌊log2 n⌋."""
    return n.bit_length() - 1, 1 << (n.bit_length() - 1)


def _ring_all_reduce(n: int, pieces: int) -> ClosedForm:
    """2(n-1)α + 2(n-1)/n mβ + (n-1)/n mγ [PY, TRG]."""
    return ClosedForm(rounds=2 * (n - 1), moved=Fraction(2 * (n - 1), n), reduced=Fraction(n - 1, n))


def _n_minus_one(reduces: bool) -> Callable[[int, int], ClosedForm]:
    """(n-1)α + (n-1)/n m(β + γ): ring and pairwise [PY, TRG]."""
    return lambda n, pieces: ClosedForm(
        rounds=n - 1, moved=Fraction(n - 1, n), reduced=Fraction(n - 1 if reduces else 0, n)
    )


def _chain(reduces: bool) -> Callable[[int, int], ClosedForm]:
    """(n-2+c)(α + m/c (β + γ)) in c pieces, least at c = √((n-2)mβ/α)."""

    def form(n: int, pieces: int) -> ClosedForm:
        rounds = n - 2 + pieces
        moved = Fraction(rounds, pieces)
        return ClosedForm(rounds=rounds, moved=moved, reduced=moved if reduces else Fraction(0))

    return form


def _binomial(down: int, up: int) -> Callable[[int, int], ClosedForm]:
    """⌈log2 n⌉(α + mβ) for each broadcast, ⌈log2 n⌉(α + m(β + γ)) for each reduction [TRG]."""
    return lambda n, pieces: ClosedForm(
        rounds=(down + up) * _log(n), moved=Fraction((down + up) * _log(n)), reduced=Fraction(up * _log(n))
    )


def _binomial_parts(n: int, pieces: int) -> ClosedForm:
    """Gather and scatter: ⌈log2 n⌉α + (n-1)/n mβ [TRG]."""
    return ClosedForm(rounds=_log(n), moved=Fraction(n - 1, n))


def _double_tree(down: int, up: int) -> Callable[[int, int], ClosedForm]:
    """Two trees of ⌈log2 n⌉ levels, half of the message each, in c pieces [SST]: about, and not less than, what it takes.

    The first piece passes (down + up)⌈log2 n⌉ levels, two pieces of m/2c to or from children at each. The c - 1 after it
    follow at the pace of a rank with children: one way 2 pieces each; all_reduce 4 (down to two children and up, up in
    the other tree), so that for large m the time tends to 2mβ.
    """

    def form(n: int, pieces: int) -> ClosedForm:
        levels = (down + up) * _log(n)
        busiest = min(n, 4) if down and up else 2
        return ClosedForm(
            rounds=levels + pieces - 1,
            moved=Fraction(2 * levels + busiest * (pieces - 1), 2 * pieces),
            reduced=Fraction(up * (_log(n) + pieces - 1), pieces),
        )

    return form


def _doubling_all_reduce(n: int, pieces: int) -> ClosedForm:
    """log2 n (α + mβ + mγ) [TRG]; else ⌊log2 n⌋ + 2 rounds of m, all but the last reducing."""
    steps, core = _core(n)
    extra = int(n > core)
    return ClosedForm(rounds=steps + 2 * extra, moved=Fraction(steps + 2 * extra), reduced=Fraction(steps + extra))


def _halving_doubling_all_reduce(n: int, pieces: int) -> ClosedForm:
    """2log2 n α + 2(n-1)/n mβ + (n-1)/n mγ; else (2⌊log2 n⌋+2)α + (2(n'-1)/n'+2)mβ + ((n'-1)/n'+1)mγ [TRG]."""
    steps, core = _core(n)
    extra = int(n > core)
    return ClosedForm(
        rounds=2 * (steps + extra),
        moved=Fraction(2 * (core - 1), core) + 2 * extra,
        reduced=Fraction(core - 1, core) + extra,
    )


def _cube_blocks(n: int) -> int:
    """The blocks that the core rank with most of them exchanges: those of the largest cubes on its way."""
    steps, core = _core(n)
    return sum(d + min(d, n - core) for d in (1 << k for k in range(steps)))


def _doubling_all_gather(n: int, pieces: int) -> ClosedForm:
    """log2 n α + (n-1)/n mβ [TRG]; else one block in before, and all but one out after."""
    steps, core = _core(n)
    extra = int(n > core)
    return ClosedForm(rounds=steps + 2 * extra, moved=Fraction(_cube_blocks(n) + extra * n, n))


def _halving_reduce_scatter(n: int, pieces: int) -> ClosedForm:
    """log2 n α + (n-1)/n m(β + γ) [TRG]; else the whole message in before, and one block out after."""
    steps, core = _core(n)
    extra = int(n > core)
    return ClosedForm(
        rounds=steps + 2 * extra,
        moved=Fraction(_cube_blocks(n) + extra * (n + 1), n),
        reduced=Fraction(_cube_blocks(n) + extra * n, n),
    )


def _bruck_all_gather(n: int, pieces: int) -> ClosedForm:
    """⌈log2 n⌉α + (n-1)/n mβ [B, TRG]."""
    return ClosedForm(rounds=_log(n), moved=Fraction(n - 1, n))


def _bruck_all_to_all(n: int, pieces: int) -> ClosedForm:
    """⌈log2 n⌉α + (m/2)log2 n β for a power of two; else as many blocks as the distances 1..n-1 have bits [B, TRG]."""
    return ClosedForm(rounds=_log(n), moved=Fraction(sum(distance.bit_count() for distance in range(n)), n))


def _shift(n: int, pieces: int) -> ClosedForm:
    """α + mβ: one message each."""
    return ClosedForm(rounds=1, moved=Fraction(1))


def _dissemination(n: int, pieces: int) -> ClosedForm:
    """⌈log2 n⌉α [HFM]."""
    return ClosedForm(rounds=_log(n), moved=Fraction(0))


_FORMS: dict[tuple[str, str], Callable[[int, int], ClosedForm]] = {
    ("all_reduce", "ring"): _ring_all_reduce,
    ("all_reduce", "binomial_tree"): _binomial(1, 1),
    ("all_reduce", "double_binary_tree"): _double_tree(1, 1),
    ("all_reduce", "recursive_doubling"): _doubling_all_reduce,
    ("all_reduce", "halving_doubling"): _halving_doubling_all_reduce,
    ("all_gather", "ring"): _n_minus_one(reduces=False),
    ("all_gather", "recursive_doubling"): _doubling_all_gather,
    ("all_gather", "bruck"): _bruck_all_gather,
    ("reduce_scatter", "ring"): _n_minus_one(reduces=True),
    ("reduce_scatter", "halving_doubling"): _halving_reduce_scatter,
    ("reduce_scatter", "pairwise"): _n_minus_one(reduces=True),
    ("all_to_all", "pairwise"): _n_minus_one(reduces=False),
    ("all_to_all", "bruck"): _bruck_all_to_all,
    ("broadcast", "ring"): _chain(reduces=False),
    ("broadcast", "binomial_tree"): _binomial(1, 0),
    ("broadcast", "double_binary_tree"): _double_tree(1, 0),
    ("reduce", "ring"): _chain(reduces=True),
    ("reduce", "binomial_tree"): _binomial(0, 1),
    ("reduce", "double_binary_tree"): _double_tree(0, 1),
    ("gather", "binomial_tree"): _binomial_parts,
    ("scatter", "binomial_tree"): _binomial_parts,
    ("send_recv", "ring"): _shift,
    ("barrier", "dissemination"): _dissemination,
}
