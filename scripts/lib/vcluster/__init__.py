"""A cluster on one machine: hosts from Linux namespaces, links of a known rate between them. Standard library only."""

from __future__ import annotations


class ClusterError(Exception):
    """What went wrong and what to do, in one line."""
