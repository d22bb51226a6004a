"""The command line: one file a command, and one place where errors become exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from commbench import __version__
from commbench.cli.calibrate import calibrate
from commbench.cli.doctor import doctor
from commbench.cli.errors import UsageError
from commbench.cli.explain import explain
from commbench.cli.moe import moe
from commbench.cli.predict import predict
from commbench.cli.run import run
from commbench.cli.show import show

_INTERRUPTED = 130  # what typer makes of Ctrl-C

# Plain help text: rich's takes longer to load than all the rest.
app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Time collective communication, beside what it should be and what it was.",
    epilog="Start with: commbench run",
)  # fmt: skip
app.command()(run)
app.command()(moe)
app.command()(calibrate)
app.command()(predict)
app.command()(show)
app.command()(explain)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"commbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options before a command."""


def main() -> int:
    """Run the command; returns the exit code: 0 fine, 2 usage, 3 failed or incomplete."""
    try:
        result = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UsageError as error:
        return _complain(str(error))
    except BrokenPipeError:
        return 0
    except Exception as error:
        # typer carries its own copy of click, whose errors know how to print themselves.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _complain(error.format_message())
        raise
    if result == _INTERRUPTED:
        print("commbench: interrupted", file=sys.stderr)
        return 3
    return result if isinstance(result, int) else 0


def _complain(message: str) -> int:
    line = " ".join(message.split())
    print(f"commbench: error: {line}", file=sys.stderr)
    return 2
