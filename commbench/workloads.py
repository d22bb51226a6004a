"""What a mixture of experts sends: the tokens of a layer, its experts, and how the ones find the others.

Part of the vocabulary: names and numbers alone. How they become token copies, bytes and buffers is ``moe``'s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MODES = ("throughput", "low_latency")
COUNTS = ("exchanged", "known")
SCALE_BLOCK = 128  # values that share one scale of an FP8 token
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One layer's tokens and experts.

    ``tokens``: per rank (the most of any rank where they are uneven), each of ``hidden`` values and sent to ``topk`` of
    ``experts``. ``mode``: ``throughput`` moves what is routed and learns how much before; ``low_latency`` has slots of a
    fixed size for every expert, as many for every source rank as any has tokens, and exchanges no counts. ``routing`` and ``experts_on`` are written as on the command line, such as ``zipf:1.2`` and
    ``eplb:32``. ``masked``: the share of selections that are -1, to no expert. ``uneven_tokens``: rank r has r tokens
    less than the first, one at least (as DeepEP V2's test). ``uneven_experts``: ranks may have one expert more than
    others. ``fixed``: every iteration is routed alike. ``counts``: whether a dispatch begins with the exchange of how
    many tokens come, or they are ``known`` from one before (DeepEP's cached handle).
    """

    tokens: int
    hidden: int
    experts: int
    topk: int
    mode: str = "throughput"
    routing: str = "uniform"
    experts_on: str = "contiguous"
    masked: float = 0.0
    uneven_tokens: bool = False
    uneven_experts: bool = False
    fixed: bool = False
    counts: str = "exchanged"

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one copy of a token: its values, and its scales where they are of 8 bits."""
        if dtype.startswith("float8"):
            return self.hidden + self.hidden // SCALE_BLOCK * SCALE_BYTES
        return self.hidden * 2

    def message_bytes(self, dtype: str) -> int:
        """A case's ``bytes``: every selection of a rank with all its tokens, none masked (``logical`` in docs/moe.md)."""
        return self.tokens * self.topk * self.token_bytes(dtype)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def title(self) -> str:
        """What a message to a person calls it."""
        said = [f"{self.tokens} tokens x {self.hidden}", f"top {self.topk} of {self.experts}", self.mode, self.routing]
        said += [self.experts_on] if self.experts_on != "contiguous" else []
        said += [f"{self.masked:.3g} masked"] if self.masked else []
        said += ["uneven tokens"] if self.uneven_tokens else []
        said += ["fixed"] if self.fixed else []
        said += ["counts known"] if self.counts != "exchanged" else []
        return ", ".join(said)
