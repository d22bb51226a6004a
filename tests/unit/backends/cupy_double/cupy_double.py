"""A host with GPUs as cupy shows it, and NCCL as nccl4py's bindings and cupy.cuda.nccl show it, on a machine without.

Names and parameters are those of nccl4py 0.6.0 and cupy 14.2; test_nccl_raw.py compares them with the packages where
these are installed. What is called is queued, as on a stream, and done when the stream is waited for. Data really move:
each message is a file in COMMBENCH_TEST_MAIL, so ranks may be threads or processes. Refused is what NCCL refuses or
leaves undefined: addresses outside of live memory, buffers that overlap otherwise than its in-place rules allow, sends
and receives of unequal size, windows of unequal size, a group that is not closed, and calls while one is being captured
on another stream. Every call of NCCL's is noted in ``local.calls``, by thread.
"""

import importlib.machinery
import os
import secrets
import sys
import threading
import time
import types
import weakref
from collections import Counter
from pathlib import Path

import numpy as np

GPUS = int(os.environ.get("COMMBENCH_TEST_GPUS", "8"))
VERSION = 23203
RESULTS = {1: "UnhandledCudaError", 4: "InvalidArgument", 5: "InvalidUsage", 6: "RemoteError"}
WAIT_S = 20.0
ITEMSIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
NUMPY = {0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64, 6: np.float16, 7: np.float32,
         8: np.float64}  # fmt: skip
BFLOAT16 = 9
FOLDS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}  # by ncclRedOp_t; 4 is the average
AVERAGE = 4

local = threading.local()
memory = {}  # address -> the bytes that live there
streams = weakref.WeakValueDictionary()
state = types.SimpleNamespace(async_error=0, symmetric=True, next_stream=0x1000)


def note(name, *arguments):
    if not hasattr(local, "calls"):
        local.calls = []
    local.calls.append((name, *arguments))


class NCCLError(Exception):
    def __init__(self, status):
        self.status = status
        super().__init__(f"{RESULTS.get(status, 'Unknown')} ({status}): said by the double\n\nmore lines")


class CUDARuntimeError(RuntimeError):
    pass


# -- memory and streams --------------------------------------------------------------------------------------------


def new_memory(size):
    raw = np.full(size + 4096, 0xEE, dtype=np.uint8)
    start = -raw.ctypes.data % 4096
    view = raw[start : start + size]
    memory[view.ctypes.data] = view
    return view


def at(address, size):
    """The live memory at an address, or what NCCL says of one that is not."""
    for base, view in list(memory.items()):
        if base <= address and address + size <= base + len(view):
            return view[address - base : address - base + size]
    raise NCCLError(4)


def stream_of(ptr):
    capturing = getattr(local, "capturing", None)
    if capturing is not None and capturing.ptr != ptr:
        raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: another stream is being captured")
    return streams[ptr]


class Stream:
    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        state.next_stream += 1
        self.ptr = state.next_stream
        self.queue = []
        self.captured = None
        streams[self.ptr] = self

    def use(self):
        local.stream = self
        return self

    def synchronize(self):
        if self.captured is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: a stream that is captured was waited for")
        while self.queue:
            self.queue.pop(0)()

    def enqueue(self, act):
        (self.queue if self.captured is None else self.captured).append(act)

    def begin_capture(self, mode=None):
        self.captured = []
        local.capturing = self

    def end_capture(self):
        captured, self.captured, local.capturing = self.captured, None, None
        if not captured:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated: said by the double")
        return Graph(captured)


class Graph:
    def __init__(self, acts):
        self.acts = acts

    def launch(self, stream=None):
        for act in self.acts:
            stream.enqueue(act)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.time = None
        self.waiting = 0

    def record(self, stream=None):
        self.waiting += 1

        def pass_it():
            self.time = time.perf_counter()
            self.waiting -= 1

        stream.enqueue(pass_it)

    @property
    def done(self):
        return not self.waiting


def get_elapsed_time(start_event, end_event):
    if start_event.waiting or end_event.waiting or start_event.time is None or end_event.time is None:
        raise CUDARuntimeError("cudaErrorNotReady: an event was not passed")
    return (end_event.time - start_event.time) * 1e3


