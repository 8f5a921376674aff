"""Checks a recording again: python3 -m consistency DIR, in tests/real."""

import sys
from pathlib import Path

from . import checker
from .history import load
from .recorder import GROUP

operations, others, histories, audits = load(Path(sys.argv[1]), {"configmaps": "configmaps", "leases": "leases", "things": f"{GROUP}/things"})
violations = checker.check(operations, others, histories, audits)
print(checker.summary(operations, violations))
for violation in violations if "--all" in sys.argv else checker.smallest(violations):
    print(violation)
