"""A host with GPUs as torch shows it, on one that has none: torch.cuda, pinned memory and the nccl process group.

What is called is queued, as on a stream, and done by gloo when something waits for the device: a backend that reads too
early, or never waits, gets what it deserves. Refused is what ProcessGroupNCCL refuses (torch 2.13: NCCLUtils.hpp's
types, getNcclReduceOp, check_gpu_single_tensor, "not on device passed to init_process_group"). Every call is written,
in order, to COMMBENCH_TEST_CUDA/rank-N.jsonl. COMMBENCH_TEST_GPUS says how many GPUs each rank sees,
COMMBENCH_TEST_BOUND that they are the rank's own, COMMBENCH_TEST_NCCL which version NCCL has, COMMBENCH_TEST_GRAPHS what
a communicator of all ranks leaves in NCCL_GRAPH_DUMP_FILE (initTransportsRank: its first rank writes),
COMMBENCH_TEST_CHOICE which algorithm and protocol it logs for every call, COMMBENCH_TEST_RESET that
libnccl.so.2 is loaded and can be told to read its log's variables again, COMMBENCH_TEST_NO_GRAPHS that nothing can be
captured.

The device has a clock of its own, which only what it does moves: KERNEL_S a kernel, FLUSH_S what empties its cache.
"""

import ctypes
import json
import os
import types

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

RANK = int(os.environ.get("COMMBENCH_RANK", "0"))
NCCL_TYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip
NCCL_OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)

KERNEL_S, FLUSH_S = 10e-6, 40e-6

real: dict = {}  # what the doubles stand in for, by name
queue: list = []  # what the device has still to do: how long it takes, and the doing
memory = {"device": {}, "pinned": {}}  # address of a storage -> a tensor that keeps it from being used again
state = types.SimpleNamespace(device=None, log=None, clock=0.0, captured=None, stream="default", debug=None)


def record(call, **facts):
    if state.log is None:
        state.log = open(os.path.join(os.environ["COMMBENCH_TEST_CUDA"], f"rank-{RANK}.jsonl"), "a", buffering=1)  # noqa: SIM115
    state.log.write(json.dumps({"call": call, **facts}) + "\n")


def flush():
    if state.captured is not None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
    while queue:
        seconds, act = queue.pop(0)
        act()
        state.clock += seconds


def later(act, seconds=KERNEL_S):
    (queue if state.captured is None else state.captured).append((seconds, act))


def lies_in(kind, tensor):
    return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in memory[kind]


def enqueue(call, tensors, act, op=None, **facts):
    """Refuse what NCCL's process group would, else note it and leave it for later."""
    for tensor in tensors:
        if not lies_in("device", tensor):
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if tensor.dtype not in NCCL_TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if op is not None and op not in NCCL_OPS:
        raise ValueError(f"Cannot use {op} with NCCL")
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    record(call, sizes=sizes, **facts, **({"captured": True} if state.captured is not None else {}))
    log_choice(call, sizes)
    later(act)


# What NCCL calls an operation in its log, and whose size it gives: from 2.24 on one rank's part.
LOGGED = {
    "all_reduce": ("AllReduce", 0), "all_gather_single": ("AllGather", 1), "reduce_scatter_single": ("ReduceScatter", 0),
    "broadcast": ("Broadcast", 0), "reduce": ("Reduce", 0),
}  # fmt: skip


