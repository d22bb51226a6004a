"""Why a run is as fast as it is: per curve the algorithm that it looks like, where it falls short, and the likely cause."""

from __future__ import annotations

from commbench.report.explain.judging import Diagnosis, diagnose, of_the_run
from commbench.report.explain.reading import read_curves
from commbench.report.explain.writing import to_json, to_text

__all__ = ["Diagnosis", "diagnose", "of_the_run", "read_curves", "to_json", "to_text"]
