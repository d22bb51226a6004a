from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.provenance import libraries
from commbench.provenance.env import NAMES, PREFIXES, REDACTED, collect_env, collect_nccl_conf
from commbench.provenance.git import collect_git
from commbench.provenance.libraries import collect_libraries
from commbench.provenance.sources import attempt, command

_MARKS = ("TOKEN", "Key", "SECRET", "passwd", "AUTH", "Credential")
_SECRET_NAMES = st.builds(
    lambda prefix, before, mark, after: prefix + before + mark + after,
    st.sampled_from([*PREFIXES, "", "HF_", "AWS_"]), st.text("AB_", max_size=3), st.sampled_from(_MARKS),
    st.text("AB_", max_size=3),
)  # fmt: skip
_OTHER_NAMES = st.builds(lambda prefix, rest: prefix + rest, st.sampled_from([*PREFIXES, "HOME_"]), st.text("XYZ_"))
_SECRETS = st.text("0123456789abcdef", min_size=12, max_size=40)


@given(
    st.dictionaries(_SECRET_NAMES, _SECRETS, min_size=1, max_size=5),
    st.dictionaries(_OTHER_NAMES, st.text("ghijk,:/", max_size=20), max_size=5),
    st.data(),
)
def test_no_value_of_a_secret_named_variable_is_ever_kept(
    secrets: dict[str, str], others: dict[str, str], data: st.DataObject
) -> None:
    # Some harmless variable repeats a secret, as in a URL with a password.
    if others:
        name = data.draw(st.sampled_from(sorted(others)))
        others = {**others, name: f"tcp://user:{data.draw(st.sampled_from(sorted(secrets.values())))}@host"}
    stored = json.dumps(collect_env({**others, **secrets}))
    for value in secrets.values():
        assert value not in stored


@given(st.dictionaries(st.text(min_size=1, max_size=12), st.text(max_size=12), max_size=8))
def test_only_the_allow_list_is_kept(environ: dict[str, str]) -> None:
    assert all(name in NAMES or name.startswith(PREFIXES) for name in collect_env(environ))


def test_what_is_kept_and_what_is_not() -> None:
    kept = {
        "NCCL_ALGO": "Ring", "UCX_TLS": "rc,cuda", "OMPI_MCA_btl": "self,tcp", "PRTE_MCA_rmaps": "x",
        "CUDA_VISIBLE_DEVICES": "0,1", "FI_PROVIDER": "efa", "OMP_NUM_THREADS": "1", "I_MPI_FABRICS": "shm",
        "SLURM_JOB_ID": "12", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }  # fmt: skip
    dropped = {
        "HOME": "/home/a", "USER": "a", "SLURM_JOB_USER": "a", "SLURM_JOB_ACCOUNT": "x", "HF_TOKEN": "t", "NCCLX": "1",
        "http_proxy": "http://a:b@c",
    }  # fmt: skip
    assert collect_env({**kept, **dropped}) == kept


def test_a_secret_name_is_kept_without_its_value() -> None:
    assert collect_env({"NCCL_NET_AUTH_TOKEN": "x", "UCX_KEY": "1"}) == {
        "NCCL_NET_AUTH_TOKEN": REDACTED,
        "UCX_KEY": REDACTED,
    }


def test_a_short_secret_does_not_blot_out_other_values() -> None:
    assert collect_env({"MY_KEY": "1", "NCCL_NCHANNELS_PER_NET_PEER": "16"}) == {"NCCL_NCHANNELS_PER_NET_PEER": "16"}


def test_a_long_value_is_cut() -> None:
    assert collect_env({"NCCL_TOPO": "x" * 10_000})["NCCL_TOPO"] == "x" * 2000


def test_nccl_settings_files(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# site\nNCCL_IB_HCA=mlx5\nHOME=/x\nNCCL_TOKEN=abcdefgh\nnonsense\n")
    home = tmp_path / "home/a"
    home.mkdir(parents=True)
    (home / ".nccl.conf").write_text("NCCL_DEBUG = WARN # loud\n")
    assert collect_nccl_conf(tmp_path, "/home/a") == {
        "/etc/nccl.conf": {"NCCL_IB_HCA": "mlx5", "NCCL_TOKEN": REDACTED},
        "~/.nccl.conf": {"NCCL_DEBUG": "WARN"},
    }
    assert set(collect_nccl_conf(tmp_path, None)) == {"/etc/nccl.conf"}


def test_libraries_are_never_imported_to_be_asked() -> None:
    program = (
        "import json, sys\n"
        "from commbench.provenance.libraries import collect_libraries\n"
        "print(json.dumps([collect_libraries(), sorted(m for m in ('numpy', 'torch', 'mpi4py') if m in sys.modules)]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(libraries.__file__).parents[2])},
    ).stdout  # fmt: skip
    found, imported = json.loads(out)
    assert imported == []
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert not {"numpy", "torch", "mpi4py"} & set(found)


def test_versions_of_imported_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Mpi:
        @staticmethod
        def Get_library_version() -> str:
            return "Open MPI v5.0.11, package: x\nmore\n"

    class Broken:
        @property
        def __version__(self) -> str:
            raise RuntimeError("half loaded")

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", Mpi)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy", Broken())  # type: ignore[arg-type]
    maps = "7f0-7f1 r-xp 0 0:0 1   {}\n"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(
        maps.format("/opt/lib/libnccl.so.2") * 2 + maps.format("/opt/lib/libmpi.so.40.40.11")
        + maps.format("/usr/lib/libc.so.6") + "7f2-7f3 rw-p 0 0:0 0\n" + maps.format("[heap]")
    )  # fmt: skip
    found = collect_libraries(tmp_path)
    assert found["mpi_library"] == "Open MPI v5.0.11, package: x"
    assert found["cupy"] == {"error": "RuntimeError: half loaded"}
    assert found["loaded"] == ["/opt/lib/libmpi.so.40.40.11", "/opt/lib/libnccl.so.2"]


def run_git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, timeout=30)


def test_git_of_a_checkout_clean_and_dirty(tmp_path: Path) -> None:
    package = tmp_path / "commbench"
    package.mkdir()
    (package / "__init__.py").write_text("")
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "results.txt").write_text("untracked files are no change of commbench")
    found = collect_git(package)
    assert found is not None
    assert len(found["sha"]) == 40
    assert found["dirty"] is False
    (package / "__init__.py").write_text("changed = 1\n")
    assert collect_git(package) == {"sha": found["sha"], "dirty": True}


def test_git_does_not_take_the_repository_around_an_installed_package(tmp_path: Path) -> None:
    package = tmp_path / ".venv/commbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "other.txt").write_text("")
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "add", "other.txt")
    run_git(tmp_path, "commit", "-qm", "first")
    assert collect_git(package) is None


def test_git_outside_any_repository_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_git(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "error" in (collect_git(tmp_path) or {})


def test_a_command_that_hangs_is_ended_with_its_children() -> None:
    start = time.monotonic()
    # The grandchild keeps the pipe open: killing only the shell would wait for it.
    with pytest.raises(TimeoutError, match="within 0.3 s"):
        command(["sh", "-c", "sleep 20 & wait"], timeout_s=0.3)
    assert time.monotonic() - start < 5


def test_a_failing_command_says_its_last_line() -> None:
    with pytest.raises(RuntimeError, match="sh ended with 3: went wrong"):
        command(["sh", "-c", "echo first >&2; echo went wrong >&2; exit 3"])


def test_an_attempt_turns_any_exception_into_a_value() -> None:
    assert attempt(int, "7") == 7
    assert attempt(int, "x")["error"].startswith("ValueError")