def log_choice(call, sizes):
    """The line that the first rank's NCCL writes for a call with NCCL_DEBUG=INFO and the subsystem TUNING.

    The variables are read with the first message, and again only after a reset: the file is then begun anew.
    """
    if state.debug is None:
        state.debug = {
            name: os.environ.get(name, "") for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
        }
        if state.debug["NCCL_DEBUG"] == "INFO" and state.debug["NCCL_DEBUG_FILE"]:
            open(state.debug["NCCL_DEBUG_FILE"], "w").close()
    path, choice = state.debug["NCCL_DEBUG_FILE"], os.environ.get("COMMBENCH_TEST_CHOICE")
    wanted = state.debug["NCCL_DEBUG"] == "INFO" and "TUNING" in state.debug["NCCL_DEBUG_SUBSYS"].split(",")
    if path and choice and wanted and call in LOGGED and RANK == 0:
        (name, part), (algorithm, protocol) = LOGGED[call], choice.split()
        text = f"{name}: {sizes[part]} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..1}}"
        with open(path, "a") as file:
            file.write(f"node0:17:17 [0] NCCL INFO {text}\n")
        record("logged")


def averaged(op, output, group, act):
    """gloo cannot average: it adds, and the mean is made of that."""
    if op != ReduceOp.AVG:
        return lambda: act(op)

    def add_and_divide():
        act(ReduceOp.SUM)
        size = dist.get_world_size(group)
        output.div_(size) if output.is_floating_point() else output.div_(size, rounding_mode="floor")

    return add_and_divide


# -- torch.cuda ----------------------------------------------------------------------------------------------------


def is_available():
    return device_count() > 0


def device_count():
    return int(os.environ.get("COMMBENCH_TEST_GPUS", "0"))


def set_device(device):
    record("set_device", device=str(device))
    state.device = torch.device(device)


def synchronize(device=None):
    record("synchronize", device=str(device), queued=len(queue))
    flush()


def get_device_name(device=None):
    return "Double 9000"


def get_device_properties(device=None):
    number = RANK if "COMMBENCH_TEST_BOUND" in os.environ else torch.device(device).index
    return types.SimpleNamespace(uuid=f"00000000-{number}", major=9, minor=0, L2_cache_size=1 << 20, clock_rate=1000)


def current_stream(device=None):
    return state.stream


def set_stream(stream):
    state.stream = stream


def _sleep(cycles):
    record("sleep", cycles=cycles)
    later(lambda: None, cycles / 1e6)  # 1000 kHz