class Device:
    def __init__(self, device=None):
        self.id = device

    def use(self):
        local.device = self.id


class MemoryPointer:
    def __init__(self, mem, offset):
        self._view = mem
        self.ptr = mem.ctypes.data + offset

    def memset_async(self, value, size, stream=None):
        memsetAsync(self.ptr, value, size, stream.ptr)


def alloc(size):
    view = new_memory(size)
    pointer = MemoryPointer(view, 0)
    weakref.finalize(pointer, memory.pop, view.ctypes.data)
    return pointer


def alloc_pinned_memory(size):
    return bytearray(size)


def host(address, size):
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * size).from_address(address))


def memcpyAsync(dst, src, size, kind, stream):
    to = at(dst, size) if kind in (1, 3) else host(dst, size)
    of = at(src, size) if kind in (2, 3) else host(src, size)
    stream_of(stream).enqueue(lambda: np.copyto(to, of))


def memsetAsync(ptr, value, size, stream):
    view = at(ptr, size)
    stream_of(stream).enqueue(lambda: view.fill(value))


def getDeviceCount():
    return GPUS


def getDeviceProperties(device):
    return {"name": b"Double 9000", "uuid": bytes([device]) * 16, "major": 9, "minor": 0, "l2CacheSize": 1 << 16}


def memGetInfo():
    return (80 << 30, 80 << 30)


def runtimeGetVersion():
    return 13000


class ndarray:
    def __init__(self, view, owner):
        self._view, self._owner = view, owner
        self.data = types.SimpleNamespace(ptr=view.ctypes.data)
        self.size = view.size

    def __getitem__(self, index):
        return ndarray(self._view[index], self._owner)

    def view(self, dtype=None):
        return ndarray(self._view.view(dtype), self._owner)


def zeros(shape, dtype=float, order="C"):
    pointer = alloc(shape * np.dtype(dtype).itemsize)
    memsetAsync(pointer.ptr, 0, len(pointer._view), local.stream.ptr)
    return ndarray(pointer._view.view(dtype), pointer)


def kernel(name):
    def act(x1, x2, out):
        local.stream.enqueue(lambda: getattr(np, name)(x1._view, x2._view, out=out._view))

    return act


class RawKernel:
    def __init__(self, code, name, options=(), backend="nvrtc", translate_cucomplex=False, *,
                 enable_cooperative_groups=False, jitify=None):  # fmt: skip
        self.name = name

    def compile(self, log_stream=None):
        if "COMMBENCH_TEST_NO_COMPILER" in os.environ:
            raise RuntimeError("CuPy failed to load libnvrtc.so.13\nmore lines")

    def __call__(self, grid, block, args, *, shared_mem=0):
        (nanoseconds,) = args
        local.stream.enqueue(lambda: time.sleep(min(float(nanoseconds) * 1e-9, 1e-4)))


class MemoryPool:
    def free_bytes(self):
        return 1 << 20

    def free_all_blocks(self, stream=None):
        note("free_all_blocks")


# -- NCCL ----------------------------------------------------------------------------------------------------------


def mail(name):
    return Path(os.environ["COMMBENCH_TEST_MAIL"]) / name


def post(name, data):
    path = mail(f".{name}")
    path.write_bytes(data)
    path.replace(mail(name))


def take(name):
    path = mail(name)
    end = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise NCCLError(6)
        time.sleep(1e-4)
    data = path.read_bytes()
    path.unlink()
    return data


