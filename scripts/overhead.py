#!/usr/bin/env python3
"""What commbench adds to MPI: its streamed all_reduce beside a plain mpi4py loop, in turn, in the same two ranks.

    .venv/bin/python scripts/overhead.py

Prints, for each size, the median time of both over many alternating blocks and the median of the paired ratios.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

SIZES = (8, 64 << 10, 4 << 20)
BLOCKS = 200
BLOCK_S = 2e-3


def start() -> int:
    from commbench.launch.start import find_mpirun, mpirun_command, mpirun_environment

    mpirun = find_mpirun()
    if mpirun is None:
        print("overhead: no mpirun beside this Python or on PATH: pip install 'commbench[mpi]'", file=sys.stderr)
        return 2
    environment = mpirun_environment(os.environ, oversubscribed=False)
    command = [*mpirun_command(mpirun, 2, oversubscribed=False), sys.executable, __file__, "--rank"]
    return subprocess.run(command, env=environment, check=False).returncode


def compare() -> None:
    import numpy as np

    from commbench.backends.base import Context
    from commbench.backends.mpi import MPI, Mpi
    from commbench.cases import Layout, Sweep
    from commbench.measure.data import Pattern
    from commbench.measure.timed import PythonLoop, Start

    comm = MPI.COMM_WORLD
    backend = Mpi()
    backend.start(
        Context(
            rank=comm.rank,
            world=comm.size,
            local_rank=comm.rank,
            hosts=("here",) * comm.size,
            address="127.0.0.1",
            interface="lo",
            share=lambda value: value,
        )
    )
    sweep = Sweep(backends=("mpi",), collectives=("all_reduce",), sizes=SIZES, timings=("streamed",))
    begin = Start(beat=lambda phase, iteration: None, starts_ns=(0,))
    if comm.rank == 0:
        print(f"{'bytes':>9} {'plain loop':>12} {'commbench':>12} {'ratio':>7}  {'P10-P90 of the ratio':>20}")
    for case in sweep.expand(Layout(hosts=("here",) * comm.size)):
        pattern = Pattern(
            collective=case.spec, dtype=case.itemtype, op=case.reduce_op, ranks=comm.size, rank=comm.rank, root=0,
            block_elements=case.block_elements, seed=1,
        )  # fmt: skip
        operation = backend.operation(case, tuple(range(comm.size)), pattern)
        # The same memory for both: other pages alone make a difference.
        given, taken = operation.input.view(np.float32), operation.output.view(np.float32)
        for _ in range(20):
            comm.Allreduce(given, taken)
        once = time.perf_counter()
        for _ in range(20):
            comm.Allreduce(given, taken)
        count = np.array([max(2, int(BLOCK_S * 20 / (time.perf_counter() - once)))])
        comm.Bcast(count, 0)
        calls = int(count[0])
        plain, ours = [], []
        for block in range(BLOCKS):
            # A B B A: a drift of the machine favours neither.
            for mine in (True, False) if block % 2 else (False, True):
                comm.Barrier()
                if mine:
                    stamps = PythonLoop().streamed([operation], calls, 0, begin).stamps
                    ours.append((stamps[0, 1] - stamps[0, 0]) / calls / 1e9)
                else:
                    first = time.perf_counter()
                    for _ in range(calls):
                        comm.Allreduce(given, taken)
                    plain.append((time.perf_counter() - first) / calls)
        if comm.rank == 0:
            ratios = sorted(a / b for a, b in zip(ours, plain, strict=True))
            low, high = ratios[len(ratios) // 10], ratios[-len(ratios) // 10]
            print(
                f"{case.bytes:>9} {statistics.median(plain) * 1e6:>9.2f} us {statistics.median(ours) * 1e6:>9.2f} us "
                f"{statistics.median(ratios):>7.3f}  {low:>9.3f} - {high:.3f}"
            )
    backend.stop()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        compare()
    else:
        sys.exit(start())
