from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.launch.hostlist import MAX_HOSTS, expand_counts, expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("n[01-03,7]", ("n01", "n02", "n03", "n7")),
        ("n[01-03,7],login", ("n01", "n02", "n03", "n7", "login")),
        ("login1,gpu-[9-11]-ib.example", ("login1", "gpu-9-ib.example", "gpu-10-ib.example", "gpu-11-ib.example")),
        ("rack[0-1]n[8-9]", ("rack0n8", "rack0n9", "rack1n8", "rack1n9")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
    ],
)
def test_hostlist_as_slurm_prints_it(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,,b", "n[1-", "n1]", "n[[1]]", "n[]", "n[3-1]", "n[a-b]", "n[1-3:2]", "a b", "n;rm", "n[1]$(x)"]
)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand_hostlist(text)


def test_a_huge_hostlist_is_refused_before_it_is_built() -> None:
    with pytest.raises(ValueError, match="too long"):
        expand_hostlist("n[0-999999999999]")
    with pytest.raises(ValueError, match=f"more than {MAX_HOSTS}"):
        expand_hostlist("a[0-9999]b[0-9999]")
    with pytest.raises(ValueError, match=f"more than {MAX_HOSTS}"):
        expand_hostlist("a[0-59999],b[0-59999]")


_PREFIX = st.from_regex(r"[a-z][a-z0-9.\-]{0,6}[a-z]", fullmatch=True)
_RANGE = st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(1, 5))


@given(st.lists(st.tuples(_PREFIX, st.lists(_RANGE, max_size=3)), min_size=1, max_size=4))
def test_expanding_gives_back_the_hosts_that_were_compressed(entries: list[tuple[str, list[tuple]]]) -> None:
    written, expected = [], []
    for prefix, ranges in entries:
        if not ranges:
            written.append(prefix)
            expected.append(prefix)
            continue
        written.append(
            prefix + "[" + ",".join(f"{a:0{w}}-{a + n:0{w}}" if n else f"{a:0{w}}" for a, n, w in ranges) + "]"
        )
        for first, more, width in ranges:
            # The padding is the width of the first number as written, which may be wider than asked.
            expected += [prefix + str(i).zfill(max(width, len(str(first)))) for i in range(first, first + more + 1)]
    assert expand_hostlist(",".join(written)) == tuple(expected)


@given(st.text(alphabet="n01-9[],x() ", max_size=20))
def test_any_text_gives_a_tuple_or_value_error(text: str) -> None:
    for expand in (expand_hostlist, expand_counts):
        try:
            assert len(expand(text)) >= 1  # type: ignore[arg-type]
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("4(x2),3", (4, 4, 3)), ("2,1", (2, 1)), ("1(x3)", (1, 1, 1))]
)
def test_counts_as_slurm_prints_them(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "4(x0)", "4x2", "-1", "4(x2", "4(x999999999)", "4,,3"])
def test_what_is_no_count_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="task counts"):
        expand_counts(text)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_round_trip(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    assert expand_counts(text) == tuple(tasks for tasks, nodes in runs for _ in range(nodes))
