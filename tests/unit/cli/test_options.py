"""The options of ``commbench run``: what each accepts, from the command line and from TOML, and what each refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commbench.backends import BACKENDS
from commbench.cases import DTYPES, REDUCE_OPS
from commbench.cli.errors import UsageError
from commbench.cli.options import RunOptions, read_options
from commbench.collectives import COLLECTIVES
from commbench.launch.order import Launches
from commbench.launch.variants import Variant, variant_set


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    return file


def test_nothing_given_is_the_documented_default() -> None:
    sweep = read_options(None, {}).sweep(seed=7)
    assert sweep.backends == ("gloo", "mpi")
    assert sweep.collectives == ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    assert sweep.sizes == (8, 64, 512, 4096, 32768, 262144, 2097152, 16777216)
    assert (sweep.dtypes, sweep.ops, sweep.placements) == (("float32",), ("sum",), ("out",))
    assert (sweep.groups, sweep.timings, sweep.root) == (("world",), ("isolated", "streamed"), 0)
    assert (sweep.precision, sweep.max_time_s, sweep.budget_s, sweep.iterations) == (0.02, 5.0, None, None)
    assert (sweep.cache, sweep.soak_s, sweep.deadline_s, sweep.label, sweep.seed) == ("rotate", None, 30.0, "", 7)


# Each key of a TOML file, what it says there, and what it means.
KEYS: list[tuple[str, str, str, Any]] = [
    ("backend", '"gloo"', "backend", ("gloo",)),
    ("backend", '["mpi", "gloo"]', "backend", ("mpi", "gloo")),
    ("collective", '"all"', "collective", tuple(COLLECTIVES)),
    ("collective", '["all_reduce", "broadcast"]', "collective", ("all_reduce", "broadcast")),
    ("sizes", '"8:1K:4x"', "sizes", (8, 32, 128, 512)),
    ("sizes", '[8, 1024, "1M"]', "sizes", (8, 1024, 1048576)),
    ("sizes", "4096", "sizes", (4096,)),
    ("dtype", '"bf16,double"', "dtype", ("bfloat16", "float64")),
    ("dtype", '"all"', "dtype", tuple(DTYPES)),
    ("op", '["sum", "max"]', "op", ("sum", "max")),
    ("op", '"all"', "op", REDUCE_OPS),
    ("placement", '"out,in"', "placement", ("out", "in")),
    ("algorithm", '"library,own:ring/4"', "algorithm", ("library", "own:ring/4")),
    ("group", '"pair:0-1,node"', "group", ("pair:0-1", "node")),
    ("root", "1", "root", 1),
    ("timing", '"streamed"', "timing", ("streamed",)),
    ("execution", '["eager", "graph"]', "execution", ("eager", "graph")),
    ("precision", '"5%"', "precision", 0.05),
    ("precision", "0.05", "precision", 0.05),
    ("max_time", '"300ms"', "max_time", 0.3),
    ("max-time", "2", "max_time", 2.0),
    ("budget", '"10m"', "budget", 600.0),
    ("budget", '"auto"', "budget", None),
    ("ranks", "4", "ranks", 4),
    ("nodes", "2", "nodes", 2),
    ("launches", '"3"', "launches", Launches(least=3, most=3)),
    ("launches", '"auto:5%"', "launches", Launches(least=6, most=40, precision=0.05)),
    ("launches", '"auto:2.5%:30"', "launches", Launches(least=6, most=30, precision=0.025)),
    ("variant", '"ring:NCCL_ALGO=Ring"', "variant", (Variant(name="ring", settings={"NCCL_ALGO": "Ring"}),)),
    (
        "variant",
        "{a = {NCCL_MIN_NCHANNELS = 8}, default = {}}",
        "variant",
        (Variant(name="a", settings={"NCCL_MIN_NCHANNELS": "8"}), Variant(name="default")),
    ),
    ("bind", '"numa"', "bind", "numa"),
    ("variants", '"ucx-transports"', "variants", (variant_set("ucx-transports"),)),
    ("spread", '"10m"\nlaunches = 6', "spread", 600.0),
    ("execution", '"eager,graph"', "execution", ("eager", "graph")),
    ("cache", '"warm"', "cache", "warm"),
    ("buffers", '["plain", "symmetric"]', "buffers", ("plain", "symmetric")),
    ("iters", "20", "iters", 20),
    ("for", '"2h"', "soak", 7200.0),
    ("deadline", '"1m"', "deadline", 60.0),
    ("seed", "0", "seed", 0),
    ("out", '"elsewhere"', "out", Path("elsewhere")),
    ("label", '"after the update"', "label", "after the update"),
]


@pytest.mark.parametrize(("key", "text", "field", "value"), KEYS)
def test_a_key_of_a_toml_file(tmp_path: Path, key: str, text: str, field: str, value: Any) -> None:
    options = read_options(toml(tmp_path, f"{key} = {text}\n"), {})
    assert getattr(options, field) == value


def test_every_option_is_a_key() -> None:
    assert {field for _, _, field, _ in KEYS} == set(RunOptions.model_fields)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, 'sizes = "1M"\nfor = "1h"\nlabel = "file"\nranks = 4\n')
    options = read_options(file, {"sizes": "8,16", "soak": "3s", "label": None, "ranks": "2"})
    assert (options.sizes, options.soak, options.label, options.ranks) == ((8, 16), 3.0, "file", 2)


def test_a_mistake_in_the_file_does_not_matter_where_it_is_overridden(tmp_path: Path) -> None:
    assert read_options(toml(tmp_path, 'sizes = "12Q"\n'), {"sizes": "8"}).sizes == (8,)


def test_which_algorithms_there_are_depends_on_the_collectives(tmp_path: Path) -> None:
    sweep = read_options(None, {"collective": "barrier,all_gather", "algorithm": "own:all"}).sweep(0)
    assert set(sweep.algorithms) == {
        "own:dissemination", "own:ring", "own:recursive_doubling", "own:bruck", "own:hierarchical"
    }  # fmt: skip
    assert ("all_gather", "own:dissemination") in sweep.left_out
    assert ("all_gather", "own:ring") not in sweep.left_out
    with pytest.raises(
        UsageError, match="--algorithm: no own:ring for barrier, it is for .*: known are own:dissemination"
    ):
        read_options(None, {"collective": "barrier", "algorithm": "own:ring"})
    with pytest.raises(UsageError, match="--collective: unknown collective 'allreduce'"):
        read_options(None, {"collective": "allreduce", "algorithm": "own:ring"})
    file = toml(tmp_path, 'collective = "gather"\nalgorithm = ["own:ring"]\n')
    with pytest.raises(
        UsageError, match="algorithm: no own:ring for gather, it is for .*: known are own:binomial_tree"
    ):
        read_options(file, {})


def test_names_repeated_in_a_list_count_once() -> None:
    options = read_options(None, {"backend": "gloo,gloo", "dtype": "float,float32", "group": "pair:1-0,pair:0-01"})
    assert (options.backend, options.dtype, options.group) == (("gloo",), ("float32",), ("pair:0-1",))


REFUSED: list[tuple[str, str, str]] = [
    ("backend", "glo", "unknown backend 'glo': did you mean 'gloo'?"),
    ("collective", "allreduce", "unknown collective 'allreduce': did you mean 'all_reduce'?"),
    ("dtype", "float3", "unknown dtype 'float3': did you mean 'float32'?"),
    ("op", "summ", "unknown reduce op 'summ': did you mean 'sum'?"),
    ("placement", "inn", "unknown placement 'inn': did you mean 'in'?"),
    ("algorithm", "own:rin", "unknown algorithm 'own:rin': did you mean 'own:ring'?"),
    ("algorithm", "tree", "algorithm 'tree' can be forced on nccl and nccl_raw only, not on gloo or mpi: "),
    ("algorithm", "own:ring/0", "'own:ring/0' is not an algorithm: write own:NAME, or own:NAME/8 for 8 pieces"),
    ("group", "wold", "unknown group 'wold': did you mean 'world'?"),
    ("group", "pair:1", "unknown group 'pair:1': did you mean 'pair:A-B'?"),
    ("group", "pair:1-1", "group 'pair:1-1' names one rank twice: write two different ranks, such as pair:0-1"),
    ("group", "pair:1-01", "group 'pair:1-01' names one rank twice: write two different ranks, such as pair:0-1"),
    ("timing", "isolate", "unknown timing 'isolate': did you mean 'isolated'?"),
    ("cache", "worm", "unknown cache 'worm': did you mean 'warm'?"),
    ("backend", "", "an empty list: name at least one"),
    ("collective", " , ", "an empty list: name at least one"),
    ("sizes", ",", "an empty list: name at least one"),
    ("sizes", "64M:8", "size range '64M:8' ends below its start: write the smaller size first"),
    ("sizes", "0", "size '0' is below one byte"),
    ("sizes", "8:64M:1x", "size step '1x' never ends: use a factor of 2x or more, or +SIZE to add"),
    ("sizes", "8:64M:+0", "size '0' is below one byte"),
    ("sizes", "8:64M:4", "size step '4' is neither a factor such as 4x nor an increment such as +1M"),
    ("sizes", "12Q", "'12Q' is not a size: write bytes as a whole number with K, M, G or T, such as 64K or 16M"),
    ("sizes", "1.5K", "'1.5K' is not a size: write bytes as a whole number"),
    ("sizes", "1:1M:+1", "size range '1:1M:+1' makes more than 10000 sizes: use a larger step"),
    ("precision", "2", "'2' must lie between 0% and 100%"),
    ("precision", "little", "'little' is not a percentage: write for example 2%"),
    ("precision", "nan", "'nan' must lie between 0% and 100%"),
    ("max_time", "0s", "duration '0s' must be more than zero"),
    ("max_time", "-1s", "'-1s' is not a duration: write a number with us, ms, s, m, h or d, such as 5s or 10m"),
    ("budget", "soon", "'soon' is not a duration"),
    ("deadline", "inf", "'inf' is not a duration"),
    ("soak", "x", "'x' is not a duration"),
    ("ranks", "0", "0 is too small: it must be 1 or more"),
    ("ranks", "x", "'x' is not a whole number"),
    ("ranks", "2.5", "'2.5' is not a whole number"),
    ("launches", "0", "0 is too small: it must be 1 or more"),
    (
        "launches",
        "auto",
        "'auto' is neither a number nor auto:PRECISION, such as auto:5%, or auto:5%:30 for at most 30",
    ),
    ("launches", "auto:5", "'5' must lie between 0% and 100%"),
    ("launches", "auto:5%:5", "'5' launches are too few for an interval: at most 6 or more, as in auto:5%:30"),
    ("variant", "ring", "'ring' is no variant: write NAME:VAR=VALUE,VAR=VALUE, or default: for one without settings"),
    ("variant", "a:PATH=/x", "variant 'a' may not set 'PATH': only variables that begin with NCCL_, "),
    ("variants", "nccl-algorithm", "unknown set of variants 'nccl-algorithm': did you mean 'nccl-algorithms'?"),
    (
        "variants",
        "p2p-paths",
        "p2p-paths is for the backend nccl or nccl_raw, which is not in the sweep: add --backend nccl",
    ),
    ("variants", "ompi-allreduce", "ompi-allreduce tells all_reduce apart and nothing else: ask for --collective "),
    ("spread", "10m", "there is one launch, which cannot be spread over a time: add --launches, such as 6"),
    ("spread", "long", "'long' is not a duration"),
    ("bind", "cores", "unknown binding 'cores': did you mean 'core'?"),
    ("iters", "0", "0 is too small: it must be 1 or more"),
    ("nodes", "-1", "-1 is too small: it must be 1 or more"),
    ("root", "-1", "-1 is too small: it must be 0 or more"),
    ("seed", "-1", "-1 is too small: it must be 0 or more"),
]


@pytest.mark.parametrize(("field", "text", "reason"), REFUSED)
def test_what_an_option_refuses(field: str, text: str, reason: str) -> None:
    option = {"soak": "--for", "max_time": "--max-time"}.get(field, f"--{field}")
    with pytest.raises(UsageError) as caught:
        read_options(None, {field: text})
    assert str(caught.value).startswith(f"{option}: {reason}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('collectiv = "all_reduce"', "unknown key 'collectiv': did you mean 'collective'?"),
        ("max_tim = 3", "unknown key 'max_tim': did you mean 'max_time'?"),
        ("dry_run = true", "unknown key 'dry_run': "),
        ("[run]\nranks = 2", "unknown key 'run': "),
        ("ranks = 2.5", "ranks: 2.5 is not a whole number"),
        ("ranks = true", "ranks: True is not a whole number"),
        ("ranks = [2]", "ranks: [2] is not a whole number"),
        ("iters = -1", "iters: -1 is too small: it must be 1 or more"),
        ("sizes = [8.5]", "sizes: '8.5' is not a size"),
        ("sizes = true", "sizes: 'True' is not a size"),
        ("max_time = 0", "max_time: duration '0' must be more than zero"),
        ("for = false", "for: 'False' is not a duration"),
        ("precision = 2", "precision: '2' must lie between 0% and 100%"),
        ("label = 3", "label: 3 is not text: put it in quotes"),
        ("out = 3", "out: 3 is not text: put it in quotes"),
        ("collective = {a = 1}", "collective: unknown collective "),
        ("collective = []", "collective: an empty list: name at least one"),
        ("variant = 3", "variant: 3 is not text: put it in quotes"),
        ("variant.a = 3", "variant: variant 'a' is not a table of variables"),
        (
            "variant.a.NCCL_ALGO = true",
            "variant: variant 'a': NCCL_ALGO is neither text nor a whole number: put it in ",
        ),
        (
            "variant.a.LD_PRELOAD = 'x'",
            "variant: variant 'a' may not set 'LD_PRELOAD': only variables that begin with ",
        ),
        ('variant = ["a:NCCL_ALGO=x", "a:NCCL_ALGO=y"]', "variant: two variants are called 'a': give each a name of "),
    ],
)
def test_what_a_toml_file_may_not_say(tmp_path: Path, text: str, reason: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_options(file, {"backend": "gloo"})
    assert str(caught.value).startswith(f"{file}: {reason}")


def test_a_set_and_variants_of_ones_own_go_together() -> None:
    given = {"backend": "mpi", "collective": "all_reduce", "variants": "ompi-allreduce", "launches": "6"}
    names = [v.name for v in read_options(None, {**given, "variant": ["tcp:OMPI_MCA_btl=^sm"]}).all_variants]
    assert (names[0], names[-1], len(names)) == ("default", "tcp", 8)
    with pytest.raises(UsageError, match=r"^--variants: two variants are called 'ring': give each a name of its own$"):
        read_options(None, {**given, "variant": ["ring:OMPI_MCA_btl=^sm"]})
    assert read_options(None, {**given, "spread": "10m"}).spread == 600.0


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    cases = {
        "absent.toml": (None, "cannot read sweep file {} (No such file or directory)"),
        "open.toml": (b"sizes = [8,", "sweep file {} is not TOML: "),
        "twice.toml": (b"ranks = 1\nranks = 2\n", "sweep file {} is not TOML: "),
        "binary.toml": (b"\xff\xfe\x00", "sweep file {} is not TOML: "),
    }
    for name, (content, line) in cases.items():
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            read_options(file, {})
        assert str(caught.value).startswith(line.format(file))


def test_the_known_names_are_listed_for_a_name_unlike_any() -> None:
    with pytest.raises(UsageError) as caught:
        read_options(None, {"backend": "qqqqqq"})
    assert str(caught.value) == f"--backend: unknown backend 'qqqqqq': known are {', '.join(sorted(BACKENDS))}"
