"""What libraries say of themselves: NCCL's log of a rank, and which file MPI was loaded from."""

from __future__ import annotations

from pathlib import Path

import pytest

from commbench.provenance.mpi_variables import MpiVariables, find_mpi_library
from commbench.provenance.nccl_choices import NcclLogFile, read_choices


def choice(size: int, algorithm: str = "RING") -> str:
    return f"node:1:2 [0] NCCL INFO AllReduce: {size} Bytes -> Algo {algorithm} proto LL channel{{Lo..Hi}}={{0..3}}\n"


def test_a_log_tells_each_choice_once() -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "NET", "NCCL_DEBUG_FILE": "/mine"}
    log = NcclLogFile(environment)
    path = Path(environment["NCCL_DEBUG_FILE"])
    assert environment == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "NET,TUNING", "NCCL_DEBUG_FILE": str(path)}
    assert path.parent.stat().st_mode & 0o077 == 0
    assert log.choices() == []
    with path.open("a") as file:
        file.write(choice(8) + "node:1:2 [0] NCCL INFO something else\n")
    assert [(one.logged_bytes, one.algorithm) for one in log.choices()] == [(8, "Ring")]
    with path.open("a") as file:
        file.write(choice(16, "TREE"))
    assert [(one.logged_bytes, one.algorithm) for one in log.choices()] == [(16, "Tree")]
    assert log.choices() == []
    log.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(("debug", "subsystems"), [("TRACE", "ALL"), ("trace", "all")])
def test_a_log_that_tells_more_is_left_so(debug: str, subsystems: str) -> None:
    environment = {"NCCL_DEBUG": debug, "NCCL_DEBUG_SUBSYS": subsystems}
    NcclLogFile(environment).close()
    assert (environment["NCCL_DEBUG"], environment["NCCL_DEBUG_SUBSYS"]) == (debug, subsystems)


def test_unknown_algorithms_are_no_choices() -> None:
    assert read_choices([choice(8, "HYPERCUBE"), choice(8, "9"), choice(8, "1")])[0].algorithm == "Ring"
    assert len(read_choices([choice(8, "HYPERCUBE"), choice(8, "9"), choice(8, "1")])) == 1


def test_the_mpi_library_is_that_of_the_process(tmp_path: Path) -> None:
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/libmpi_mpifh.so.40\n7f02-7f03 rw-p 00000000 00:00 0\n")
    assert find_mpi_library(tmp_path) is None
    with maps.open("a") as file:
        file.write("7f04-7f05 r-xp 00000000 08:01 12 /opt/open mpi/lib/libmpi.so.40.40.7\n")
    assert find_mpi_library(tmp_path) == "/opt/open mpi/lib/libmpi.so.40.40.7"


def test_a_library_that_cannot_be_asked_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        MpiVariables(str(tmp_path / "libmpi.so.40"))
