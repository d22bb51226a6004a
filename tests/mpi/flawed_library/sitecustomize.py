"""torch.distributed with a flaw: what a data check must be able to see. Loaded by Python itself in every rank.

COMMBENCH_TEST_FLAW: ``flip`` one element of one operation's output, ``nothing`` is done, ``swap`` two blocks, ``late``: one
bit of what an exchange that was started has brought, each time, at rank 1.
"""

import importlib.abc
import importlib.machinery
import os
import sys

FLAW = os.environ.get("COMMBENCH_TEST_FLAW", "")
ITERATION = 20  # which timed iteration is flawed, where only one is
LARGE_BYTES = 1024
NAMES = ("all_reduce", "all_gather_single", "all_to_all_single", "broadcast")


class Late:
    """A started operation that errs when it is waited for."""

    def __init__(self, work, tensor):
        self.work, self.tensor = work, tensor

    def wait(self):
        result = self.work.wait()
        self.tensor[self.tensor.numel() // 2] ^= 0x10
        return result


def flaw(name, real, module):
    def wrapped(tensor, *arguments, **options):
        if FLAW == "late":
            result = real(tensor, *arguments, **options)
            # What announces sizes is short, and with a wrong one nothing would come to its end.
            large = options.get("async_op") and tensor.numel() > LARGE_BYTES
            return Late(result, tensor) if large and module.get_rank() == 1 else result
        if FLAW == "nothing":
            return None
        result = real(tensor, *arguments, **options)
        if module.get_rank() == 1 and tensor.numel():
            if FLAW == "flip" and timed_iteration() == ITERATION:
                tensor[tensor.numel() // 3] += 1
            elif FLAW == "swap":
                half = tensor.numel() // 2
                first = tensor[:half].clone()
                tensor[:half] = tensor[half : 2 * half]
                tensor[half : 2 * half] = first
        return result

    return wrapped


def timed_iteration():
    """The iteration that rank 1's heartbeat names, None outside timed code."""
    from commbench.launch.heartbeat import read_beats

    beat = read_beats(os.environ["COMMBENCH_PAGES"])[1]
    return beat.iteration if beat.phase == "inside" else None


class Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        for name in NAMES:
            if hasattr(module, name):
                setattr(module, name, flaw(name, getattr(module, name), module))


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.distributed" or not FLAW:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
