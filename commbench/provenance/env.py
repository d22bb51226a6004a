"""The environment variables that steer communication libraries: an allow-list by prefix, redacted by name.

Nothing else of the environment is ever kept. docs/provenance.md tells users so: keep it true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from commbench.provenance.sources import ROOT, read

PREFIXES = (
    "NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "UCC_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "MPICH_", "I_MPI_",
    "FI_", "MV2_", "NVSHMEM_", "CUDA_", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_", "GOMP_", "KMP_",
)  # fmt: skip
# Of Slurm only what places the ranks: its other variables name users, accounts and paths.
NAMES = frozenset(
    {
        "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NTASKS",
        "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_MPI_TYPE",
        "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_GPUS_ON_NODE", "SLURM_TOPOLOGY_ADDR",
    }
)  # fmt: skip
REDACTED = "(redacted)"
MAX_VALUE = 2000
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
# A shorter one ("1", "true") would blot out values that have nothing to do with it.
_TELLING_LENGTH = 6


def collect_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are kept, by name. A value is ``(redacted)`` where the name says that it is a secret, and
    where it contains the value of any variable whose name does."""
    secrets = [v for name, v in environ.items() if _SECRET.search(name) and len(v) >= _TELLING_LENGTH]
    kept = {name: environ[name] for name in sorted(environ) if name in NAMES or name.startswith(PREFIXES)}
    return {name: _shown(name, value, secrets) for name, value in kept.items()}


def collect_nccl_conf(root: Path = ROOT, home: str | None = None) -> dict[str, dict[str, str]]:
    """NCCL's settings files by path: /etc/nccl.conf and ``home``/.nccl.conf, under the same rules as the environment.

    The format is NAME=VALUE a line, ``#`` a comment (NCCL user guide, "Environment Variables").
    """
    found = {}
    for shown, path in (("/etc/nccl.conf", "etc/nccl.conf"), ("~/.nccl.conf", f"{home}/.nccl.conf".lstrip("/"))):
        text = read(root, path) if home or not shown.startswith("~") else None
        if text is not None:
            lines = [line.split("#", 1)[0].partition("=") for line in text.splitlines()]
            found[shown] = collect_env({name.strip(): value.strip() for name, equals, value in lines if equals})
    return found


def _shown(name: str, value: str, secrets: list[str]) -> str:
    if _SECRET.search(name) or any(secret in value for secret in secrets):
        return REDACTED
    return value[:MAX_VALUE]
