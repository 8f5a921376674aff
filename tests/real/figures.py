"""Measured figures and their promised values.

A figure is compared with four times the promise, because CI machines are noisy; with JACKSTAY_STRICT=1 it is
compared with the promise itself. Every figure is appended to the report, the file that JACKSTAY_REPORT names.
Counts are not figures: tests assert them exactly.
"""

import os
import sys

from kubernetes import RELEASE

STRICT = os.environ.get("JACKSTAY_STRICT") == "1"
LONG = bool(os.environ.get("JACKSTAY_REAL_LONG"))
TOLERANCE = 1 if STRICT else 4


def bound(promise):
    """The largest value that passes a test."""
    return promise * TOLERANCE


def record(name, value, unit, promise=None):
    """Writes a figure to the report and the log."""
    limits = f"{promise:g} {unit} | {value / promise:.2f} | {bound(promise):g} {unit}" if promise else "| |"
    row = f"| real peers, {RELEASE.version} | {name} | {value:.4g} {unit} | {limits} |"
    print(f"    {name}: {value:.4g} {unit}" + (f" (promised {promise:g})" if promise else ""), file=sys.stderr, flush=True)
    if path := os.environ.get("JACKSTAY_REPORT"):
        with open(path, "a") as report:
            report.write(row + "\n")


def within(case, name, value, unit, promise):
    """Records a figure and fails the test if it exceeds the bound."""
    record(name, value, unit, promise)
    case.assertLessEqual(value, bound(promise), f"{name}, {unit}; promised {promise:g}")
