"""The file that calibration leaves for other commands: links by backend, and the windows that they were made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import commbench
from commbench.models.links import Links
from commbench.store.writer import utc_now, write_json

CALIBRATION = "calibration.json"
KIND = "calibration"


class CalibrationError(ValueError):
    """A file that is no calibration, or not one for what it is used for: one line that says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedBackend:
    """``windows``: per pattern and size the seconds a call that were measured; see ``measure.calibrate``."""

    version: str
    settings: dict[str, str]
    links: Links
    windows: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """``hosts[rank]`` is the name of the host of a rank of the job that was calibrated."""

    path: Path
    hosts: tuple[str, ...]
    backends: dict[str, CalibratedBackend]

    def backend(self, name: str | None) -> CalibratedBackend:
        """The backend of that name, or the only one. Raises CalibrationError."""
        known = ", ".join(self.backends)
        if name is None:
            if len(self.backends) > 1:
                raise CalibrationError(f"{self.path} holds {known}: choose one with --backend")
            name = next(iter(self.backends))
        if name not in self.backends:
            raise CalibrationError(f"{self.path} holds no {name}, only {known}: calibrate it, or leave the file out")
        return self.backends[name]

    def links_for(self, backend: str, hosts: Sequence[str]) -> Links:
        """The links of a job on these hosts, one name a rank, whose predictions number hosts in order of appearance.

        A host's own rate is that of the calibrated host of the same name or, where the names are others but as many,
        of the one in the same place; else it is a usual one. Raises CalibrationError for a class of links that the job
        has and the calibration has not.
        """
        links = self.backend(backend).links
        now, then = list(dict.fromkeys(hosts)), list(dict.fromkeys(self.hosts))
        for link, needed, where in (
            (links.same_host, len(now) < len(hosts), "inside a host"),
            (links.other_host, len(now) > 1, "between hosts"),
        ):
            if needed and link is None:
                raise CalibrationError(
                    f"{self.path} has no {backend} link {where}: calibrate on ranks that have one, or leave the file out"
                )
        if not links.host_rates or links.other_host is None:
            return links
        usual = links.other_host.seconds_per_byte
        if set(now) <= set(then):
            rates = [links.host_rates[then.index(host)] for host in now]
        elif len(now) == len(then):
            rates = list(links.host_rates)
        else:
            rates = [(usual, usual)] * len(now)
        return replace(links, host_rates=tuple(rates))


def write_calibration(path: Path, *, hosts: Sequence[str], backends: dict[str, dict[str, Any]]) -> None:
    """``backends``: name -> version, settings, links (``Links.to_dict()``) and windows. Raises StoreError."""
    write_json(
        path,
        {"kind": KIND, "commbench": commbench.__version__, "created_utc": utc_now(), "hosts": list(hosts),
         "backends": backends},
    )  # fmt: skip


def read_calibration(path: Path) -> Calibration:
    """A calibration file, or that of a run's directory. Raises CalibrationError."""
    file = path / CALIBRATION if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(
            f"cannot read calibration {file} ({error.strerror}): write one with `commbench calibrate`"
        ) from None
    except ValueError:
        raise CalibrationError(f"{file} is not JSON: write a calibration with `commbench calibrate`") from None
    if not isinstance(values, dict) or values.get("kind") != KIND or not values.get("backends"):
        raise CalibrationError(f"{file} is no calibration: write one with `commbench calibrate`")
    try:
        backends = {
            name: CalibratedBackend(
                version=found.get("version", ""), settings=found.get("settings", {}),
                links=Links.from_dict(found["links"]), windows=tuple(found.get("windows", ())),
            )
            for name, found in values["backends"].items()
        }  # fmt: skip
        return Calibration(path=file, hosts=tuple(values["hosts"]), backends=backends)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{file} is a damaged calibration ({type(error).__name__}: {error})") from None
