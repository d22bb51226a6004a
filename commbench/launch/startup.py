"""How long ranks may take to arrive. An environment variable, because ranks other than the first read no options."""

from __future__ import annotations

import os

from commbench.launch.place import LaunchError
from commbench.units import parse_duration

STARTUP = "COMMBENCH_STARTUP"
DEFAULT_S = 60.0


def startup_s() -> float:
    """Seconds from the start of a rank until all must have arrived: ``COMMBENCH_STARTUP`` (such as ``2m``) or 60.

    Raises LaunchError for anything but a duration.
    """
    text = os.environ.get(STARTUP)
    try:
        return DEFAULT_S if text is None else parse_duration(text)
    except ValueError as error:
        raise LaunchError(f"{STARTUP}: {error}") from None
