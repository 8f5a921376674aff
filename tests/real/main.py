"""Runs the named tests, or all of them; the last line is `N passed, N failed`."""

import os
import signal
import subprocess
import sys
import time
import unittest

import kubernetes
import rig as rig_module

MODULES = ["test_direct", "test_jackstay", "test_l4", "test_deploy", "test_setup", "test_discovery", "test_outage"]


class Result(unittest.TextTestResult):
    """A test result that prints the wall time of every test."""

    def startTest(self, test):
        self.begun = time.monotonic()
        super().startTest(test)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed = getattr(self, "passed", 0) + 1
        self.stream.writeln(f"    {time.monotonic() - self.begun:.1f} s")


def shell():
    rig = rig_module.shared()
    config = rig.kubeconfig("admin", rig.server("a"), cert=rig.admin_cert)
    print(f"directory {rig.dir}\nKUBECONFIG={config} (admin, apiserver a); exit the shell to stop everything", file=sys.stderr)
    path = f"{kubernetes.CACHE}/bin:{kubernetes.PROGRAMS}:{os.environ['PATH']}"
    return subprocess.run(["bash"], env={**os.environ, "KUBECONFIG": str(config), "PATH": path}).returncode


def main(arguments):
    if arguments[:1] == ["--shell"]:
        return shell()
    loader = unittest.defaultTestLoader
    suite = loader.loadTestsFromNames(arguments or MODULES)
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