class Comm:
    """The handle of nccl4py's, and what either interface does on it."""

    def __init__(self, handle=0):
        self.handle = handle
        self.sent, self.taken = Counter(), Counter()
        self.splits = 0

    def __bool__(self):
        return bool(self.handle)

    def join(self, key, ranks, rank):
        self.handle, self.key, self.ranks, self.rank = 1, key, ranks, rank
        self.exchange(b"here")
        return self

    def to(self, peer, data):
        self.sent[peer] += 1
        post(f"{self.key}-{self.rank}-{peer}-{self.sent[peer]}", data)

    def of(self, peer):
        self.taken[peer] += 1
        return take(f"{self.key}-{peer}-{self.rank}-{self.taken[peer]}")

    def exchange(self, data):
        """Everyone's, in their order."""
        for peer in range(self.ranks):
            self.to(peer, data)
        return [self.of(peer) for peer in range(self.ranks)]

    def split(self, color, key):
        self.splits += 1
        everyone = [tuple(map(int, text.split())) for text in self.exchange(b"%d %d" % (color, key))]
        if color == -1:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        return Comm().join(f"{self.key}.{self.splits}.{color}", len(members), members.index((key, self.rank)))

    def enqueue(self, name, act, stream, message=None):
        """``message`` is a send or receive, which a group starts together; other calls it takes one after another."""
        if not self.handle:
            raise NCCLError(4)
        group = getattr(local, "group", None)
        if group is None:
            stream_of(stream).enqueue(act)
        else:
            group.append((message == "send", act, stream))


def group_start():
    note("group_start")
    if getattr(local, "group", None) is not None:
        raise NCCLError(5)
    local.group = []


def group_end():
    note("group_end")
    group, local.group = local.group, None
    for _, act, stream in sorted(group, key=lambda one: not one[0]):  # sends wait for nobody here
        stream_of(stream).enqueue(act)


def in_place_only(send, sent, recv, received, own):
    """Buffers that overlap must do so as NCCL allows: the smaller at this rank's block of the larger."""
    if send and recv and send < recv + received and recv < send + sent and send - recv != own:
        raise NCCLError(4)


def fold(blocks, datatype, op):
    """The reduction of blocks of bytes. bfloat16 through float32, whose upper half it is: the test's data are exact."""
    wide = [np.frombuffer(block, dtype=np.uint16 if datatype == BFLOAT16 else NUMPY[datatype]) for block in blocks]
    if datatype == BFLOAT16:
        wide = [(block.astype(np.uint32) << 16).view(np.float32) for block in wide]
    found = wide[0].copy()
    for block in wide[1:]:
        FOLDS[op](found, block, out=found)
    if op == AVERAGE:
        found = found / len(wide) if found.dtype.kind == "f" else found // len(wide)
        found = found.astype(wide[0].dtype)
    if datatype == BFLOAT16:
        found = (found.view(np.uint32) >> 16).astype(np.uint16)
    return found.view(np.uint8)


def collective(name, sendbuff, recvbuff, count, datatype, op, root, comm, stream):
    """Any of those in which every rank takes part, as one exchange of all that every rank sends."""
    note(name, sendbuff, recvbuff, count, datatype, op, root)
    block, ranks, rank = count * ITEMSIZES[datatype], comm.ranks, comm.rank
    sends = name not in ("broadcast", "scatter") or rank == root
    takes = name not in ("reduce", "gather") or rank == root
    sent = block * (ranks if name in ("reduce_scatter", "all_to_all", "scatter") else 1)
    received = block * (ranks if name in ("all_gather", "all_to_all", "gather") else 1)
    mine = at(sendbuff, sent) if sends else None
    target = at(recvbuff, received) if takes else None
    if sends and takes:
        own = {"all_gather": 1, "gather": 1, "reduce_scatter": -1, "scatter": -1}.get(name, 0) * rank * block
        if name == "all_to_all" and sendbuff == recvbuff:
            raise NCCLError(4)
        in_place_only(sendbuff, sent, recvbuff, received, own)

    def act():
        everyone = comm.exchange(mine.tobytes() if sends else b"")
        if not takes:
            return
        if name in ("all_reduce", "reduce"):
            found = fold(everyone, datatype, op)
        elif name in ("all_gather", "gather"):
            found = np.frombuffer(b"".join(everyone), np.uint8)
        elif name == "broadcast":
            found = np.frombuffer(everyone[root], np.uint8)
        else:
            parts = everyone if name != "scatter" else [everyone[root]]
            parts = [part[rank * block : (rank + 1) * block] for part in parts]
            found = fold(parts, datatype, op) if name == "reduce_scatter" else np.frombuffer(b"".join(parts), np.uint8)
        np.copyto(target, found)

    comm.enqueue(name, act, stream)


