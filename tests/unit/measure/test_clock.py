"""A rank's own clock: right, or wrong on purpose; and which ranks read the same one."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.measure.clock import WRONG, LocalClock, OneClock, identity, local_clock, now_ns

times = st.integers(0, 400 * 86_400 * 10**9)


@given(times, st.integers(-(10**16), 10**16), st.floats(-1e-3, 1e-3))
def test_a_wrong_clock_is_exactly_as_wrong_as_it_should_be(true: int, offset: int, drift: float) -> None:
    clock = LocalClock(offset_ns=offset, drift=drift)
    assert abs(int(clock.read(true)) - (true + offset + Fraction(drift) * true)) <= 1
    assert abs(int(clock.true(clock.read(true))) - true) <= 1


def test_what_reads_a_clock() -> None:
    assert LocalClock().reader() is now_ns
    ahead = LocalClock(offset_ns=5 * 10**9, drift=2e-5)
    before, read, after = now_ns(), ahead.reader()(), now_ns()
    assert int(ahead.read(before)) <= read <= int(ahead.read(after))


def test_clocks_by_rank() -> None:
    text = {WRONG: "0:1.5:-20,3:-2:50"}
    found = [local_clock(rank, text) for rank in range(4)]
    right = LocalClock()
    assert found == [
        LocalClock(offset_ns=1_500_000_000, drift=-20e-6), right, right, LocalClock(offset_ns=-2 * 10**9, drift=50e-6)
    ]  # fmt: skip
    assert [clock.right for clock in found] == [False, True, True, False]
    assert local_clock(2, {}) == local_clock(2, {WRONG: " "}) == right


def test_clocks_of_a_seed() -> None:
    found = [local_clock(rank, {WRONG: "7"}) for rank in range(64)]
    assert found == [local_clock(rank, {WRONG: "7"}) for rank in range(64)]
    assert found[0] != local_clock(0, {WRONG: "8"})
    offsets, drifts = [abs(one.offset_ns) for one in found], [abs(one.drift) for one in found]
    assert max(offsets) <= 10**10
    assert max(drifts) <= 50e-6
    assert sum(offset > 10**9 for offset in offsets) > 40  # seconds, most of them
    assert len(set(offsets)) == len(set(drifts)) == 64


@pytest.mark.parametrize("text", ["x", "1:2", "1:2:3:4", "0:1:2,", "a:1:2", "0:b:2", "1.5"])
def test_bad_words_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="neither a seed nor rank:offset_s:ppm") as caught:
        local_clock(0, {WRONG: text})
    assert "\n" not in str(caught.value)


def test_who_reads_the_same_clock(tmp_path: Path) -> None:
    def machine(name: str, boot: str, namespace: str | None) -> Path:
        root = tmp_path / name
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/self").mkdir()
        (root / "proc/sys/kernel/random/boot_id").write_text(boot + "\n")
        if namespace is not None:
            (root / "proc/self/timens_offsets").write_text(namespace)
        return root

    none = "monotonic           0         0\nboottime            0         0\n"
    one, other = machine("one", "aaaa", none), machine("other", "bbbb", none)
    shifted, old = machine("shifted", "aaaa", none.replace("0", "7", 1)), machine("old", "aaaa", None)
    right, wrong = LocalClock(), LocalClock(offset_ns=1)
    assert identity(0, "a", right, one) == identity(1, "a", right, one)
    different = [
        identity(0, "a", right, one), identity(0, "b", right, one), identity(0, "a", right, other),
        identity(0, "a", right, shifted), identity(0, "a", right, old), identity(0, "a", wrong, one),
        identity(1, "a", wrong, one),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert identity(0, "a", right) == identity(5, "a", right)  # here


def test_one_clock_is_taken_as_it_is() -> None:
    clock = OneClock()
    assert clock.to_mine([5, 7]).tolist() == clock.to_common([5, 7]).tolist() == [5, 7]
    assert not clock.several
    assert not clock.due()
    assert clock.error_s((0, 1)) == 2e-7
    before = now_ns()
    assert before <= clock.now_ns() <= now_ns()
