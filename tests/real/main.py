"""Runs the named tests, or all of them; the last line is `N passed, N failed`."""

import os
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import kubernetes
import matrix
import rig as rig_module

MODULES = ["test_direct", "test_jackstay", "test_l4", "test_deploy", "test_install", "test_image", "test_chart", "test_setup", "test_discovery",
           "test_outage", "test_line",
            "test_custom", "test_versions", "test_lag", "test_starting", "test_watch_cache", "test_restored_etcd", "test_overload", "test_groups",
            "test_etcd_requests", "test_events", "test_settings", "test_cbor",
           "test_cbor_components", "test_encodings", "test_clients", "test_passed_through",
           "consistency.test_checker", "test_consistency", "test_stale_reads", "test_recipes"]


class Result(unittest.TextTestResult):
    """A test result that prints the wall time of every test, and fails a test if client-go detects an inconsistency."""

    def startTest(self, test):
        self.begun = time.monotonic()
        super().startTest(test)

    def addSuccess(self, test):
        # The detectors of kubelet and of the controller manager find what the test itself does not see.
        if found := rig_module.inconsistencies():
            failure = AssertionError("client-go detected an inconsistency:\n" + "\n".join(found))
            return self.addFailure(test, (AssertionError, failure, None))
        super().addSuccess(test)
        self.passed = getattr(self, "passed", 0) + 1
        self.stream.writeln(f"    {time.monotonic() - self.begun:.1f} s")


def shell():
    rig = rig_module.shared()
    config = rig.kubeconfig("admin", rig.server("a"), cert=rig.admin_cert)
    print(f"directory {rig.dir}\nKUBECONFIG={config} (admin, apiserver a); exit the shell to stop everything", file=sys.stderr)
    path = f"{kubernetes.CACHE}/bin:{kubernetes.PROGRAMS}:{os.environ['PATH']}"
    return subprocess.run(["bash"], env={**os.environ, "KUBECONFIG": str(config), "PATH": path}).returncode


def tests_of(names):
    """The tests with these unittest names, in order."""
    pending, tests = [unittest.defaultTestLoader.loadTestsFromNames(names)], []
    while pending:
        one = pending.pop(0)
        if isinstance(one, unittest.TestSuite):
            pending[:0] = list(one)
        else:
            tests.append(one)
    return tests


def require_complete_parts():
    """Fails if no part of the strict run contains some test."""
    lines = (Path(__file__).parent / "parts").read_text().splitlines()
    names = [name for line in lines if not line.startswith("#") for name in line.split()[1:]]
    missing = {test.id() for test in tests_of(MODULES)} - {test.id() for test in tests_of(names)}
    if missing:
        raise SystemExit(f"no part of the strict run contains {', '.join(sorted(missing))}: add them to tests/real/parts")


def main(arguments):
    if arguments[:1] == ["--shell"]:
        return shell()
    require_complete_parts()
    matrix.check(tests_of(MODULES))
    suite = unittest.TestSuite(tests_of(arguments or MODULES))
    begun = time.monotonic()
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2, resultclass=Result, failfast=False).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    passed, skipped = getattr(result, "passed", 0), len(result.skipped)
    sys.stderr.flush()
    print(f"real peers: {time.monotonic() - begun:.0f} s")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""), flush=True)
    return 0 if failed == 0 and passed else 1


if __name__ == "__main__":
    # Shells start background jobs with SIGINT ignored, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main(sys.argv[1:])
    rig_module._rig.stop()
    sys.stdout.flush()
    os._exit(code)
