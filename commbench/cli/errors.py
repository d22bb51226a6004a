"""The error that a user can act on."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input: one line that says what was wrong and what to do; exit code 2."""
