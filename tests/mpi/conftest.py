"""The fixture ``links_file``: links for runs of which nothing is asked that depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commbench.models.links import Link, Links
from commbench.store.calibration import write_calibration


@pytest.fixture(scope="session")
def links_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for ``--calibration``: measuring links takes every run seconds, the more the fewer cores its ranks have."""
    file = tmp_path_factory.mktemp("links") / "links.json"
    links = Links(same_host=Link(latency_s=1e-6, seconds_per_byte=1e-10)).to_dict()
    backends = {name: {"version": "", "settings": {}, "links": links, "windows": []} for name in ("gloo", "mpi")}
    write_calibration(file, hosts=("a", "a"), backends=backends)
    return file
