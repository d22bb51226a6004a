from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.launch.place import FAMILIES, LAUNCHERS, LaunchError, detect

# One process of each launcher, rank 5 of 8, local rank 1 of 4. Open MPI 5.0.11, MPICH 5.0.2 and Slurm 22.05 as they
# printed them; the others after their documentation.
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5", "PRTE_LAUNCHED": "1", "PMIX_NAMESPACE": "prterun-n1-46@1",
}  # fmt: skip
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
PALS = {
    "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "8", "PMI_RANK": "5", "PALS_LOCAL_SIZE": "4",
    "PALS_APID": "a-1", "PALS_NODEID": "1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9", "HYDI_CONTROL_FD": "7", "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f1", "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "5", "PMI_SIZE": "8",
}  # fmt: skip
JSM = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4", "LSB_JOBID": "77",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[01-02]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURMD_NODENAME": "n02",
}  # fmt: skip
ENV = {
    "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}  # fmt: skip
BY_PRECEDENCE = {
    "torchrun": TORCHRUN, "openmpi": OPENMPI, "mvapich2": MVAPICH2, "pals": PALS, "hydra": HYDRA, "flux": FLUX,
    "jsm": JSM, "slurm": SLURM, "env": ENV,
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "3,1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1",
}  # fmt: skip


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in names}


def refusal(environ: dict[str, str], launcher: str | None = None) -> str:
    """The one line with which the environment is refused."""
    with pytest.raises(LaunchError) as caught:
        detect(environ, launcher)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", BY_PRECEDENCE)
def test_every_family_is_recognised(name: str) -> None:
    place = detect(BY_PRECEDENCE[name])
    assert place is not None
    assert (place.launcher, place.rank, place.world, place.local_rank) == (name, 5, 8, 1)
    assert place.local_world == (None if name == "flux" else 4)


def test_the_table_holds_the_documented_precedence() -> None:
    assert [family.name for family in FAMILIES] == list(BY_PRECEDENCE)[:-1]
    assert LAUNCHERS == (*BY_PRECEDENCE, "none")


@pytest.mark.parametrize("index", range(len(BY_PRECEDENCE) - 1))
def test_an_earlier_family_wins_whole_over_all_later_ones(index: int) -> None:
    names = list(BY_PRECEDENCE)
    environ: dict[str, str] = {}
    for later in names[index + 1 :]:
        # The later ones speak of another process: rank 0 of 2.
        environ |= {
            key: {"5": "0", "8": "2", "1": "0", "4": "2", "4(x2)": "2"}.get(value, value)
            for key, value in BY_PRECEDENCE[later].items()
        }
    place = detect({**environ, **BY_PRECEDENCE[names[index]]})
    assert place is not None
    assert (place.launcher, place.rank, place.world, place.local_rank) == (names[index], 5, 8, 1)


@pytest.mark.parametrize("name", BY_PRECEDENCE)
def test_a_named_launcher_wins_over_all_others(name: str) -> None:
    everything = {key: value for family in BY_PRECEDENCE.values() for key, value in family.items()}
    place = detect(everything, name)
    assert place is not None
    assert place.launcher == name


def test_no_launcher() -> None:
    assert detect({}) is None
    assert detect({"PATH": "/bin", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}) is None
    assert detect(OPENMPI, "none") is None


def test_an_unknown_launcher_is_refused_with_the_nearest_name() -> None:
    assert "did you mean 'slurm'" in refusal({}, "slrm")


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name != "none"])
def test_a_named_launcher_that_is_not_there_is_refused(name: str) -> None:
    line = refusal({}, name)
    assert line.startswith(f"{name}: ")
    assert "start with" in line


REQUIRED = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mvapich2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "pals": ("PALS_RANKID", "PALS_LOCAL_RANKID", "PMI_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "flux": ("FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "jsm": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
              "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    "env": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "member"), [(name, member) for name, members in REQUIRED.items() for member in members]
)
def test_a_family_with_a_member_missing_is_an_error_that_names_it(name: str, member: str) -> None:
    line = refusal(without(BY_PRECEDENCE[name], member))
    assert line.startswith(f"{name}: ")
    assert member in line
    assert "start with" in line


@pytest.mark.parametrize("name", BY_PRECEDENCE)
@pytest.mark.parametrize("bad", ["", "-1", "five", "1.0", "٣", " 5"])
def test_a_rank_that_is_no_whole_number_is_refused(name: str, bad: str) -> None:
    rank = "RANK" if name == "env" else next(family.rank for family in FAMILIES if family.name == name)
    assert "not a whole number" in refusal({**BY_PRECEDENCE[name], rank: bad})


@pytest.mark.parametrize("name", BY_PRECEDENCE)
def test_a_rank_outside_its_world_is_refused(name: str) -> None:
    rank = "RANK" if name == "env" else next(family.rank for family in FAMILIES if family.name == name)
    assert f"{rank}=8 is not below" in refusal({**BY_PRECEDENCE[name], rank: "8"})


def test_a_local_rank_outside_its_host_is_refused() -> None:
    assert "LOCAL_RANK=4 is not below the 4 ranks of this host" in refusal({**TORCHRUN, "LOCAL_RANK": "4"})
    assert "FLUX_TASK_LOCAL_ID=8 is not below FLUX_JOB_SIZE=8" in refusal({**FLUX, "FLUX_TASK_LOCAL_ID": "8"})
    assert "9 ranks on this host" in refusal({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "9"})


