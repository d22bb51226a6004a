"""The pages say what is: their commands parse, their links and paths lead somewhere, and no column is missing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import commbench
from commbench.backends import BACKENDS
from commbench.cli.main import app
from commbench.collectives import COLLECTIVES
from commbench.launch.place import FAMILIES
from commbench.records import COLUMNS
from commbench.schedules import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
LAUNCHERS = ("mpirun", "torchrun", "srun")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of every console block; a line that ends with a backslash goes on."""
    for page in PAGES:
        for language, body in FENCE.findall(page.read_text()):
            if language in ("console", "sh", "bash", "shell"):
                for line in body.replace("\\\n", " ").splitlines():
                    if line.strip() and not line.lstrip().startswith("#"):
                        yield page.name, line.strip().removeprefix("$ ")


COMMANDS = list(commands())


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of a launcher; and a working directory in which a dry run must leave nothing."""
    names = {name for family in FAMILIES for name in family.signs} | {"RANK", "WORLD_SIZE"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text('backend = "gloo"\n')


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_every_command_parses(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = shlex.split(line)
    if words[0] in LAUNCHERS:
        words = words[words.index("commbench") :]
    if words[0].startswith("scripts/"):
        assert (ROOT / words[0]).is_file(), f"{words[0]} does not exist"
        return
    assert words[0] == "commbench", f"{line}: only commbench, {', '.join(LAUNCHERS)} and scripts/ are expected here"
    if "list" in words:  # prints and is done
        words = [word for word in words if not word.startswith("--profile") and word != "list"]
    if words[1] in ("run", "moe"):
        monkeypatch.setattr("sys.argv", [*words, "--dry-run"])
        from commbench.__main__ import main

        assert main() == 0, capsys.readouterr().err
        assert "cases" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
    else:
        # Parsing is all: these would look at real results, or at this machine.
        command = get_command(app).commands[words[1]]  # type: ignore[attr-defined]
        command.make_context(words[1], words[2:])


def test_the_pages_have_commands() -> None:
    assert sum(line.startswith("commbench run") for _, line in COMMANDS) >= 8


@each_page
def test_links_lead_to_pages_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@each_page
def test_paths_that_are_named_exist(page: Path) -> None:
    """Whatever stands in backticks and begins like a folder of this repository."""
    for name in re.findall(r"`((?:commbench|scripts|tests|docs|kernels)/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@each_page
def test_options_and_subcommands_that_are_named_exist(page: Path) -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    options = {option for command in known.values() for item in command.params for option in item.opts}
    foreign = {"--pty", "--mpi", "--cluster"}  # srun's, and scripts/virtual_cluster's
    prose = FENCE.sub("", page.read_text())
    for text in re.findall(r"`([^`\n]+)`", prose):
        if text.split()[0] not in LAUNCHERS:
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", text):
                assert option in options | foreign, f"{page.name} names {option}"
        if match := re.match(r"commbench (\w+)", text):
            assert match[1] in known, f"{page.name} names {text}"
        if match := re.fullmatch(r"commbench\.(\w+)", text):
            assert hasattr(commbench, match[1]), f"{page.name} names {text}"


def table(text: str) -> dict[str, list[str]]:
    """The cells after the first of every row of the tables in ``text``, by the first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in rows}


def test_every_column_is_explained_once_and_in_order() -> None:
    rows = table((ROOT / "docs/results.md").read_text().partition("## Columns")[2].partition("\n## ")[0])
    assert tuple(rows)[2:] == tuple(f"`{column}`" for column in COLUMNS)
    for column in COLUMNS:
        unit, meaning = rows[f"`{column}`"]
        assert meaning, column
        assert (unit == "s") == (column.endswith("_s") or column in ("predictions", "phases", "rank_times")), column
        assert (unit == "B/s") == column.endswith("_Bps"), column


def test_units_lists_the_bus_factor_of_every_collective() -> None:
    rows = table((ROOT / "docs/units.md").read_text())
    for name, spec in COLLECTIVES.items():
        for n in (2, 3, 8):
            values = {"2(n−1)/n": 2 * (n - 1) / n, "(n−1)/n": (n - 1) / n, "1": 1.0, "none": 0.0}
            assert values[rows[name][-1]] == spec.bus_factor(n), name


def test_models_lists_every_algorithm() -> None:
    rows = table((ROOT / "docs/models.md").read_text())
    listed = {name: cells[0].split(", ") for names, cells in rows.items() for name in names.split(", ")}
    for name, known in ALGORITHMS.items():
        assert listed[name] == list(known), name


def test_backends_and_hardware_list_every_backend() -> None:
    for page in ("backends.md", "hardware.md"):
        text = (ROOT / "docs" / page).read_text()
        assert [name for name in BACKENDS if name not in text] == []
