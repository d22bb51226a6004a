"""Recorded routings: a NumPy archive (.npz) of the experts that a model's tokens really went to.

``ids``: integers, [ranks, tokens, topk], or [iterations, ranks, tokens, topk], which are used in turn. -1 means no
expert; a token's experts differ. ``weights``: optional, floating point, of the same shape. A workload takes the first
tokens of each rank, so that one file serves a sweep of tokens. Nothing in it is unpickled. To write one:

    numpy.savez("routing.npz", ids=ids, weights=weights)
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commbench.workloads import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """``ids``: [iterations, ranks, tokens, topk] int64; ``weights``: float32 of the same shape, or None."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None

    def ids_of(self, rank: int, iteration: int, tokens: int) -> NDArray[np.int64]:
        return self.ids[iteration % len(self.ids), rank, :tokens].copy()

    def weights_of(self, rank: int, iteration: int, tokens: int) -> NDArray[np.float32] | None:
        return None if self.weights is None else self.weights[iteration % len(self.ids), rank, :tokens].copy()

    def load(self, tokens: NDArray[np.int64], experts: int) -> NDArray[np.float64]:
        """[experts] selections of all ranks' first ``tokens[rank]``, the mean over iterations."""
        found = np.zeros(experts + 1)
        for rank, count in enumerate(tokens.tolist()):
            found += np.bincount(self.ids[:, rank, :count].ravel() + 1, minlength=experts + 1)
        return found[1:] / len(self.ids)


def read_recorded(path: str, workload: Workload, ranks: int) -> Recorded:
    """The routing in a file, checked against a workload. Raises ValueError, one line that names the file."""
    where = Path(path)
    try:
        changed = where.stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"routing file {path}: {error.strerror or error}") from None
    recorded = _read(path, changed)
    _iterations, in_ranks, tokens, topk = recorded.ids.shape
    if (in_ranks, topk) != (ranks, workload.topk) or tokens < workload.tokens:
        raise ValueError(
            f"routing file {path} has {in_ranks} ranks, {tokens} tokens, top {topk}: "
            f"the workload needs {ranks} ranks, {workload.tokens} tokens or more, top {workload.topk}"
        )
    highest = int(recorded.ids.max())
    if highest >= workload.experts:
        at = tuple(int(i) for i in np.argwhere(recorded.ids >= workload.experts)[0])
        raise ValueError(
            f"routing file {path} names expert {recorded.ids[at]} (iteration {at[0]}, rank {at[1]}, token {at[2]}): "
            f"experts are 0 to {workload.experts - 1}, and -1 is none"
        )
    return recorded


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> Recorded:
    """``changed`` is the file's time: one that was written anew is read anew."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"routing file {path} is not an .npz archive: write one with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            ids, weights = archive["ids"], archive.get("weights")
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        if "pickle" in reason:  # numpy goes on to say how to open it all the same
            reason = "it holds other things than plain numbers"
        raise ValueError(
            f"routing file {path} is not an .npz archive of arrays 'ids' and 'weights': {reason}"
        ) from None
    _check_ids(path, ids)
    if weights is not None and (weights.dtype.kind != "f" or weights.shape != ids.shape):
        raise ValueError(
            f"routing file {path}: weights are {weights.dtype} {list(weights.shape)}, "
            f"where floating point {list(ids.shape)} are needed"
        )
    if weights is not None and not np.isfinite(weights).all():
        raise ValueError(f"routing file {path}: weights are not all finite")
    shape = ids.shape if ids.ndim == 4 else (1, *ids.shape)
    return Recorded(
        ids=ids.astype(np.int64).reshape(shape),
        weights=None if weights is None else weights.astype(np.float32).reshape(shape),
    )


def _check_ids(path: str, ids: NDArray[np.generic]) -> None:
    if ids.dtype.kind not in "iu":
        raise ValueError(f"routing file {path}: ids are {ids.dtype}, where integers are needed")
    if ids.ndim not in (3, 4) or not ids.size:
        raise ValueError(
            f"routing file {path}: ids have the shape {list(ids.shape)}, "
            f"where [ranks, tokens, topk] or [iterations, ranks, tokens, topk] is needed"
        )
    whole = ids.astype(np.int64)
    if ids.dtype == np.uint64 and (whole < 0).any():
        raise ValueError(f"routing file {path}: ids are beyond what an expert can be")
    if whole.min() < -1:
        raise ValueError(f"routing file {path} names expert {whole.min()}: experts begin at 0, and -1 is none")
    ordered = np.sort(whole.reshape(-1, whole.shape[-1]), axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError(f"routing file {path}: a token has the same expert twice")
