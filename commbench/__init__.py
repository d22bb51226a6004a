"""commbench: time collective communication, beside what it should be and what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "summarise"]

if TYPE_CHECKING:
    from commbench.report.frame import load, summarise


def __getattr__(name: str) -> Any:
    # pandas loads only when someone asks for a frame: ranks import this package too.
    if name in ("load", "summarise"):
        from commbench.report import frame

        return getattr(frame, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