def test_stale_variables_of_a_shell_do_not_win_under_mpirun() -> None:
    stale = {"RANK": "7", "WORLD_SIZE": "64", "SLURM_PROCID": "3", "LOCAL_RANK": "3"}
    for launched in (OPENMPI, HYDRA):
        place = detect({**stale, **launched})
        assert place is not None
        assert (place.rank, place.world, place.local_rank) == (5, 8, 1)


def test_mpirun_within_a_slurm_job_does_not_take_the_daemons_rank() -> None:
    # mpirun starts its daemons by srun: what the ranks see of Slurm is the daemon's, 0 of 2 on every rank.
    daemon = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    place = detect({**daemon, **OPENMPI})
    assert place is not None
    assert (place.launcher, place.rank, place.world) == ("openmpi", 5, 8)


def test_pmi_variables_alone_are_not_hydra() -> None:
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2"}) is None
    place = detect({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"})  # srun --mpi=pmi2
    assert place is not None
    assert (place.launcher, place.rank) == ("slurm", 5)


def test_intel_mpi_is_hydra_without_its_control_descriptor() -> None:
    place = detect({**without(HYDRA, "HYDI_CONTROL_FD"), "I_MPI_HYDRA_UUID": "1"})
    assert place is not None
    assert place.launcher == "hydra"


def test_pals_without_its_local_size() -> None:
    place = detect(without(PALS, "PALS_LOCAL_SIZE"))
    assert place is not None
    assert place.local_world is None


def test_slurm_takes_the_step_and_not_the_allocation() -> None:
    # `srun -N2 -n3` inside a larger job: the first node of the step runs two of the three tasks.
    step = {**SLURM, "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NTASKS": "64",
            "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "32(x2)"}  # fmt: skip
    place = detect(step)
    assert place is not None
    assert (place.rank, place.world, place.local_rank, place.local_world) == (2, 3, 0, 1)
    assert "SLURM_STEP_NUM_TASKS" in refusal(without(step, "SLURM_STEP_NUM_TASKS"))


def test_the_batch_script_is_no_launcher() -> None:
    assert detect(BATCH_SCRIPT) is None
    assert "SLURM_STEP_NUM_TASKS" in refusal(BATCH_SCRIPT, "slurm")


@pytest.mark.parametrize("step", ["batch", "extern", "interactive", "4294967290", "4294967291", "4294967292"])
def test_reserved_slurm_steps_are_no_launcher(step: str) -> None:
    environ = {**SLURM, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert detect(environ) is None
    assert "start with srun" in refusal(environ, "slurm")


def test_a_shell_from_srun_pty_is_no_launcher_but_a_step_started_in_it_is() -> None:
    shell = {**SLURM, "SLURM_PTY_PORT": "38179", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(shell) is None
    place = detect({**SLURM, "SLURM_PTY_PORT": "38179"})
    assert place is not None
    assert place.launcher == "slurm"


@pytest.mark.parametrize("change", [{"SLURM_NODEID": "2"}, {"SLURM_STEP_TASKS_PER_NODE": "4x2"}])
def test_a_slurm_step_that_contradicts_itself_is_refused(change: dict[str, str]) -> None:
    assert "SLURM_STEP_TASKS_PER_NODE" in refusal({**SLURM, **change})


def test_a_partial_env_family_is_an_error_that_names_the_missing() -> None:
    line = refusal({"RANK": "0", "WORLD_SIZE": "2"})
    assert line == (
        "env: RANK and WORLD_SIZE set without MASTER_ADDR, MASTER_PORT: unset RANK WORLD_SIZE or start with torchrun"
    )
    assert "unset WORLD_SIZE or" in refusal({"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"})


def test_the_env_quadruple_comes_with_a_warning() -> None:
    place = detect(ENV)
    assert place is not None
    assert len(place.warnings) == 1
    assert "RANK" in place.warnings[0]


def test_a_kubeflow_pod_is_the_quadruple_and_is_told_of_torchrun() -> None:
    place = detect({**without(ENV, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "KUBERNETES_PORT": "tcp://10.0.0.1:443"})
    assert place is not None
    assert (place.launcher, place.rank, place.world, place.local_rank, place.local_world) == ("env", 5, 8, 0, None)
    assert any("torchrun inside the pod" in warning for warning in place.warnings)


def test_known_launchers_give_no_warning() -> None:
    for name, environ in BY_PRECEDENCE.items():
        place = detect(environ)
        assert place is not None
        assert bool(place.warnings) == (name == "env")


def test_facts_are_the_launchers_own_variables() -> None:
    facts = {}
    for name, environ in BY_PRECEDENCE.items():
        place = detect(environ)
        assert place is not None
        assert all(environ[fact] == value for fact, value in place.facts.items())
        facts[name] = place.facts
    assert {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} <= set(facts["torchrun"])
    assert {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= set(facts["slurm"])
    assert facts["env"] == {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


_NAMES = sorted({key for environ in BY_PRECEDENCE.values() for key in environ})


@given(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(["0", "1", "2", "8", "", "x", "2(x2)"])))
def test_any_environment_gives_a_sound_place_none_or_one_line(environ: dict[str, str]) -> None:
    try:
        place = detect(environ)
    except LaunchError as error:
        assert "\n" not in str(error)
        return
    if place is not None:
        assert 0 <= place.rank < place.world
        assert 0 <= place.local_rank < (place.local_world or place.world) <= place.world
