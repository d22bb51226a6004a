"""What a case, or a step of messages, is in calls of NCCL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from commbench.backends.nccl_libraries import OPS, TYPES, WHOLE, Communicator, Library
from commbench.cases import Case

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """One rank, ``rank`` of the ``ranks`` of a communicator, on one stream. ``grouped``: all_to_all, gather and scatter
    are made of sends and receives even where NCCL has a call for them."""

    library: Library
    comm: Communicator
    rank: int
    ranks: int
    stream: int
    grouped: bool

    def collective(self, case: Case, send: int, recv: int) -> Call:
        """The call for a case that has data, on memory at these addresses (0: this rank has none)."""
        kind, block, root = TYPES[case.dtype], case.block_elements, case.root
        op = OPS[case.reduce_op or "sum"]
        name = case.collective
        if name == "send_recv":
            to, source = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
            return self.group([self.send(send, block, kind, to), self.recv(recv, block, kind, source)])
        if name in WHOLE and (self.grouped or name not in self.library.calls):
            return self._pieces(case, send, recv)
        arguments: dict[str, tuple[int, ...]] = {
            "all_reduce": (kind, op),
            "all_gather": (kind,),
            "reduce_scatter": (kind, op),
            "broadcast": (kind, root),
            "reduce": (kind, op, root),
            "all_to_all": (kind,),
            "gather": (kind, root),
            "scatter": (kind, root),
        }
        return self.comm.call(name, send, recv, block, *arguments[name], self.stream)

    def barrier(self, word: int) -> Call:
        """An all_reduce of the 4 bytes at ``word``: NCCL has no barrier."""
        return self.comm.call("all_reduce", word, word, 1, TYPES["float32"], OPS["sum"], self.stream)

    def _pieces(self, case: Case, send: int, recv: int) -> Call:
        """An all_to_all, gather or scatter by messages; a block that is where it belongs is not sent."""
        kind, block, root = TYPES[case.dtype], case.block_elements, case.root
        everyone, step = range(self.ranks), block * case.itemsize
        to = everyone if case.collective == "all_to_all" or (case.collective == "scatter" and self.rank == root) else ()
        of = everyone if case.collective == "all_to_all" or (case.collective == "gather" and self.rank == root) else ()
        sends = {peer: send + peer * step for peer in to} if case.collective != "gather" else {root: send}
        receives = {peer: recv + peer * step for peer in of} if case.collective != "scatter" else {root: recv}
        if self.rank in sends and sends[self.rank] == receives.get(self.rank):
            del sends[self.rank], receives[self.rank]
        return self.group(
            [self.send(address, block, kind, peer) for peer, address in sends.items()]
            + [self.recv(address, block, kind, peer) for peer, address in receives.items()]
        )

    def send(self, address: int, count: int, kind: int, peer: int) -> Call:
        return self.comm.call("send", address, count, kind, peer, self.stream)

    def recv(self, address: int, count: int, kind: int, peer: int) -> Call:
        return self.comm.call("recv", address, count, kind, peer, self.stream)

    def group(self, calls: Sequence[Call]) -> Call:
        """All of these as one operation of NCCL's."""
        start, end, errors = self.library.group_start, self.library.group_end, self.library.errors

        def group() -> None:
            start()
            try:
                for call in calls:
                    call()
            except BaseException:
                with suppress(*errors):  # the first error is the one to tell
                    end()
                raise
            end()

        return group