def message(name, buff, count, datatype, peer, comm, stream):
    note(name, buff, count, datatype, peer)
    view = at(buff, count * ITEMSIZES[datatype])

    def act():
        if name == "send":
            comm.to(peer, view.tobytes())
            return
        data = comm.of(peer)
        if len(data) != len(view):
            raise NCCLError(4)
        np.copyto(view, np.frombuffer(data, np.uint8))

    comm.enqueue(name, act, stream, message=name)


# nccl.bindings.nccl


def all_reduce(sendbuff, recvbuff, count, datatype, op, comm, stream):
    collective("all_reduce", sendbuff, recvbuff, count, datatype, op, 0, comm, stream)


def all_gather(sendbuff, recvbuff, sendcount, datatype, comm, stream):
    collective("all_gather", sendbuff, recvbuff, sendcount, datatype, None, 0, comm, stream)


def reduce_scatter(sendbuff, recvbuff, recvcount, datatype, op, comm, stream):
    collective("reduce_scatter", sendbuff, recvbuff, recvcount, datatype, op, 0, comm, stream)


def broadcast(sendbuff, recvbuff, count, datatype, root, comm, stream):
    collective("broadcast", sendbuff, recvbuff, count, datatype, None, root, comm, stream)


def reduce(sendbuff, recvbuff, count, datatype, op, root, comm, stream):
    collective("reduce", sendbuff, recvbuff, count, datatype, op, root, comm, stream)


def allto_all(sendbuff, recvbuff, count, datatype, comm, stream):
    collective("all_to_all", sendbuff, recvbuff, count, datatype, None, 0, comm, stream)


def gather(sendbuff, recvbuff, count, datatype, root, comm, stream):
    collective("gather", sendbuff, recvbuff, count, datatype, None, root, comm, stream)


def scatter(sendbuff, recvbuff, count, datatype, root, comm, stream):
    collective("scatter", sendbuff, recvbuff, count, datatype, None, root, comm, stream)


def send(sendbuff, count, datatype, peer, comm, stream):
    message("send", sendbuff, count, datatype, peer, comm, stream)


def recv(recvbuff, count, datatype, peer, comm, stream):
    message("recv", recvbuff, count, datatype, peer, comm, stream)


class UniqueId:
    def __init__(self, data=b""):
        self._data = data

    def __bytes__(self):
        return self._data

    @staticmethod
    def from_buffer(buffer):
        return UniqueId(bytes(buffer))


def get_version():
    return VERSION


def get_unique_id():
    return UniqueId(secrets.token_bytes(128))


def comm_init_rank(nranks, comm_id, rank):
    note("comm_init_rank", nranks, rank)
    return Comm().join(bytes(comm_id).hex()[:16], nranks, rank)


def comm_split(comm, color, key, config):
    note("comm_split", color, key)
    return comm.split(color, key) or Comm()


def comm_finalize(comm):
    note("comm_finalize")


def comm_destroy(comm):
    note("comm_destroy")
    comm.handle = 0


def comm_abort(comm):
    note("comm_abort")
    comm.handle = 0


def comm_get_async_error(comm):
    return state.async_error


def check_status(status):
    if status:
        raise NCCLError(status)


def comm_register(comm, buff, size):
    at(buff, size)
    note("comm_register", buff, size)
    return buff


def comm_deregister(comm, handle):
    note("comm_deregister", handle)
    if not comm.handle:
        raise NCCLError(4)


class Window:
    def __init__(self, handle=0):
        self.handle = handle

    def __bool__(self):
        return bool(self.handle)


def comm_window_register(comm, buff, size, win_flags):
    at(buff, size)
    note("comm_window_register", buff, size, win_flags)
    if buff % 4096 or len(set(comm.exchange(b"%d" % size))) > 1:
        raise NCCLError(4)
    return Window(buff if state.symmetric else 0)


