"""What an operation should take: link constants and schedules in, seconds out. Pure, and standard library only."""

from __future__ import annotations

from commbench.models.bounds import bound
from commbench.models.closed_forms import ClosedForm, closed_form
from commbench.models.links import Link, Links
from commbench.models.prediction import Prediction, bus_bandwidth, nearest, predict, predict_schedule
from commbench.models.pricing import price

__all__ = [
    "ClosedForm",
    "Link",
    "Links",
    "Prediction",
    "bound",
    "bus_bandwidth",
    "closed_form",
    "nearest",
    "predict",
    "predict_schedule",
    "price",
]
