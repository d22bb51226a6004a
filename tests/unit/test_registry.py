"""Names that are resolved when used, and what is said of a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.registry import Registry, unknown_name

REGISTRY = Registry("decoder", {"json": "json:loads", "absent": "commbench_no_such_module:x"})


def test_a_name_is_resolved() -> None:
    assert REGISTRY.load("json") is json.loads
    assert list(REGISTRY) == ["json", "absent"]
    assert "json" in REGISTRY
    assert "toml" not in REGISTRY
    assert REGISTRY.check("json") == "json"


def test_nothing_is_imported_before_it_is_used() -> None:
    program = (
        "import sys; from commbench.registry import Registry; r = Registry('x', {'a': 'colorsys:rgb_to_hsv'}); "
        "assert 'a' in r; assert 'colorsys' not in sys.modules; r.load('a'); assert 'colorsys' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_unknown_name() -> None:
    for ask in (REGISTRY.check, REGISTRY.load):
        with pytest.raises(ValueError, match=r"^unknown decoder 'jsn': did you mean 'json'\? known are absent, json$"):
            ask("jsn")


def test_a_missing_module_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="commbench_no_such_module"):
        REGISTRY.load("absent")


@pytest.mark.parametrize(
    ("name", "near"),
    [("allreduce", "all_reduce"), ("ALL_REDUCE", "all_reduce"), ("brodcast", "broadcast"), ("xyzzy", None), ("", None)],
)
def test_the_near_name(name: str, near: str | None) -> None:
    line = unknown_name("collective", name, ["broadcast", "all_reduce"])
    hint = f"did you mean {near!r}? " if near else ""
    assert line == f"unknown collective {name!r}: {hint}known are all_reduce, broadcast"


@given(st.text(max_size=50))
def test_any_name_gives_one_line(name: str) -> None:
    assert len(unknown_name("thing", name, ["a"]).splitlines()) == 1
