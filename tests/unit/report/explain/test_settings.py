from __future__ import annotations

import pytest

from commbench.report.explain.settings import forced_algorithm, forced_protocol, no_rdma, no_shared_memory

LAB = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "UCX_TLS": "self,tcp", "FI_PROVIDER": "tcp"}


@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("mpi", {}, None),
        ("mpi", {"OMPI_MCA_btl": "self,tcp"}, "OMPI_MCA_btl=self,tcp"),
        ("mpi", {"OMPI_MCA_btl": "tcp,vader,self"}, None),
        ("mpi", {"OMPI_MCA_btl": "^sm"}, "OMPI_MCA_btl=^sm"),
        ("mpi", {"OMPI_MCA_btl": "^openib"}, None),
        ("mpi", {"OMPI_MCA_pml": "ob1", "UCX_TLS": "tcp"}, None),  # which ob1 does not read
        ("mpi", {"OMPI_MCA_pml": "ucx", "UCX_TLS": "tcp"}, "UCX_TLS=tcp"),
        ("mpi", {"OMPI_MCA_pml": "ucx", "OMPI_MCA_btl": "self,tcp"}, None),
        ("mpi", {"OMPI_MCA_pml": "ucx", "UCX_TLS": "rc,sm"}, None),
        ("mpi", {"OMPI_MCA_pml": "ucx", "UCX_TLS": "^shm"}, "UCX_TLS=^shm"),
        ("mpi", {"OMPI_MCA_pml": "ucx", "UCX_TLS": "^posix"}, None),  # others are left
        ("mpi", {"OMPI_MCA_pml": "cm", "FI_PROVIDER": "tcp"}, "FI_PROVIDER=tcp"),
        ("mpi", {"I_MPI_FABRICS": "ofi"}, "I_MPI_FABRICS=ofi"),
        ("mpi", {"I_MPI_FABRICS": "shm:ofi"}, None),
        ("mpi", LAB, None),
        ("nccl", {"NCCL_SHM_DISABLE": "1"}, "NCCL_SHM_DISABLE=1"),
        ("nccl_raw", {"NCCL_SHM_DISABLE": "1"}, "NCCL_SHM_DISABLE=1"),
        ("nccl", {"NCCL_SHM_DISABLE": "0"}, None),
        ("nccl", {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        ("gloo", {"OMPI_MCA_btl": "self,tcp"}, None),
    ],
)
def test_what_keeps_ranks_from_shared_memory(backend: str, settings: dict[str, str], expected: str | None) -> None:
    assert no_shared_memory(backend, settings) == expected


@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("mpi", {}, None),
        ("mpi", LAB, "OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp"),
        ("mpi", {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,ofi"}, None),
        ("mpi", {"OMPI_MCA_pml": "ucx"}, None),
        ("mpi", {"OMPI_MCA_pml": "ucx", "UCX_TLS": "tcp,sm"}, "UCX_TLS=tcp,sm"),
        ("mpi", {"UCX_TLS": "rc_x,sm"}, None),
        ("mpi", {"UCX_TLS": "all"}, None),
        ("mpi", {"UCX_TLS": "^ib"}, "UCX_TLS=^ib"),
        ("mpi", {"UCX_TLS": "^dc"}, None),
        ("mpi", {"I_MPI_OFI_PROVIDER": "tcp"}, "I_MPI_OFI_PROVIDER=tcp"),
        ("nccl", {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"),
        ("nccl", {"NCCL_NET": "Socket"}, "NCCL_NET=Socket"),
        ("nccl", {"NCCL_NET": "IB"}, None),
    ],
)
def test_what_keeps_messages_from_rdma(backend: str, settings: dict[str, str], expected: str | None) -> None:
    assert no_rdma(backend, settings) == expected


TUNED = "OMPI_MCA_coll_tuned_"
ON = {f"{TUNED}use_dynamic_rules": "1"}


@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("mpi", ON | {f"{TUNED}allreduce_algorithm": "3"}, f"{TUNED}allreduce_algorithm=3"),
        ("mpi", ON | {f"{TUNED}allreduce_algorithm": "0"}, None),  # 0 leaves the choice
        ("mpi", {f"{TUNED}allreduce_algorithm": "3"}, None),  # not read without dynamic rules
        ("mpi", ON | {f"{TUNED}allgather_algorithm": "3"}, None),
        ("mpi", ON | {f"{TUNED}dynamic_rules_filename": "rules"}, f"{TUNED}dynamic_rules_filename=rules"),
        ("mpi", {"OMPI_MCA_coll": "^tuned"}, "OMPI_MCA_coll=^tuned"),
        ("mpi", {"OMPI_MCA_coll": "basic,libnbc"}, "OMPI_MCA_coll=basic,libnbc"),
        ("mpi", {"OMPI_MCA_coll": "^han"}, None),
        ("mpi", {"I_MPI_ADJUST_ALLREDUCE": "7"}, "I_MPI_ADJUST_ALLREDUCE=7"),
        ("nccl", {"NCCL_ALGO": "Tree"}, "NCCL_ALGO=Tree"),
        ("nccl", {"NCCL_ALGO": "^Tree"}, None),
        ("gloo", {"NCCL_ALGO": "Tree"}, None),
    ],
)
def test_what_forces_an_algorithm_of_all_reduce(backend: str, settings: dict[str, str], expected: str | None) -> None:
    assert forced_algorithm(backend, "all_reduce", settings) == expected


@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("nccl", {"NCCL_PROTO": "LL"}, "NCCL_PROTO=LL"),
        ("nccl", {"NCCL_PROTO": "^LL128"}, None),
        ("nccl", {}, None),
        ("mpi", {"UCX_RNDV_THRESH": "inf"}, "UCX_RNDV_THRESH=inf"),
        ("mpi", {"UCX_RNDV_THRESH": "inf", "OMPI_MCA_pml": "ob1"}, None),
        ("mpi", {"UCX_RNDV_THRESH": "auto"}, None),
    ],
)
def test_what_forces_a_protocol(backend: str, settings: dict[str, str], expected: str | None) -> None:
    assert forced_protocol(backend, settings) == expected
