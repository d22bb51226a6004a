"""The machine under a rank: processor, memory, kernel settings that change timings, container limits.

Everything is read from /proc, /sys and /etc (proc(5), the kernel's admin-guide and ABI/testing documents).
"""

from __future__ import annotations

import os
import re
import resource
from collections import Counter
from pathlib import Path
from typing import Any

from commbench.provenance.sources import ROOT, attempt, digest, link_name, names, read, read_int

# Of the kernel's command line only what changes timing or device access: the rest may hold addresses or secrets.
_CMDLINE = re.compile(
    r"^(iommu|intel_iommu|amd_iommu|pci|pcie_aspm|isolcpus|nohz_full|rcu_nocbs|mitigations|nosmt|idle|intel_idle\.\S+"
    r"|processor\.max_cstate|intel_pstate|amd_pstate|numa_balancing|hugepages|hugepagesz|default_hugepagesz"
    r"|transparent_hugepage|clocksource|tsc|nvme\S*|nvidia\S*)(=\S*)?$"
)
_MEMINFO = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "HugePages_Total", "HugePages_Free", "Shmem")


def collect_host(root: Path = ROOT) -> dict[str, Any]:
    """One dictionary of the machine; bytes in ``*_bytes``, frequencies in ``*_Hz``; None is not known.

    A part that fails is ``{"error": ...}``; nothing is raised.
    """
    return {
        "hostname": read(root, "proc/sys/kernel/hostname"),
        "machine_id": digest(read(root, "etc/machine-id")),
        "boot_id": digest(read(root, "proc/sys/kernel/random/boot_id")),
        "kernel": read(root, "proc/sys/kernel/osrelease"),
        "kernel_options": attempt(_kernel_options, root),
        "distribution": attempt(_distribution, root),
        "product": attempt(_product, root),
        "cpu": attempt(_cpu, root),
        "numa": attempt(_numa, root),
        "memory": attempt(_memory, root),
        "limits": attempt(_limits),
        "container": attempt(_container, root),
        "clocksource": read(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "transparent_hugepages": attempt(_chosen, root, "sys/kernel/mm/transparent_hugepage/enabled"),
        "numa_balancing": read_int(root, "proc/sys/kernel/numa_balancing"),
        "nvidia_driver": attempt(_nvidia_driver, root),
        "load": attempt(collect_load, root),
    }


def collect_load(root: Path = ROOT) -> dict[str, Any]:
    """What changes during a run: load averages, available memory, free shared memory."""
    averages = (read(root, "proc/loadavg") or "").split()
    return {
        "loadavg_1_5_15": [float(value) for value in averages[:3]] or None,
        "runnable": int(averages[3].partition("/")[0]) if len(averages) > 3 else None,
        "available_bytes": _meminfo(root).get("MemAvailable"),
        "shm": attempt(_filesystem, root / "dev/shm"),
    }


def _kernel_options(root: Path) -> list[str]:
    return [word for word in (read(root, "proc/cmdline") or "").split() if _CMDLINE.match(word)]


def _distribution(root: Path) -> str | None:
    lines = (read(root, "etc/os-release") or "").splitlines()
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("PRETTY_NAME", "").strip("\"'") or None


def _product(root: Path) -> dict[str, str | None]:
    return {name: read(root, f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name", "bios_version")}


def _cpu(root: Path) -> dict[str, Any]:
    info = read(root, "proc/cpuinfo") or ""
    fields: dict[str, list[str]] = {}
    for line in info.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), []).append(value.strip())
    base = "sys/devices/system/cpu"
    cpus = [name for name in names(root, base) if re.fullmatch(r"cpu\d+", name)]
    governors = Counter(read(root, f"{base}/{cpu}/cpufreq/scaling_governor") or "none" for cpu in cpus)
    maximum_khz = read_int(root, f"{base}/cpu0/cpufreq/cpuinfo_max_freq")
    status = read(root, "proc/self/status") or ""
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return {
        "model": next(iter(fields.get("model name", fields.get("CPU implementer", []))), None),
        "logical": len(fields.get("processor", [])) or None,
        "sockets": len(set(fields.get("physical id", []))) or None,
        "online": read(root, f"{base}/online"),
        "allowed": allowed[1] if allowed else None,
        "governors": dict(governors),
        "driver": read(root, f"{base}/cpu0/cpufreq/scaling_driver"),
        "max_Hz": None if maximum_khz is None else maximum_khz * 1000,
        "smt": {"0": False, "1": True}.get(read(root, f"{base}/smt/active") or ""),
        "microcode": next(iter(fields.get("microcode", [])), None),
        "hypervisor": "hypervisor" in " ".join(fields.get("flags", [])[:1]).split(),
    }


def _numa(root: Path) -> dict[str, str | None]:
    base = "sys/devices/system/node"
    nodes = sorted((n for n in names(root, base) if re.fullmatch(r"node\d+", n)), key=lambda n: int(n[4:]))
    return {node: read(root, f"{base}/{node}/cpulist") for node in nodes}


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in (read(root, "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if key in _MEMINFO and words:
            found[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _memory(root: Path) -> dict[str, int | None]:
    info = _meminfo(root)
    return {
        "total_bytes": info.get("MemTotal"),
        "swap_bytes": info.get("SwapTotal"),
        "swap_free_bytes": info.get("SwapFree"),
        "hugepages": info.get("HugePages_Total"),
        "hugepages_free": info.get("HugePages_Free"),
        "shmem_bytes": info.get("Shmem"),
    }


def _limits() -> dict[str, int | None]:
    """This process's soft limits that communication libraries run into; None is unlimited."""
    kinds = {"locked_bytes": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _filesystem(path: Path) -> dict[str, int]:
    stat = os.statvfs(path)
    return {"total_bytes": stat.f_blocks * stat.f_frsize, "free_bytes": stat.f_bavail * stat.f_frsize}


def _container(root: Path) -> dict[str, Any]:
    """Signs of a container, and the tightest limits of the control groups that this process is in."""
    signs = [path for path in (".dockerenv", "run/.containerenv", ".singularity.d") if (root / path).exists()]
    groups = _control_groups(root)
    quotas = [quota for group in groups if (quota := _cpu_quota(root, group)) is not None]
    # A cgroup without a limit says "max" in version 2, and a number near 2**63 in version 1.
    limits = [read_int(root, f"{group}/{name}") for group in groups for name in ("memory.max", "memory.limit_in_bytes")]
    return {
        "signs": signs,
        "cpu_quota": min(quotas, default=None),
        "memory_limit_bytes": min((limit for limit in limits if limit and limit < 1 << 60), default=None),
        "namespaces": {name: link_name(root, f"proc/self/ns/{name}") for name in ("net", "pid", "uts")},
    }


def _control_groups(root: Path) -> list[str]:
    """The directories of this process's groups and of all above them, which limit it too."""
    found = []
    for line in (read(root, "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part and part != ".."]
        mount = "sys/fs/cgroup" + (f"/{controllers}" if controllers else "")
        found += ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return found


def _cpu_quota(root: Path, group: str) -> float | None:
    """Processors' worth of time that a group may use (cgroup v2's cpu.max, else v1's quota and period)."""
    match = re.fullmatch(r"(\d+) (\d+)", read(root, f"{group}/cpu.max") or "")
    if match:
        return int(match[1]) / int(match[2])
    quota, period = read_int(root, f"{group}/cpu.cfs_quota_us"), read_int(root, f"{group}/cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _chosen(root: Path, path: str) -> str | None:
    """The bracketed word of a sysfs choice such as ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", read(root, path) or "")
    return match[1] if match else None


def _nvidia_driver(root: Path) -> str | None:
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", read(root, "proc/driver/nvidia/version") or "")
    return match[1] if match else None
