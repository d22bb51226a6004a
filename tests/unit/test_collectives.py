"""The message-size convention and the bus factors, against values worked out by hand from nccl-tests' sources."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.collectives import ALIGNMENT_BYTES, COLLECTIVES, Collective

SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
WHOLE = ("all_reduce", "broadcast", "reduce", "send_recv")


def test_the_ten() -> None:
    assert sorted(COLLECTIVES) == sorted([*SPLIT, *WHOLE, "barrier"])
    assert all(name == entry.name for name, entry in COLLECTIVES.items())
    assert {name for name, entry in COLLECTIVES.items() if entry.split} == set(SPLIT)


# nccl-tests' doc/PERFORMANCE.md: busbw = algbw * factor.
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 3, 8, 1000])
def test_bus_factors(name: str, n: int) -> None:
    expected = {
        "all_reduce": Fraction(2 * (n - 1), n),
        **dict.fromkeys(SPLIT, Fraction(n - 1, n)),
        **dict.fromkeys(("broadcast", "reduce", "send_recv"), Fraction(1)),
        "barrier": Fraction(0),
    }[name]
    assert COLLECTIVES[name].bus_factor(n) == pytest.approx(float(expected), rel=1e-15)


@pytest.mark.parametrize(
    ("name", "requested", "itemsize", "ranks", "moved"),
    [
        # Not split: whole elements.
        ("all_reduce", 10, 4, 3, 8),
        ("all_reduce", 1048577, 2, 3, 1048576),
        ("broadcast", 3, 4, 3, 0),
        ("send_recv", 7, 1, 3, 7),
        # 1 MiB over 3: 349525.33 B a rank, 349520 in whole 16 B.
        ("all_gather", 1048576, 4, 3, 1048560),
        ("all_gather", 1048576, 1, 3, 1048560),
        ("reduce_scatter", 1000, 4, 3, 960),  # 83 elements = 332 B, 320 in whole 16 B
        ("all_to_all", 48, 4, 3, 48),  # exactly 16 B a rank
        ("all_to_all", 64, 4, 3, 48),  # 5 elements = 20 B, 16 of them
        # Less than 16 B a rank: whole elements.
        ("all_gather", 47, 4, 3, 36),  # 11 elements, 3 a rank
        ("gather", 24, 8, 3, 24),
        ("scatter", 23, 8, 3, 0),  # 2 elements for 3 ranks
        ("all_gather", 8, 4, 2, 8),
        ("all_gather", 8, 4, 3, 0),
        ("all_gather", 100, 2, 6, 96),  # 8 elements a rank = 16 B
        ("all_gather", 1 << 40, 4, 7, 1099511627760),  # 157073089682 B a rank, 157073089680 in whole 16 B
        ("barrier", 1024, 4, 3, 0),
    ],
)
def test_the_size_that_is_moved(name: str, requested: int, itemsize: int, ranks: int, moved: int) -> None:
    assert COLLECTIVES[name].message_bytes(requested, itemsize, ranks) == moved


@given(
    st.sampled_from([entry for entry in COLLECTIVES.values() if entry.sized]),
    st.integers(1, 2**40), st.sampled_from([1, 2, 4, 8]), st.integers(2, 4096),
)  # fmt: skip
def test_what_rounding_promises(spec: Collective, requested: int, itemsize: int, ranks: int) -> None:
    moved = spec.message_bytes(requested, itemsize, ranks)
    assert 0 <= moved <= requested
    share = moved // ranks if spec.split else moved
    assert share * (ranks if spec.split else 1) == moved
    assert share % itemsize == 0
    if spec.split:
        lost = requested // ranks - share
        assert share % ALIGNMENT_BYTES == 0 or share < ALIGNMENT_BYTES
        assert lost < (ALIGNMENT_BYTES + itemsize if share >= ALIGNMENT_BYTES else itemsize)
    else:
        assert requested - moved < itemsize
    assert spec.message_bytes(moved, itemsize, ranks) == moved
    assert spec.block_elements(moved // itemsize, ranks) * itemsize == share


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_inputs_and_outputs_agree(name: str, n: int) -> None:
    """Every block that an output names is in its source's input, and the blocks are those of the definition."""
    spec = COLLECTIVES[name]
    for root in range(n if spec.rooted else 1):
        for rank in range(n):
            for part in spec.output(rank, n, root):
                assert len(part.sources) == (n if spec.reduces else 1)
                for source in part.sources:
                    assert part.block < spec.input_blocks(source, n, root)


def test_what_each_output_is_made_of() -> None:
    n, root = 3, 2
    found = {
        name: [[(part.sources, part.block) for part in entry.output(rank, n, root)] for rank in range(n)]
        for name, entry in COLLECTIVES.items()
    }
    everyone = (0, 1, 2)
    assert found == {
        "all_reduce": [[(everyone, 0)]] * 3,
        "all_gather": [[((0,), 0), ((1,), 0), ((2,), 0)]] * 3,
        "reduce_scatter": [[(everyone, 0)], [(everyone, 1)], [(everyone, 2)]],
        "all_to_all": [[((0,), r), ((1,), r), ((2,), r)] for r in range(3)],
        "broadcast": [[((2,), 0)]] * 3,
        "reduce": [[], [], [(everyone, 0)]],
        "gather": [[], [], [((0,), 0), ((1,), 0), ((2,), 0)]],
        "scatter": [[((2,), 0)], [((2,), 1)], [((2,), 2)]],
        "send_recv": [[((2,), 0)], [((0,), 0)], [((1,), 0)]],
        "barrier": [[], [], []],
    }


def test_inputs_of_rooted_collectives_are_at_the_root() -> None:
    blocks = {name: [entry.input_blocks(rank, 3, 1) for rank in range(3)] for name, entry in COLLECTIVES.items()}
    assert blocks["broadcast"] == [0, 1, 0]
    assert blocks["scatter"] == [0, 3, 0]
    assert blocks["gather"] == blocks["reduce"] == [1, 1, 1]
    assert blocks["all_to_all"] == blocks["reduce_scatter"] == [3, 3, 3]
