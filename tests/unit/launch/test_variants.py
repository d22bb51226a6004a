"""Variants: what can be written, what may be set, and the sets that ship."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.backends import BACKENDS
from commbench.backends.forcing import OPEN_MPI
from commbench.collectives import COLLECTIVES
from commbench.launch.variants import (
    Variant,
    gather_variants,
    overridden,
    parse_variant,
    variant_sets,
    why_not_set,
)
from commbench.provenance.env import PREFIXES

WRITTEN = {
    "ring:NCCL_ALGO=Ring,NCCL_PROTO=LL": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"},
    'tcp:OMPI_MCA_pml=ob1,OMPI_MCA_btl="self,tcp"': {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"},
    "tcp:UCX_TLS='self,tcp',UCX_LOG_LEVEL=info": {"UCX_TLS": "self,tcp", "UCX_LOG_LEVEL": "info"},
    r"tcp:UCX_TLS=self\,tcp": {"UCX_TLS": "self,tcp"},
    "a:NCCL_ALGO=allreduce:ring;broadcast:tree": {"NCCL_ALGO": "allreduce:ring;broadcast:tree"},
    "a:NCCL_SOCKET_IFNAME==eth0": {"NCCL_SOCKET_IFNAME": "=eth0"},
    "a:NCCL_ALGO=": {"NCCL_ALGO": ""},
    """a:NCCL_ALGO="it's\"""": {"NCCL_ALGO": "it's"},
    r"a:NCCL_ALGO=\"\\": {"NCCL_ALGO": '"\\'},
    "a: NCCL_ALGO=Ring": {"NCCL_ALGO": "Ring"},
    "default:": {},
}


@pytest.mark.parametrize(("text", "settings"), WRITTEN.items(), ids=WRITTEN)
def test_what_can_be_written(text: str, settings: dict[str, str]) -> None:
    assert parse_variant(text) == Variant(name=text.partition(":")[0], settings=settings)


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))))
def test_any_value_can_be_written_behind_backslashes(value: str) -> None:
    escaped = "".join(f"\\{letter}" for letter in value)
    assert parse_variant(f"a:NCCL_A={escaped},NCCL_B=1").settings == {"NCCL_A": value, "NCCL_B": "1"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ring", "'ring' is no variant: write NAME:VAR=VALUE,VAR=VALUE, or default: for one without settings"),
        (":NCCL_ALGO=Ring", "'' is no name for a variant"),
        ("a b:NCCL_ALGO=Ring", "'a b' is no name for a variant"),
        ("a" * 41 + ":NCCL_ALGO=Ring", f"{'a' * 41!r} is no name for a variant"),
        ("a:", "variant 'a' sets nothing"),
        ("default:NCCL_ALGO=Ring", "variant 'default' is the one without settings: give this one another name"),
        ("a:NCCL_ALGO", "'NCCL_ALGO' in 'a:NCCL_ALGO' is not VAR=VALUE"),
        ("a:OMPI_MCA_btl=self,tcp", "'tcp' in 'a:OMPI_MCA_btl=self,tcp' is not VAR=VALUE: a value that holds a comma"),
        ("a:NCCL_ALGO=Ring,", "'' in 'a:NCCL_ALGO=Ring,' is not VAR=VALUE"),
        ("a:NCCL_ALGO=Ring,NCCL_ALGO=Tree", "'a:NCCL_ALGO=Ring,NCCL_ALGO=Tree' sets NCCL_ALGO twice"),
        ('a:NCCL_ALGO="Ring', "'a:NCCL_ALGO=\"Ring' has a quote \" that nothing closes"),
        ("a:NCCL_A=\0", "variant 'a': the value of NCCL_A holds a null character"),
        ("a:=Ring", "variant 'a' may not set ''"),
        ("a:NCCL_A B=1", "variant 'a' may not set 'NCCL_A B'"),
    ],
)
def test_what_cannot(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_variant(text)
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variable",
    ["PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "HOME", "COMMBENCH_HUB", "nccl_algo",
     "SLURM_JOB_ID", "XNCCL_ALGO", "OMPI_COMM_WORLD_RANK", "RANK", "MASTER_ADDR"],
)  # fmt: skip
def test_what_may_not_be_set(variable: str) -> None:
    with pytest.raises(ValueError, match=f"variant 'a' may not set {variable!r}: only variables that begin with NCCL_"):
        parse_variant(f"a:{variable}=1")


