"""Figures and what is promised of them.

A figure is compared with four times the promise, since the machines of a CI are noisy, and with
JACKSTAY_STRICT=1 with the promise itself. Either way it goes to the report, the file that
JACKSTAY_REPORT names. Counts are no figures: tests assert them exactly.
"""

import os
import sys

from kubernetes import RELEASE

STRICT = os.environ.get("JACKSTAY_STRICT") == "1"
LONG = bool(os.environ.get("JACKSTAY_REAL_LONG"))
TOLERANCE = 1 if STRICT else 4


def bound(promise):
    """The most that a test lets pass."""
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
    """Records a figure and fails the test where it is beyond the bound."""
    record(name, value, unit, promise)
    case.assertLessEqual(value, bound(promise), f"{name}, {unit}; promised {promise:g}")
