"""Whatever a user gets wrong ends with one line that says what to do, exit code 2, and no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commbench.cli import options
from commbench.cli.main import main
from commbench.launch import runnable

ROOT = Path(__file__).parents[3]
OF_LAUNCHERS = ("COMMBENCH", "OMPI", "PMI", "MPI", "SLURM", "TORCHELASTIC", "PALS", "FLUX", "JSM", "MV2", "HYDI")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(OF_LAUNCHERS) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["commbench", *arguments])
        code = main()
        out, err = capsys.readouterr()
        return code, out, err

    return run


def complaint(found: tuple[int, str, str]) -> str:
    """The one line, without its beginning."""
    code, out, err = found
    assert code == 2, err
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("commbench: error: ")
    return line.removeprefix("commbench: error: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--collective", "allreduce"), "--collective: unknown collective 'allreduce': did you mean 'all_reduce'?"),
        (("--sizes", "64M:8"), "--sizes: size range '64M:8' ends below its start"),
        (("--ranks", "0"), "--ranks: 0 is too small"),
        (("--group", "pair:0-2"), "group 'pair:0-2' is outside the world: ranks are 0 to 1"),
        (("--group", "pair:1-1"), "--group: group 'pair:1-1' names one rank twice"),
        (("--collective", "broadcast", "--root", "2"), "root 2 is outside the world: ranks are 0 to 1"),
        (("--nodes", "2"), "--nodes 2 needs a launcher: without one every rank is on this host"),
        (("--launcher", "slrum"), "unknown launcher 'slrum': did you mean 'slurm'?"),
        (("--launcher", "torchrun"), "torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, LOCAL_WORLD_SIZE missing"),
        (("--collectve", "all_reduce"), "No such option: --collectve (Possible options: --collective)"),
        (("--ranks",), "Option '--ranks' requires an argument."),
        (("absent.toml",), "cannot read sweep file absent.toml (No such file or directory)"),
        (("a.toml", "b.toml"), "Got unexpected extra argument(s) (b.toml)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_what_run_is_told_wrongly(
    command: Command, arguments: tuple[str, ...], line: str, dry: tuple[str, ...]
) -> None:
    assert complaint(command("run", "--backend", "gloo", *dry, *arguments)).startswith(line)
    assert not Path("results").exists()


def test_an_unknown_command(command: Command) -> None:
    assert complaint(command("rnu")) == "No such command 'rnu'. Did you mean 'run'?"


def test_a_directory_without_a_run(command: Command, tmp_path: Path) -> None:
    assert complaint(command("show")) == "'results' holds no runs: commbench run makes one"
    assert complaint(command("show", str(tmp_path))).startswith(f"no run below 'results' is called {str(tmp_path)!r}")


def test_results_that_cannot_be_written(command: Command) -> None:
    # A regular file where a directory is needed stops even root.
    Path("file").write_text("")
    line = complaint(command("run", "--backend", "gloo", "--out", "file/results"))
    assert line == "cannot write results under file/results (Not a directory): choose another place with --out"


def test_no_mpirun(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(runnable, "find_mpirun", lambda: None)
    line = complaint(command("run", "--backend", "mpi"))
    assert line.startswith("backend 'mpi' needs mpirun to start its ranks and there is none beside ")
    assert line.endswith("start commbench under the cluster's mpirun or srun, or ask for --backend gloo")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "env: RANK and WORLD_SIZE set without MASTER_ADDR, MASTER_PORT: unset"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "slurm: SLURM_STEP_ID is set but SLURM_STEP_NUM_TASKS, "),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "openmpi: OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE, "),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun: TORCHELASTIC_RUN_ID is set but RANK, WORLD_SIZE, "),
    ],
)
def test_half_a_launcher(
    command: Command, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert complaint(command("run", "--backend", "gloo")).startswith(line)
    assert command("run", "--backend", "gloo", "--launcher", "none", "--dry-run")[0] == 0


@pytest.fixture
def under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


@pytest.mark.usefixtures("under_mpirun")
def test_options_that_a_launcher_has_decided(command: Command) -> None:
    assert complaint(command("run", "--backend", "gloo", "--ranks", "3")) == (
        "--ranks 3 does not fit the 2 ranks that openmpi started: leave it out"
    )
    sets = ("--collective", "all_reduce", "--backend", "mpi")
    for option in (
        ("--launches", "2"), ("--launches", "auto:5%"), ("--variant", "a:NCCL_ALGO=Ring"),
        ("--variants", "ompi-allreduce"), ("--bind", "core"),
    ):  # fmt: skip
        assert complaint(command("run", *sets, *option)) == (
            f"{option[0]} needs commbench to start the ranks itself; openmpi already did"
        )


@pytest.mark.parametrize("port", ["none", "0", "70000"])
def test_a_rendezvous_that_is_no_port(command: Command, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    code, out, err = command("run", "--backend", "gloo")
    warning, line = err.splitlines()
    assert (code, out) == (2, "")
    assert warning.startswith("commbench: warning: rank taken from RANK and WORLD_SIZE")
    assert line == f"commbench: error: MASTER_PORT={port!r} is not a port: set it to a number from 1 to 65535"


def test_a_start_up_limit_that_is_no_duration(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_STARTUP", "soon")
    assert complaint(command("run", "--backend", "gloo")).startswith("COMMBENCH_STARTUP: 'soon' is not a duration")
    assert not Path("results").exists()


def test_ctrl_c_before_anything_runs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "read_options", interrupt)
    assert command("run") == (3, "", "commbench: interrupted\n")


# -- what is not an error ---------------------------------------------------------------------------


def test_dry_run_lists_the_cases_and_says_what_was_rounded(command: Command) -> None:
    code, out, err = command(
        "run", "--dry-run", "--backend", "gloo", "--collective", "all_reduce,all_gather", "--sizes", "10,100",
        "--ranks", "3", "--timing", "isolated",
    )  # fmt: skip
    assert (code, err) == (0, "4 cases\n")
    identifiers, cases = zip(*(line.split("  ", 1) for line in out.splitlines()), strict=True)
    assert len({name for name in identifiers if re.fullmatch("[0-9a-f]{12}", name)}) == 4
    too_small = "10 B is less than one float32 a rank for 3 ranks"
    # 100 B are 25 float32: 8 for each of 3 ranks, 32 B, which is whole 16 B.
    assert cases == (
        "gloo all_reduce 8 B float32 sum out isolated (asked for 10 B)",
        "gloo all_reduce 100 B float32 sum out isolated",
        f"gloo all_gather 0 B float32 out isolated (asked for 10 B)  skipped: {too_small}",
        "gloo all_gather 96 B float32 out isolated (asked for 100 B)",
    )


def test_dry_run_takes_the_ranks_from_the_launcher(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "3"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    code, out, _ = command("run", "--dry-run", "--backend", "gloo", "--collective", "barrier", "--group", "pair:0-2")
    assert code == 0
    assert len(out.splitlines()) == 2


def test_dry_run_lists_the_launches_too(command: Command) -> None:
    sweep = ("--backend", "gloo,mpi", "--collective", "barrier", "--timing", "streamed")
    code, out, err = command("run", "--dry-run", *sweep, "--launches", "2")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err.splitlines() == [
        "2 cases", "launch 1: gloo, 1 cases", "launch 2: mpi, 1 cases", "launch 3: mpi, 1 cases",
        "launch 4: gloo, 1 cases",
    ]  # fmt: skip
    _, _, err = command("run", "--dry-run", "--backend", "gloo", *sweep[2:], "--variant", "a:GLOO_SOCKET_IFNAME=lo")
    assert err.splitlines()[1:] == [
        "launch 1: gloo, variant default, 1 cases", "launch 2: gloo, variant a, 1 cases"
    ]  # fmt: skip
    _, _, err = command("run", "--dry-run", "--backend", "gloo", *sweep[2:], "--launches", "auto:5%:30")
    assert (len(err.splitlines()), err.splitlines()[-1]) == (
        8, "then on, until intervals are within 0.05; at most 30 launches"
    )  # fmt: skip


def test_the_sets_of_variants_are_listed(command: Command) -> None:
    code, out, err = command("run", "--variants", "list")
    assert (code, err) == (0, "")
    assert "  tcp: OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp" in out.splitlines()
    heads = [line.partition(":")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert heads == [
        "p2p-paths (nccl or nccl_raw)", "nccl-algorithms (nccl or nccl_raw, all_reduce alone)",
        "ompi-allreduce (mpi, all_reduce alone)", "ompi-transports (mpi)", "ucx-transports (mpi)",
    ]  # fmt: skip


def test_a_variant_and_a_forced_algorithm_that_set_the_same(command: Command) -> None:
    line = complaint(
        command("run", "--backend", "mpi", "--collective", "all_reduce", "--algorithm", "ring", "--variant",
                "a:OMPI_MCA_coll_tuned_allreduce_algorithm=3")
    )  # fmt: skip
    assert line == (
        "variant 'a' sets OMPI_MCA_coll_tuned_allreduce_algorithm, and so does --algorithm ring: leave one out"
    )


def test_more_ranks_than_cores_to_bind_them_to(command: Command) -> None:
    cores = len(os.sched_getaffinity(0))
    line = complaint(command("run", "--backend", "gloo", "--bind", "core", "--ranks", str(cores + 1)))
    assert line == (
        f"--bind core needs a core for each of {cores + 1} ranks and this command may use {cores}: "
        "ask for fewer ranks, or for --bind numa"
    )


def test_help_names_every_option(command: Command) -> None:
    code, out, err = command("run", "--help")
    assert (code, err) == (0, "")
    for option in (
        "backend", "collective", "sizes", "dtype", "op", "placement", "group", "root", "timing", "precision",
        "max-time", "budget", "ranks", "nodes", "launches", "cache", "iters", "for", "deadline", "seed", "out",
        "label", "launcher", "dry-run", "variant", "variants", "spread", "bind",
    ):  # fmt: skip
        assert re.search(rf"^  --{option}\b", out, re.MULTILINE), option
    for option in options.RunOptions.model_fields:
        assert f"--{option.replace('_', '-').replace('soak', 'for')} " in out


def test_help_without_a_command_names_the_commands(command: Command) -> None:
    assert command()[:2] == command("--help")[:2]
    code, out, _ = command("--help")
    assert code == 0
    for name in ("run", "show", "doctor"):
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE)


# -- as a process of its own ------------------------------------------------------------------------


def process(python: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    done = subprocess.run(
        [python, "-m", "commbench", *arguments], check=False, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_nccl_without_a_gpu() -> None:
    line = complaint(process(sys.executable, "run", "--backend", "nccl", CUDA_VISIBLE_DEVICES=""))
    assert line.startswith("backend 'nccl': ")
    assert ": run it on a machine with a GPU" in line or "install a CUDA build of torch" in line


def test_a_python_without_an_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    line = complaint(process(str(python), "run", "--backend", "mpi", PATH=str(python.parent)))
    assert line.startswith("backend 'mpi' needs mpirun to start its ranks and there is none beside ")


def test_more_ranks_than_memory(command: Command) -> None:
    line = complaint(command("run", "--backend", "gloo", "--ranks", "100000000"))
    assert line.startswith("100000000 ranks need about 15000000 GB on this host and ")
    assert line.endswith("is available: ask for fewer with --ranks")
