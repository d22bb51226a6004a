"""Frames survive any cut of the stream, and nothing large is read from a stranger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.launch.wire import MAX_HELLO, Reader, WireError, pack

headers = st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=20), st.none()), max_size=4)
frames = st.lists(st.tuples(headers, st.binary(max_size=50)), max_size=6)


@given(frames, st.integers(min_value=1, max_value=17))
def test_frames_come_back_whatever_the_pieces(sent: list[tuple[dict[str, object], bytes]], piece: int) -> None:
    stream = b"".join(pack(header, blob) for header, blob in sent)
    reader = Reader()
    reader.trust()
    got = []
    for start in range(0, len(stream), piece):
        got += reader.feed(stream[start : start + piece])
    assert got == sent


@given(st.binary(min_size=8, max_size=200))
def test_noise_is_refused_or_waited_for_but_never_understood(noise: bytes) -> None:
    reader = Reader()
    try:
        assert all(isinstance(header, dict) for header, _ in reader.feed(noise))
    except WireError:
        pass


def test_a_stranger_cannot_make_us_read_much() -> None:
    with pytest.raises(WireError, match="not commbench's protocol"):
        Reader().feed((MAX_HELLO + 1).to_bytes(4, "big") + bytes(4))
    with pytest.raises(WireError):
        Reader().feed(pack({"type": "hello"}, b"a blob"))
