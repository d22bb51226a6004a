"""What a token weighs on the wire, and what a workload is called."""

from __future__ import annotations

import pytest

from commbench.workloads import Workload

DEEPSEEK = Workload(tokens=128, hidden=7168, experts=256, topk=8)


@pytest.mark.parametrize(
    ("dtype", "token", "message"),
    [
        ("bfloat16", 14336, 128 * 8 * 14336),
        # 7168 values of a byte and 56 scales of four.
        ("float8_e4m3fn", 7392, 128 * 8 * 7392),
        ("float8_e5m2", 7392, 128 * 8 * 7392),
    ],
)
def test_bytes_of_a_token_and_of_all_selections(dtype: str, token: int, message: int) -> None:
    assert DEEPSEEK.token_bytes(dtype) == token
    assert DEEPSEEK.message_bytes(dtype) == message


def test_the_title_tells_what_is_not_usual() -> None:
    assert DEEPSEEK.title == "128 tokens x 7168, top 8 of 256, throughput, uniform"
    odd = Workload(
        tokens=1, hidden=128, experts=3, topk=1, mode="low_latency", routing="zipf:1.2", experts_on="eplb:1", masked=0.125,
        uneven_tokens=True, fixed=True, counts="known",
    )  # fmt: skip
    assert odd.title == (
        "1 tokens x 128, top 1 of 3, low_latency, zipf:1.2, eplb:1, 0.125 masked, uneven tokens, fixed, counts known"
    )
