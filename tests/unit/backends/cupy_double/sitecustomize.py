"""Puts the doubles in place before anything is imported. Loaded by Python itself in every rank."""

import cupy_double

cupy_double.install()