def test_one_alone_is_compared_with_the_default_and_names_are_its_own() -> None:
    a, b, plain = parse_variant("a:NCCL_A=1"), parse_variant("b:NCCL_A=1"), Variant(name="default")
    assert gather_variants((), ()) == (Variant(),)
    assert gather_variants((a,), ()) == (plain, a)
    assert gather_variants((a, b), ()) == (a, b)
    assert gather_variants((a, plain), ()) == (a, plain)
    ompi = variant_sets()["ompi-transports"]
    assert gather_variants((a, plain), (ompi,)) == (*ompi.variants, a)
    for twice in ((a, a), (a, parse_variant("a:NCCL_B=1")), (plain, plain)):
        with pytest.raises(ValueError, match="two variants are called "):
            gather_variants(twice, ())
    with pytest.raises(ValueError, match="two variants are called 'tcp'"):
        gather_variants((parse_variant("tcp:NCCL_A=1"),), (ompi,))


def test_what_was_set_before_is_told_and_secrets_are_not() -> None:
    variants = (Variant(name="default"), parse_variant("a:NCCL_ALGO=Ring,NCCL_PROTO=LL,UCX_TLS=tcp,NCCL_AUTH_KEY=1"))
    environ = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL", "PATH": "/bin", "NCCL_AUTH_KEY": "x"}
    assert overridden(variants, environ) == {"a": {"NCCL_ALGO": "Tree", "NCCL_AUTH_KEY": "(redacted)"}}


# -- sets that ship ------------------------------------------------------------------------------------


def test_every_set_can_be_run_and_says_what_it_is_for() -> None:
    sets = variant_sets()
    assert set(sets) == {"p2p-paths", "nccl-algorithms", "ompi-allreduce", "ompi-transports", "ucx-transports"}
    for name, one in sets.items():
        assert one.backends and set(one.backends) <= set(BACKENDS)
        assert one.collective is None or one.collective in COLLECTIVES
        assert one.about.endswith(".") and one.sources
        assert one.variants[0] == Variant(name="default")
        names = [variant.name for variant in one.variants]
        settings = [tuple(sorted(variant.settings.items())) for variant in one.variants]
        assert len(set(names)) == len(set(settings)) == len(names) >= 4, name
        for variant in one.variants[1:]:
            assert variant.backends == one.backends
            assert all(variable.startswith(PREFIXES) and value for variable, value in variant.settings.items())


def test_sets_of_algorithms_follow_what_can_be_forced() -> None:
    ompi = variant_sets()["ompi-allreduce"].variants
    assert [variant.name for variant in ompi] == ["default", *OPEN_MPI["all_reduce"][1]]
    assert ompi[4].settings == {
        "OMPI_MCA_coll_tuned_priority": "100", "OMPI_MCA_coll_tuned_use_dynamic_rules": "true",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "ring",
    }  # fmt: skip
    nccl = {variant.name: dict(variant.settings) for variant in variant_sets()["nccl-algorithms"].variants}
    assert nccl["tree-ll128"] == {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128"}


def test_a_set_without_use() -> None:
    ompi, paths = variant_sets()["ompi-allreduce"], variant_sets()["p2p-paths"]
    assert why_not_set(ompi, ("gloo", "mpi"), ("all_reduce",)) is None
    assert why_not_set(paths, ("nccl_raw",), ("all_reduce", "barrier")) is None
    assert why_not_set(paths, ("gloo", "mpi"), ("all_reduce",)) == (
        "p2p-paths is for the backend nccl or nccl_raw, which is not in the sweep: add --backend nccl"
    )
    assert why_not_set(ompi, ("mpi",), ("all_reduce", "barrier")) == (
        "ompi-allreduce tells all_reduce apart and nothing else: ask for --collective all_reduce alone"
    )
