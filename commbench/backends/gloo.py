"""gloo on host memory, through torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from commbench.backends.base import Context
from commbench.backends.torch_distributed import TorchDistributed, TorchMessenger
from commbench.cases import Case
from commbench.measure.operation import Operation


class Gloo(TorchDistributed):
    """gloo on host memory."""

    name = "gloo"

    def _prepare(self, context: Context) -> None:
        # gloo would look the host's name up, and listen wherever that leads.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", context.interface)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def settings(self) -> dict[str, str]:
        return {"threads": str(torch.get_num_threads()), "interface": os.environ["GLOO_SOCKET_IFNAME"]}

    def why_not(self, case: Case) -> str | None:
        if case.reduce_op == "avg":
            return "gloo has no reduce operation 'avg'"
        return super().why_not(case)

    def note(self, case: Case) -> str | None:
        if case.collective == "reduce_scatter":
            return "torch's gloo performs reduce_scatter by an all_reduce: it moves twice the bytes"
        return super().note(case)

    def _operation(
        self, call: Callable[[], Any], given: torch.Tensor, taken: torch.Tensor, repeatable: bool
    ) -> Operation:
        return Operation(run=call, enqueue=call, input=given.numpy(), output=taken.numpy(), repeatable=repeatable)

    def messenger(self, members: tuple[int, ...]) -> TorchMessenger:
        return TorchMessenger(self, members)
