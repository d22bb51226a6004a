"""Ranks that commbench starts itself are on this host, whatever mpirun would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from commbench.launch.start import mpirun_command


@pytest.mark.parametrize(
    ("said", "oversubscribed", "options"),
    [
        ("mpirun (Open MPI) 5.0.8", False, ["-n", "3", "--host", "localhost:3", "--map-by", ":OVERSUBSCRIBE"]),
        (
            "mpirun (Open MPI) 5.0.8", True,
            ["-n", "3", "--host", "localhost:3", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"],
        ),
        ("HYDRA build details:", True, ["-n", "3", "-hosts", "localhost"]),
    ],
)  # fmt: skip
def test_it_stays_here(tmp_path: Path, said: str, oversubscribed: bool, options: list[str]) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{said}'\n")
    mpirun.chmod(0o755)
    assert mpirun_command(str(mpirun), 3, oversubscribed=oversubscribed) == [str(mpirun), *options]
