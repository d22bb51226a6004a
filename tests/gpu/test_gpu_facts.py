"""GPU facts on real GPUs: that the driver answers, and that its answers are of the right size."""

from __future__ import annotations

import json
import time

import torch

from commbench.provenance.gpu import collect_gpus
from commbench.provenance.gpu_taint import GpuWatch, degraded
from commbench.provenance.gpu_topology import collect_topology


def busy(seconds: float) -> None:
    matrix = torch.rand(4096, 4096, device="cuda", dtype=torch.float16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()


def test_every_gpu_tells_what_it_is() -> None:
    found = collect_gpus()
    assert found is not None
    json.dumps(found, allow_nan=False)
    assert len(found["devices"]) >= torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in [gpu["name"] for gpu in found["devices"]]
    for gpu in found["devices"]:
        assert 1e8 < gpu["sm_clock_max_Hz"] < 1e10, gpu
        assert 5 < gpu["power_W"] < 3000, gpu
        assert 5 < gpu["temperature_C"] < 120, gpu
        assert gpu["pcie"]["width"] in (1, 2, 4, 8, 16, 32), gpu
        assert isinstance(gpu["state"]["reasons"], list), gpu
        assert "error" not in json.dumps(gpu), gpu


def test_the_watch_finds_torchs_device_and_is_quick() -> None:
    properties = torch.cuda.get_device_properties(0)
    watch = GpuWatch(str(properties.uuid))
    assert watch.why_not is None
    assert watch.identity in [gpu["uuid"] for gpu in (collect_gpus() or {})["devices"]]
    watch.state()
    start = time.perf_counter()
    before = watch.state()
    took = time.perf_counter() - start
    print(f"a state takes {1e3 * took:.1f} ms: {before}")
    assert took < 0.2
    busy(0.5)
    print("taint of half a second of products:", watch.taint(before))
    watch.close()


def test_times_of_throttling_are_nanoseconds() -> None:
    """No reason holds for longer than the time that passes: in another unit the share could not be told."""
    watch = GpuWatch(str(torch.cuda.get_device_properties(0).uuid))
    before = watch.state()
    busy(1.0)
    after = watch.state()
    assert before is not None
    assert after is not None
    assert after["throttled_ns"], "the driver has no such counters"
    elapsed_ns = 1e9 * (after["monotonic_s"] - before["monotonic_s"])
    for name, ns in after["throttled_ns"].items():
        print(name, (ns - before["throttled_ns"][name]) / elapsed_ns)
        assert 0 <= ns - before["throttled_ns"][name] <= 1.2 * elapsed_ns, name
    watch.close()


def test_a_quiet_host_is_not_degraded() -> None:
    before = {"gpus": collect_gpus()}
    after = {"gpus": collect_gpus()}
    used = {gpu["uuid"] for gpu in before["gpus"]["devices"]}  # type: ignore[index]
    assert [line for line in degraded(before, after, used) if "driver" in line or "NVLink" in line] == []


def test_topology_has_every_gpu() -> None:
    found = collect_topology()
    assert found is not None
    print(json.dumps(found))
    count = len(found["pci"])
    assert count >= torch.cuda.device_count()
    for matrix in (*found["peer_access"].values(), found["ancestors"], found["nvlinks"]):
        assert [len(row) for row in matrix] == [count] * count
    # nvidia-smi and this must not contradict each other about pairs that torch can reach.
    if torch.cuda.device_count() > 1 and count == torch.cuda.device_count():
        assert (found["peer_access"]["read"][0][1] == "ok") == torch.cuda.can_device_access_peer(0, 1)