class Event:
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        event = object.__new__(cls)
        event.timing, event.at = enable_timing, None
        return event

    def record(self, stream=None):
        if stream not in (None, state.stream):
            raise RuntimeError(f"{stream} is not the stream that operations are enqueued on")
        record("event")
        self.at = None
        later(lambda: setattr(self, "at", state.clock), 0.0)

    def query(self):
        return self.at is not None

    def elapsed_time(self, end_event):
        if not (self.timing and end_event.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at is None or end_event.at is None:
            raise RuntimeError("CUDA error: device not ready")
        return (end_event.at - self.at) * 1e3


class CUDAGraph:
    def __new__(cls, keep_graph=False):
        made = object.__new__(cls)
        made.acts = None
        return made

    def replay(self):
        record("replay", operations=len(self.acts))
        for seconds, act in self.acts:
            later(act, seconds)


class graph:
    def __init__(
        self, cuda_graph, pool=None, stream=None, capture_error_mode="global", enable_annotations=False,
        check_input_liveness=False,
    ):  # fmt: skip
        self.cuda_graph, self.mode = cuda_graph, capture_error_mode

    def __enter__(self):
        synchronize()
        if self.mode != "thread_local":
            raise RuntimeError("CUDA error: the watchdog's queries end a capture in this mode")
        state.captured, state.stream = [], "capturing"

    def __exit__(self, *args):
        # What torch does: where the end fails, its stream stays the current one.
        found, state.captured = state.captured, None
        if "COMMBENCH_TEST_NO_GRAPHS" in os.environ or args[0] is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda_graph.acts, state.stream = found, "default"


def mem_get_info(device=None):
    return (int(os.environ.get("COMMBENCH_TEST_GPU_MEMORY", str(80 << 30))), 80 << 30)


def memory_reserved(device=None):
    return 0


def memory_allocated(device=None):
    return 0


def version():
    return tuple(map(int, os.environ.get("COMMBENCH_TEST_NCCL", "2.99.1").split(".")))


# -- memory --------------------------------------------------------------------------------------------------------


def zeros(*sizes, device="cpu", **options):
    return place("zeros", sizes, torch.device(device), options)


def empty(*sizes, device="cpu", pin_memory=False, **options):
    return place("empty", sizes, torch.device(device), options, pin_memory)


def place(name, sizes, device, options, pin_memory=False):
    if device.type != "cuda":
        tensor = real[f"torch.{name}"](*sizes, **options)
        if pin_memory:
            memory["pinned"][tensor.untyped_storage().data_ptr()] = tensor
        return tensor
    if device != state.device:
        raise RuntimeError(f"{device} is not the device of this rank, {state.device}")
    tensor = real[f"torch.{name}"](*sizes, **options)
    memory["device"][tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def copy_(self, other, non_blocking=False):
    """A blocking copy from or to the device waits for what was enqueued before it; one on the device is queued."""
    to, of = lies_in("device", self), lies_in("device", other)
    if to and of and self.numel():
        later(lambda: real["torch.Tensor.copy_"](self, other))
        return self
    if to != of and self.numel():
        record("upload" if to else "download", size=self.numel() * self.element_size(),
               pinned=lies_in("pinned", other if to else self), queued=len(queue))  # fmt: skip
        flush()
    return real["torch.Tensor.copy_"](self, other, non_blocking)


def zero_(self):
    """Of the device's memory only the buffer that empties the cache is cleared so."""
    if not lies_in("device", self):
        return real["torch.Tensor.zero_"](self)
    record("flush", size=self.numel())
    later(lambda: None, FLUSH_S)
    return self


def add(input, other, *, out):
    return on_device("add", input, other, out)


def mul(input, other, *, out):
    return on_device("mul", input, other, out)


def on_device(name, input, other, out):
    """A kernel on the device's stream; anything else at once."""
    act = real[f"torch.{name}"]
    if not lies_in("device", out):
        return act(input, other, out=out)
    later(lambda: act(input, other, out=out))
    return out


# -- torch.distributed ---------------------------------------------------------------------------------------------


def is_nccl_available():
    return True


def init_process_group(
    backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name="", pg_options=None,
    device_id=None, _ranks=None,
):  # fmt: skip
    record("init_process_group", backend=backend, device_id=str(device_id), rank=rank, world_size=world_size)
    if device_id != state.device:
        raise ValueError(f"device_id {device_id} is not the current device {state.device}")
    real["torch.distributed.init_process_group"]("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    dump_graphs(first=rank == 0, everyone=True)


def new_group(
    ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, group_desc=None,
    device_id=None, sort_ranks=True,
):  # fmt: skip
    dump_graphs(first=ranks[0] == RANK, everyone=False)
    return real["torch.distributed.new_group"](ranks, timeout)


def dump_graphs(*, first, everyone):
    """A new communicator's graphs take the place of those of the one before."""
    graphs, path = os.environ.get("COMMBENCH_TEST_GRAPHS"), os.environ.get("NCCL_GRAPH_DUMP_FILE")
    if graphs and path and first:
        with open(path, "w") as file:
            file.write(graphs if everyone else '<graphs version="1"/>')
        record("dump_graphs", path=path)


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    def act(op):
        real["torch.distributed.all_reduce"](tensor, op, group)

    enqueue("all_reduce", [tensor], averaged(op, tensor, group, act), op)


def all_gather_single(output_tensor, input_tensor, group=None, async_op=False):
    def act():
        # gloo would overwrite an input that is a part of the output before it has been sent.
        real["torch.distributed.all_gather_single"](output_tensor, input_tensor.clone(), group)

    enqueue("all_gather_single", [output_tensor, input_tensor], act)


def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    def act(op):
        real["torch.distributed.reduce_scatter_single"](output, input.clone(), op, group)

    enqueue("reduce_scatter_single", [output, input], averaged(op, output, group, act), op)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    def act():
        real["torch.distributed.all_to_all_single"](output, input, output_split_sizes, input_split_sizes, group)

    enqueue("all_to_all_single", [output, input], act)


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    enqueue("broadcast", [tensor], lambda: real["torch.distributed.broadcast"](tensor, src, group), root=src)


def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False, group_dst=None):
    def act(op):
        real["torch.distributed.reduce"](tensor, dst, op, group)

    enqueue("reduce", [tensor], averaged(op, tensor, group, act), op, root=dst)


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    if (gather_list is not None) != (dist.get_rank() == dst):
        raise ValueError("gather_list belongs to the destination, and to it alone")

    def act():
        real["torch.distributed.gather"](tensor, gather_list, dst, group)

    enqueue("gather", [tensor, *(gather_list or [])], act, root=dst)


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    if (scatter_list is not None) != (dist.get_rank() == src):
        raise ValueError("scatter_list belongs to the source, and to it alone")

    def act():
        real["torch.distributed.scatter"](tensor, scatter_list, src, group)

    enqueue("scatter", [tensor, *(scatter_list or [])], act, root=src)


def barrier(group=None, async_op=False, device_ids=None, timeout=None):
    """torch's NCCL barrier makes the host wait, unless ``async_op`` (ProcessGroupNCCL::barrier)."""
    record("barrier", device_ids=device_ids, queued=len(queue))
    flush()
    real["torch.distributed.barrier"](group)


def send(tensor, dst=None, group=None, tag=0, group_dst=None):
    enqueue("send", [tensor], lambda: real["torch.distributed.send"](tensor, dst, group), peer=dst)


def recv(tensor, src=None, group=None, tag=0, group_src=None):
    enqueue("recv", [tensor], lambda: real["torch.distributed.recv"](tensor, src, group), peer=src)


def batch_isend_irecv(p2p_op_list):
    def act():
        for work in real["torch.distributed.batch_isend_irecv"](p2p_op_list):
            work.wait()

    enqueue("batch_isend_irecv", [one.tensor for one in p2p_op_list], act, peers=[one.peer for one in p2p_op_list])
    return [types.SimpleNamespace(wait=lambda: None)]  # NCCL's wait is the stream's, not the host's


class Nccl:
    """libnccl.so.2, where it is loaded."""

    def __init__(self):
        if "COMMBENCH_TEST_RESET" not in os.environ:
            raise OSError("libnccl.so.2: cannot open shared object file")

    def ncclGetVersion(self, number):
        major, minor, patch = version()
        number._obj.value = major * 10000 + minor * 100 + patch

    @property
    def ncclResetDebugInit(self):
        def reset():
            record("reset")
            state.debug = None

        return reset


DOUBLES = {
    "torch.cuda": (
        is_available, device_count, set_device, synchronize, get_device_name, get_device_properties, mem_get_info,
        memory_reserved, memory_allocated, current_stream, set_stream, _sleep, Event, CUDAGraph, graph,
    ),
    "torch.cuda.nccl": (version,),
    "torch": (zeros, empty, add, mul),
    "torch.Tensor": (copy_, zero_),
    "torch.distributed": (
        is_nccl_available, init_process_group, new_group, all_reduce, all_gather_single, reduce_scatter_single,
        all_to_all_single, broadcast, reduce, gather, scatter, barrier, send, recv, batch_isend_irecv,
    ),
}  # fmt: skip


def owner(path):
    """The module or class that a dotted name under torch stands for."""
    found = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def install():
    """Put every double in its place."""
    for path, doubles in DOUBLES.items():
        for double in doubles:
            real[f"{path}.{double.__name__}"] = getattr(owner(path), double.__name__)
            setattr(owner(path), double.__name__, double)
    loaded = ctypes.CDLL
    ctypes.CDLL = lambda name, *args, **options: Nccl() if name == "libnccl.so.2" else loaded(name, *args, **options)