def comm_window_deregister(comm, win):
    note("comm_window_deregister", win.handle)
    if not comm.handle:
        raise NCCLError(4)


def mem_alloc(size):
    address = new_memory(size).ctypes.data
    note("mem_alloc", address, size)
    return address


def mem_free(ptr):
    note("mem_free", ptr)
    del memory[ptr]


# cupy.cuda.nccl


class NcclError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"NCCL_ERROR: {status}")


class NcclCommunicator:
    def __init__(self, ndev, commId, rank, config=None):
        note("NcclCommunicator", ndev, rank)
        self._comm = Comm().join(commId.hex()[:16], ndev, rank) if isinstance(commId, bytes) else commId

    def commSplit(self, color, key, config=None):
        made = self._comm.split(color, key)
        return NcclCommunicator(0, made, 0) if made else None

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        collective("all_reduce", sendbuf, recvbuf, count, datatype, op, 0, self._comm, stream)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        collective("all_gather", sendbuf, recvbuf, count, datatype, None, 0, self._comm, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        collective("reduce_scatter", sendbuf, recvbuf, recvcount, datatype, op, 0, self._comm, stream)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        collective("broadcast", sendbuff, recvbuff, count, datatype, None, root, self._comm, stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        collective("reduce", sendbuf, recvbuf, count, datatype, op, root, self._comm, stream)

    def send(self, sendbuf, count, datatype, peer, stream):
        message("send", sendbuf, count, datatype, peer, self._comm, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        message("recv", recvbuf, count, datatype, peer, self._comm, stream)

    def check_async_error(self):
        if state.async_error:
            raise NcclError(state.async_error)

    def destroy(self):
        note("destroy")
        self._comm.handle = 0

    def abort(self):
        note("abort")
        self._comm.handle = 0


def cupy_unique_id():
    return secrets.token_bytes(128)


# -- in their places -----------------------------------------------------------------------------------------------

BINDINGS = (
    all_reduce, all_gather, reduce_scatter, broadcast, reduce, allto_all, gather, scatter, send, recv, get_version,
    get_unique_id, comm_init_rank, comm_split, comm_finalize, comm_destroy, comm_abort, comm_get_async_error,
    check_status, comm_register, comm_deregister, comm_window_register, comm_window_deregister, mem_alloc, mem_free,
    group_start, group_end,
)  # fmt: skip
RUNTIME = (memcpyAsync, memsetAsync, getDeviceCount, getDeviceProperties, memGetInfo, runtimeGetVersion)
CUDA = (Stream, Event, Device, alloc, alloc_pinned_memory, get_elapsed_time)
UFUNCS = ("add", "multiply", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor")


def module(name, members, **more):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update({member.__name__: member for member in members}, **more)
    return made


def modules(nccl4py=True):
    """The doubles by the names under which they are imported. Without nccl4py there is no such package."""
    runtime = module(
        "cupy.cuda.runtime", (*RUNTIME, CUDARuntimeError), memcpyHostToDevice=1, memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
    )  # fmt: skip
    cupy_nccl = module(
        "cupy.cuda.nccl", (NcclCommunicator, NcclError, get_version), available=True, groupStart=group_start,
        groupEnd=group_end, get_unique_id=cupy_unique_id,
    )  # fmt: skip
    cuda = module("cupy.cuda", CUDA, runtime=runtime, nccl=cupy_nccl)
    pool = MemoryPool()
    cupy = module(
        "cupy", (zeros, ndarray, RawKernel), cuda=cuda, __version__="14.2.0", get_default_memory_pool=lambda: pool,
        **{name: kernel(name) for name in UFUNCS},
    )  # fmt: skip
    found = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime, "cupy.cuda.nccl": cupy_nccl}
    if not nccl4py:
        return {**found, "nccl": None}
    bindings = module("nccl.bindings.nccl", (*BINDINGS, UniqueId, NCCLError))
    package = module("nccl.bindings", (), nccl=bindings)
    return {
        **found,
        "nccl": module("nccl", (), bindings=package),
        "nccl.bindings": package,
        bindings.__name__: bindings,
    }


def install():
    sys.modules.update(modules())
