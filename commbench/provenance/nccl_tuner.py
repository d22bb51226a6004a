"""What NCCL's tuner was given in this very job: the graphs that NCCL dumps of itself, and the facts beside them."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from commbench.models.nccl import NcclInputs
from commbench.models.nccl.inputs import MIXED_CPU
from commbench.provenance.nccl_graph import ARCHITECTURES, VENDORS, NcclGraphs, read_graphs
from commbench.provenance.sources import ROOT, read

VARIABLE = "NCCL_GRAPH_DUMP_FILE"


class GraphDump:
    """The file into which NCCL writes the graphs of each communicator that it makes, over those of the one before.

    Make it before the first communicator: ``environment`` is changed, unless the user has named a file there, which is
    then read and stays. Of a communicator's ranks only the first writes (``NCCL_GRAPH_DUMP_FILE_RANK`` aside).
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._path: Path | None = None
        if VARIABLE not in environment:
            try:
                self._directory = tempfile.TemporaryDirectory(prefix="commbench-nccl-")
            except OSError:
                return
            environment[VARIABLE] = os.path.join(self._directory.name, "graphs.xml")
        self._path = Path(environment[VARIABLE])
        self._before = self._state()

    @property
    def private(self) -> bool:
        """Whether the variable is ours, not the user's."""
        return self._directory is not None

    def graphs(self) -> NcclGraphs:
        """Those of the newest communicator. Raises ValueError with one line, without the file's name."""
        # A user's file may be there from another job.
        if self._path is None or (now := self._state()) is None or now == self._before:
            raise ValueError("not written")
        try:
            return read_graphs(self._path)
        except OSError as error:
            raise ValueError(f"not readable: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"not readable: {str(error).removeprefix(f'{self._path}: ')}") from None

    def close(self) -> None:
        if self._directory is not None:
            self._environment.pop(VARIABLE, None)
            self._directory.cleanup()

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def processor(root: Path = ROOT) -> tuple[str, str]:
    """(architecture, vendor) of this host in the words of NCCL's model; the vendor is empty where there is no name."""
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", read(root, "proc/cpuinfo") or "", re.MULTILINE)
    name = vendor[1] if vendor else ""
    machine = os.uname().machine
    return ARCHITECTURES.get(machine, machine), VENDORS.get(name, name.lower())


def nccl_variable(name: str) -> str | None:
    """A variable as NCCL sees it: of its settings files (nccl.conf) NCCL makes variables of the process, in its first
    call, which ``os.environ`` does not notice."""
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
    value: bytes | None = getenv(name.encode())
    return None if value is None else value.decode(errors="replace")


def tuner_inputs(
    graphs: NcclGraphs, hosts: Sequence[str], capabilities: Sequence[int], processors: Sequence[tuple[str, str]]
) -> NcclInputs:
    """The tuner's inputs for the communicator of all ranks, from the graphs that its first rank found.

    By rank: ``hosts`` names the host, ``capabilities`` are compute capabilities times ten, ``processors`` what
    :func:`processor` says. NCCL's nodes are the ranks that a graph joins: where it visits more GPUs than rank 0's host
    has ranks, NVLink joins hosts; where fewer, something divides that host. Raises ValueError with one line where
    that does not come out even, and for graphs without a ring or a tree.
    """
    ranks, on_host = len(hosts), hosts.count(hosts[0])
    gpus = graphs.gpus or on_host
    if gpus != on_host and ranks % gpus:
        raise ValueError(f"of {gpus} GPUs a node, which {ranks} ranks do not make")
    vendors = {vendor for _, vendor in processors}
    return graphs.inputs(
        ranks=ranks, nodes=len(set(hosts)) if gpus == on_host else ranks // gpus, cc_min=min(capabilities),
        cc_max=max(capabilities), cpu_arch=processors[0][0], cpu_vendor=vendors.pop() if len(vendors) == 1 else MIXED_CPU,
        multi_host_nvlink=gpus > on_host,
    )  # fmt: skip
