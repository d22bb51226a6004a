"""Recorded routings: read as documented, refused in one line otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.moe.routing import Router, why_not
from commbench.workloads import Workload

RANKS, TOKENS, TOPK, EXPERTS = 2, 3, 2, 4
IDS = np.array([[[0, 1], [1, 2], [3, -1]], [[2, 3], [-1, -1], [0, 3]]])


def workload(path: Path, **changes: Any) -> Workload:
    values: dict[str, Any] = {
        "tokens": TOKENS,
        "hidden": 128,
        "experts": EXPERTS,
        "topk": TOPK,
        "routing": f"file:{path}",
    }
    return Workload(**(values | changes))


def saved(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "routing.npz"
    np.savez(path, **arrays)
    return path


def test_ids_come_back_as_recorded_and_weights_add_up(tmp_path: Path) -> None:
    router = Router(workload(saved(tmp_path, ids=IDS)), RANKS, (0, 0), 1)
    for rank in range(RANKS):
        for iteration in (0, 7):
            ids, weights = router.selections(rank, iteration)
            assert (ids == IDS[rank]).all()
            assert (weights[ids < 0] == 0).all()
            np.testing.assert_allclose(weights.sum(axis=1), (ids >= 0).any(axis=1), rtol=1e-6)
    assert router.expected_load().tolist() == [2, 2, 2, 3]


def test_iterations_are_used_in_turn_and_a_fixed_routing_keeps_the_first(tmp_path: Path) -> None:
    path = saved(tmp_path, ids=np.stack([IDS, IDS[::-1]]).astype(np.int32))
    router = Router(workload(path), RANKS, (0, 0), 1)
    assert [(router.selections(0, i)[0] == IDS[i % 2]).all() for i in range(5)] == [True] * 5
    fixed = Router(workload(path, fixed=True), RANKS, (0, 0), 1)
    assert (fixed.selections(0, 1)[0] == IDS[0]).all()
    assert router.expected_load().tolist() == [2, 2, 2, 3]


def test_recorded_weights_are_kept(tmp_path: Path) -> None:
    weights = np.arange(12, dtype=np.float64).reshape(IDS.shape) / 4
    router = Router(workload(saved(tmp_path, ids=IDS, weights=weights)), RANKS, (0, 0), 1)
    found = router.selections(1, 0)[1]
    assert found.dtype == np.float32
    assert (found == np.where(IDS[1] >= 0, weights[1], 0)).all()


def test_a_workload_takes_the_first_tokens_and_its_own_uneven_and_masked_ones(tmp_path: Path) -> None:
    path = saved(tmp_path, ids=IDS)
    assert (Router(workload(path, tokens=1), RANKS, (0, 0), 1).selections(0, 0)[0] == IDS[0, :1]).all()
    uneven = Router(workload(path, uneven_tokens=True), RANKS, (0, 0), 1)
    assert len(uneven.selections(1, 0)[0]) == 2
    assert uneven.expected_load().tolist() == [1, 2, 2, 2]  # rank 1's last token, of 0 and 3, is not there
    masked = Router(workload(path, masked=0.5), RANKS, (0, 0), 1).selections(0, 0)[0]
    assert (masked >= 0).sum() < (IDS[0] >= 0).sum()
    assert ((masked == IDS[0]) | (masked == -1)).all()


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    import os

    path = saved(tmp_path, ids=IDS)
    assert Router(workload(path), RANKS, (0, 0), 1).selections(0, 0)[0][0].tolist() == [0, 1]
    saved(tmp_path, ids=IDS[::-1])
    os.utime(path, ns=(1, 1))
    assert Router(workload(path), RANKS, (0, 0), 1).selections(0, 0)[0][0].tolist() == [2, 3]


def with_element(value: int) -> np.ndarray:
    ids = IDS.copy()
    ids[1, 2, 0] = value
    return ids


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"ids": with_element(4)}, "names expert 4 (iteration 0, rank 1, token 2): experts are 0 to 3"),
        ({"ids": with_element(-2)}, "names expert -2"),
        ({"ids": with_element(3)}, "a token has the same expert twice"),
        ({"ids": IDS.astype(float)}, "ids are float64, where integers are needed"),
        ({"ids": IDS > 0}, "ids are bool"),
        ({"ids": IDS[0]}, "ids have the shape [3, 2], where [ranks, tokens, topk]"),
        ({"ids": IDS[None, None]}, "ids have the shape [1, 1, 2, 3, 2]"),
        ({"ids": IDS[:, :0]}, "ids have the shape [2, 0, 2]"),
        ({"ids": IDS[:1]}, "has 1 ranks, 3 tokens, top 2: the workload needs 2 ranks, 3 tokens or more, top 2"),
        ({"ids": IDS[:, :2]}, "has 2 ranks, 2 tokens"),
        ({"ids": IDS[:, :, :1]}, "3 tokens, top 1"),
        ({"ids": np.full(IDS.shape, 2**63, dtype=np.uint64)}, "beyond what an expert can be"),
        ({"experts": IDS}, "'ids'"),
        ({"ids": IDS, "weights": np.ones((2, 3))}, "weights are float64 [2, 3], where floating point [2, 3, 2]"),
        ({"ids": IDS, "weights": IDS}, "weights are int64"),
        ({"ids": IDS, "weights": np.full(IDS.shape, np.nan)}, "not all finite"),
        ({"ids": np.array([[object()]], dtype=object)}, "not an .npz archive"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    path = saved(tmp_path, **arrays)
    reason = why_not(workload(path), RANKS, (0, 0))
    assert reason is not None
    assert says in reason
    assert str(path) in reason
    assert "\n" not in reason


def test_what_is_no_archive_is_refused_in_one_line(tmp_path: Path) -> None:
    array, text, empty = tmp_path / "a.npy", tmp_path / "t.npz", tmp_path / "e.npz"
    np.save(array, IDS)
    text.write_text("0 1 2\n3 4 5\n")
    empty.touch()
    torn = saved(tmp_path, ids=IDS)
    torn.write_bytes(torn.read_bytes()[:200])
    flipped = tmp_path / "f.npz"
    np.savez_compressed(flipped, ids=np.arange(2400).reshape(2, 300, 4))
    body = bytearray(flipped.read_bytes())
    body[200:260] = b"x" * 60
    flipped.write_bytes(body)
    for path in (array, text, empty, torn, flipped, tmp_path / "missing.npz", tmp_path):
        reason = why_not(workload(path), RANKS, (0, 0))
        assert reason is not None
        assert str(path) in reason
        assert "\n" not in reason
        assert "pickle" not in reason  # numpy's own advice is to load it unsafely
    assert "No such file" in str(why_not(workload(tmp_path / "missing.npz"), RANKS, (0, 0)))
