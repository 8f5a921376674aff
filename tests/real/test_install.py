"""`jackstay install` and `jackstay uninstall` on a real node whose kubelet is a service of systemd.

Promise: the node is Ready within 60 s after an installation, after its removal, and after an installation that was killed
at any moment; kubelet's kubeconfig works at every moment.
"""

import json
import os
import random
import re
import signal
import socket
import threading
import time
import unittest
from pathlib import Path

from cases import RigCase, long_form
from deployed import DEPLOY, SERVER, pids_of, status, stop_everything
from figures import LONG, within, record
from installed import JOURNAL, KUBELET_CONF, MANIFESTS, NAMES, NodeWithSystemd
from rig import ADDRESSES, PORT, log, sh, wait_for

READY = 60
DEB = os.environ.get("JACKSTAY_DEB")
AARCH64 = os.environ.get("JACKSTAY_AARCH64")


class Install(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        stop_everything(cls.rig)
        cls.node = cls.rig.node = NodeWithSystemd(cls.rig).start()
        wait_for("the node to be Ready", lambda: cls.rig.ready(cls.node.NAME), 120)
        cls.before = cls.node.files()

    @classmethod
    def tearDownClass(cls):
        stop_everything(cls.rig)

    def setUp(self):
        self.rig.recover()

    def tearDown(self):
        self.rig.recover()
        self.node.jackstay("uninstall")

    def assert_as_before(self):
        now = self.node.files()
        names = sorted(set(now) ^ set(self.before)) + sorted(n for n in set(now) & set(self.before) if now[n] != self.before[n])
        self.assertEqual(names, [], "these files differ from those before the installation")
        self.assertEqual(pids_of(), [])

    def install(self, *more, code=0):
        begun = time.monotonic()
        done = self.node.inside(*self.node.install_argv(*more))
        self.assertEqual(done.returncode, code, f"{done.stdout}{done.stderr}{self.node.logs()}")
        return done.stdout + done.stderr, time.monotonic() - begun

    def uninstall(self):
        done = self.node.jackstay("uninstall")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + self.node.logs())
        return done.stdout

    def test_1_dry_run_prints_everything_and_changes_nothing(self):
        output, _ = self.install("--dry-run")
        for expected in ("write /etc/jackstay/jackstay.yaml", "write /etc/systemd/system/jackstay.service", "systemctl enable --now jackstay.service",
                         f"write {KUBELET_CONF}", f"server: https://{NAMES['a']}:{PORT} -> {SERVER}", "systemctl restart kubelet.service",
                         f"{NAMES['b']}:{PORT}", "bytes, not shown"):
            self.assertIn(expected, output)
        self.assertNotIn("PRIVATE KEY", output)
        self.assert_as_before()

    def test_2_node_is_ready_through_jackstay_and_as_before_afterwards(self):
        output, took = self.install()
        log(output.strip().splitlines()[-1])
        self.assertIn("is Ready through jackstay", output)
        record("install: from the command to Ready", took, "s")
        self.assertIn(SERVER, KUBELET_CONF.read_text())
        self.assertEqual(self.rig.faults.flows(self.node.kubelet_pid()), {}, "kubelet has a connection that bypasses jackstay")
        endpoints = {endpoint["address"] for endpoint in status()["upstreams"][0]["endpoints"]}
        self.assertEqual(len(endpoints), 3, endpoints)
        enabled = self.node.ctl("is-enabled", "jackstay.service", "jackstay-renew.timer").stdout.split()
        self.assertEqual(enabled, ["enabled", "enabled"])
        again, _ = self.install()
        self.assertIn("already", again)
        other, _ = self.install("--mode", "passthrough", code=2)
        self.assertIn("jackstay uninstall", other)
        # A reboot: kubelet comes back through jackstay.
        self.node.power_off()
        begun = time.monotonic()
        self.node.boot()
        self.node.wait_ready(4 * READY)
        within(self, "installed node: reboot to Ready", time.monotonic() - begun, "s", READY)
        self.assertEqual(self.rig.faults.flows(self.node.kubelet_pid()), {})
        begun = time.monotonic()
        self.uninstall()
        self.node.wait_ready(4 * READY)
        within(self, "uninstall: from the command to Ready", time.monotonic() - begun, "s", READY)
        self.assert_as_before()

    @long_form("the unit tests of install::kubelet have each place of a kubelet")
    def test_3_kubelet_that_has_left_the_cgroup_of_its_unit(self):
        """`kubeletCgroups` has kubelet move itself, so its cgroup does not name its unit."""
        file = self.node.dir / "kubelet.json"
        before = file.read_text()

        def restart(text):
            file.write_text(text)
            self.node.ctl("restart", "kubelet.service", check=True)
            self.node.wait_ready(READY)
        self.addCleanup(restart, before)
        restart(json.dumps({**json.loads(before), "kubeletCgroups": "/kube.slice"}))
        cgroups = wait_for("kubelet to move itself", lambda: [
            line for line in Path(f"/proc/{self.node.kubelet_pid()}/cgroup").read_text().splitlines() if line.endswith("/kube.slice")], 90)
        log(f"kubelet is in {cgroups[0]}")
        self.assertNotIn("kubelet.service", Path(f"/proc/{self.node.kubelet_pid()}/cgroup").read_text())
        output, _ = self.install()
        self.assertIn("is Ready through jackstay", output)
        self.assertIn("kubelet.service", self.node.ctl("cat", "jackstay-renew.service").stdout)
        self.uninstall()
        self.node.wait_ready(READY)

    def test_3_node_that_does_not_become_ready_is_reverted(self):
        """kubelet cannot reach jackstay: within the timeout and a minute the node is as before."""
        sh("nft", "add table inet installed; add chain inet installed output { type filter hook output priority 0; };"
           "add rule inet installed output oif lo tcp dport 7443 drop")
        self.addCleanup(sh, "nft", "delete", "table", "inet", "installed", check=False)
        begun = time.monotonic()
        output, _ = self.install("--timeout", "10s", code=1)
        self.assertIn("was undone", output)
        self.assertIn("Ready as before", output)
        within(self, "install that cannot work: from the command to Ready as before", time.monotonic() - begun, "s", READY)
        self.assert_as_before()

    def test_4_killed_at_random_moments(self):
        """SIGKILL at random moments while an installation changes the node: of the installing process alone, or of the whole
        node."""
        changing = self.duration_of_changes()
        rng = random.Random(33)
        for number in range(20 if LONG else 2):
            delay, reboot = rng.uniform(0, changing), number % 2 == 1
            logfile = self.rig.dir / f"killed-{number}.log"
            child = self.node.start_background(logfile, *self.node.install_argv())
            wait_for("the first change", (JOURNAL / "journal.json").exists, 30, pause=0.005)
            time.sleep(delay)  # the fault itself: a random moment
            self.kill(child, b"install", reboot)
            with self.subTest(number=number, delay=round(delay, 2), reboot=reboot):
                ready = self.node.wait_ready(4 * READY)
                within(self, f"killed {delay:.2f} s after the first change{', with the node' if reboot else ''}: Ready", ready, "s", READY)
                works, why = self.node.has_working_kubeconfig()
                self.assertTrue(works, why + logfile.read_text())
                # It is undone or complete, without another command. Only before the guard runs, the next command has to remove the
                # few files that are new by then; kubelet is untouched.
                wait_for("the end of the guard", lambda: not pids_of("jackstay", b"--recover"), 120)
                journal = JOURNAL / "journal.json"
                phase = json.loads(journal.read_text())["phase"] if journal.exists() else "undone"
                last = logfile.read_text().splitlines()[-1]
                log(f"killed {delay:.2f} of {changing:.2f} s after the first change{', with the node' if reboot else ''} ({last[:60]!r}): {phase}")
                self.assertIn(phase, ("undone", "installed", "prepared"))
                self.assertEqual(SERVER in KUBELET_CONF.read_text(), phase == "installed")
                if phase == "prepared":
                    self.assertFalse(Path("/etc/jackstay").exists())
                if phase != "undone":
                    self.uninstall()
                    self.node.wait_ready(4 * READY)
                self.assert_as_before()
        # An installation completes after all of these.
        self.install()
        self.uninstall()
        self.node.wait_ready(4 * READY)
        self.assert_as_before()

    def duration_of_changes(self):
        """How long a complete installation changes the node, in seconds."""
        child = self.node.start_background(self.rig.dir / "complete.log", *self.node.install_argv())
        wait_for("the first change", (JOURNAL / "journal.json").exists, 30, pause=0.005)
        begun = time.monotonic()
        self.assertEqual(child.wait(120), 0)
        took = time.monotonic() - begun
        self.uninstall()
        return took

    def kill(self, child, command, reboot):
        """Kills the command and not its guard, or everything on the node at once."""
        if reboot:
            self.node.power_off()
            child.wait(10)
            self.node.boot()
        else:
            for pid in pids_of("jackstay", command):
                if b"--recover" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    sh("kill", "-KILL", str(pid), check=False)
            child.wait(10)

    @long_form("the unit tests of install::undo interrupt every step")
    def test_5_killed_uninstall_is_continued(self):
        for reboot in (False, True):
            with self.subTest(reboot=reboot):
                self.install()
                child = self.node.start_background(self.rig.dir / "uninstall.log", self.node.program(), "uninstall")
                wait_for("the change of the kubeconfig", lambda: SERVER not in KUBELET_CONF.read_text(), 30, pause=0.005)
                self.kill(child, b"uninstall", reboot)
                self.node.wait_ready(4 * READY)
                wait_for("the end of the change", lambda: not JOURNAL.exists() and not pids_of("jackstay", b"--recover"), 120)
                self.assert_as_before()

    def test_6_bad_input_changes_nothing(self):
        broken, no_server = self.rig.dir / "broken.conf", self.rig.dir / "no-server.conf"
        broken.write_text("apiVersion: v1\nkind: Config\nclusters: 7\n")
        no_server.write_text(KUBELET_CONF.read_text().replace('"server"', '"no-server"'))
        listener = socket.create_server(("127.0.0.1", 7443))
        self.addCleanup(listener.close)
        own = json.loads(KUBELET_CONF.read_text())
        own["clusters"][0]["cluster"]["server"] = f"https://{ADDRESSES['a']}:{PORT}"
        on_this_node = self.rig.dir / "own.conf"
        on_this_node.write_text(json.dumps(own))
        for name, file, expected in (
                ("a kubeconfig that cannot be parsed", broken, "kubelet.conf: line 3: clusters: expected a list"),
                ("a kubeconfig without a server", no_server, "has no server"),
                ("the apiservers are the node itself", on_this_node, "every known apiserver is on this node")):
            with self.subTest(name):
                done = self.node.inside("unshare", "--mount", "sh", "-c", f'mount --bind "$0" {KUBELET_CONF} && exec "$@"', file,
                                        self.node.program(), "install")
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(expected, done.stderr)
                self.assert_as_before()
        for name, argv, expected in (
                ("a port in use", [], "127.0.0.1:7443 (--listen)"),
                ("an apiserver that does not answer", ["--listen", "127.0.0.1:7444", "--endpoint", "apiserver-a.test:1"], "--ignore-findings")):
            with self.subTest(name):
                output, _ = self.install(*argv, code=2)
                self.assertIn(expected, output)
                self.assert_as_before()
        with self.subTest("a file system without write access"):
            done = self.node.inside("unshare", "--mount", "sh", "-c", 'mount --bind /etc/systemd /etc/systemd && mount -o remount,ro,bind /etc/systemd && exec "$@"',
                                    "sh", *self.node.install_argv("--listen", "127.0.0.1:7444"))
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertRegex(done.stderr, "nothing changed: /etc/systemd/system/.* cannot be written.*Read-only")
            self.assert_as_before()

    def test_6b_full_disk_changes_nothing(self):
        """Each directory that an installation writes is full: the error names the file, and the node is as before."""
        for directory, code, expected in (
                (JOURNAL, 2, "nothing changed: "),
                (Path("/etc/systemd/system"), 1, "kubelet was not touched"),
                (Path("/etc/jackstay"), 1, "nothing written: "),
                (Path("/etc/kubernetes"), 1, "nothing written: "))[:4 if LONG else 2]:
            with self.subTest(directory):
                # Its files, and no space for another one. The namespace is that of the command alone.
                full = ('mkdir -p "$0" && old=$(mktemp -d) && cp -a "$0/." "$old" && mount -t tmpfs -o size=1m tmpfs "$0" && cp -a "$old/." "$0" && rm -r "$old" &&'
                        '{ dd if=/dev/zero of="$0/fill" bs=4096 2>/dev/null; exec "$@"; }')
                existed = directory.exists()
                done = self.node.inside("unshare", "--mount", "sh", "-c", full, directory, *self.node.install_argv())
                if not existed:
                    directory.rmdir()
                self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                self.assertIn("No space left on device", done.stderr)
                self.assertIn(expected, done.stderr)
                self.assert_as_before()

    @long_form("the lock has unit tests")
    def test_6c_two_installers_at_once(self):
        """The second waits for the first, says so, and changes nothing."""
        logfile = self.rig.dir / "first.log"
        first = self.node.start_background(logfile, *self.node.install_argv())
        wait_for("the first change", (JOURNAL / "journal.json").exists, 30, pause=0.005)
        done = self.node.inside(*self.node.install_argv("-o", "json"))
        self.assertEqual((first.wait(60), done.returncode), (0, 0), logfile.read_text() + done.stderr)
        self.assertIn("another `jackstay install` or `jackstay uninstall` runs: waiting for it", done.stderr)
        self.assertEqual(json.loads(done.stdout)["outcome"], "unchanged")
        self.uninstall()
        self.assert_as_before()

    @long_form("test_4 kills the installer at random moments")
    def test_6d_kubelet_restarts_by_itself_during_an_installation(self):
        rng, changing = random.Random(14), self.duration_of_changes()
        for number in range(6):
            delay = rng.uniform(0, changing)
            with self.subTest(number=number, delay=round(delay, 2)):
                child = self.node.start_background(self.rig.dir / f"kubelet-{number}.log", *self.node.install_argv())
                wait_for("the first change", (JOURNAL / "journal.json").exists, 30, pause=0.005)
                time.sleep(delay)  # the fault itself: a random moment
                for pid in pids_of("kubelet", None):
                    sh("kill", "-KILL", str(pid), check=False)
                self.assertEqual(child.wait(120), 0, Path(self.rig.dir / f"kubelet-{number}.log").read_text())
                self.node.wait_ready(4 * READY)
                self.assertIn(SERVER, KUBELET_CONF.read_text())
                self.uninstall()
                self.node.wait_ready(4 * READY)
                self.assert_as_before()

    @long_form("no file of jackstay in /var is executed")
    def test_6e_var_without_executables(self):
        self.node.inside("mount", "--rbind", "/var", "/var", check=True)
        self.addCleanup(self.node.inside, "umount", "--recursive", "--lazy", "/var")
        self.node.inside("sh", "-c", "for mount in $(findmnt -Rlno TARGET /var); do mount -o remount,bind,noexec $mount; done", check=True)
        self.assertNotEqual(self.node.inside("sh", "-c", f"cp /bin/true {JOURNAL.parent}/true && {JOURNAL.parent}/true").returncode, 0)
        (JOURNAL.parent / "true").unlink()
        self.install()
        self.uninstall()
        self.node.wait_ready(4 * READY)
        self.assert_as_before()

    @unittest.skipUnless(AARCH64, "JACKSTAY_AARCH64 names no binary")
    def test_6f_other_architecture_in_an_emulator(self):
        """The binary of another architecture plans the same installation, and writes a configuration that it accepts."""
        machine = int.from_bytes(Path(AARCH64).read_bytes()[18:20], "little")  # e_machine of elf(5)
        emulator = {183: "qemu-aarch64-static", 62: "qemu-x86_64-static"}[machine]
        program = self.node.home / "emulated"
        program.write_bytes(Path(AARCH64).read_bytes())
        program.chmod(0o755)

        def run(*argv):
            done = self.node.inside(emulator, program, *argv)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

        def plan(text):
            planned = json.loads(text)
            steps = [(step["action"], step.get("path"), step.get("mode"), step["description"]) for step in planned["steps"]]
            return planned["outcome"], planned["node"], steps
        argv = self.node.install_argv("--dry-run", "-o", "json")
        self.assertEqual(plan(run(*argv[1:])), plan(self.node.inside(*argv, check=True).stdout))
        files = self.rig.dir / "emulated"
        files.mkdir()
        run("kubeconfig", "--mode", "terminate", "--kubeconfig", KUBELET_CONF, "--out", files / "kubelet.conf", "--config-out", files / "jackstay.yaml")
        self.assertIn(SERVER, (files / "kubelet.conf").read_text())
        self.assertTrue(json.loads(run("check", "--config", files / "jackstay.yaml", "-o", "json"))["ok"])
        self.assert_as_before()

    @long_form("the unit tests of install::undo have each kind of change")
    def test_7_changed_files_survive_uninstall(self):
        """An edited configuration is kept, and a kubeconfig that others have changed keeps their change."""
        self.install()
        config = Path("/etc/jackstay/jackstay.yaml")
        config.write_text(config.read_text() + "# edited\n")
        done = self.node.jackstay("kubeconfig", "--renew", "--force", "--kubeconfig", KUBELET_CONF, "--config-out", config)
        self.assertEqual(done.returncode, 0, done.stderr)
        output = self.uninstall()
        self.assertIn(f"kept {config}", output)
        config.unlink()
        config.parent.rmdir()
        self.node.wait_ready(4 * READY)
        self.assert_as_before()

    @unittest.skipUnless(DEB, "JACKSTAY_DEB names no package")
    def test_8_package(self):
        """The package: installed, used by `jackstay install`, upgraded without a gap, and removed, which reverts the node first."""
        def dpkg(*argv):
            done = self.node.inside("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", *argv)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        dpkg("--install", DEB)
        self.assertEqual(self.node.ctl("is-enabled", "jackstay.service").stdout.strip(), "enabled")
        done = self.node.inside("/usr/bin/jackstay", "install", *self.node.endpoints())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("write /etc/systemd/system/jackstay.service", done.stdout)
        self.assertEqual(self.rig.faults.flows(self.node.kubelet_pid()), {}, "kubelet has a connection that bypasses jackstay")
        before = pids_of()
        dpkg("--install", DEB)
        wait_for("the new version alone", lambda: len(pids_of()) == 1 and pids_of() != before, 40)
        record("package upgraded under kubelet: Ready", self.node.wait_ready(4 * READY), "s")
        # Removed while kubelet uses it.
        begun = time.monotonic()
        dpkg("--remove", "jackstay")
        self.assertNotIn(SERVER, KUBELET_CONF.read_text())
        self.node.wait_ready(4 * READY)
        within(self, "package removed under kubelet: Ready", time.monotonic() - begun, "s", READY)
        dpkg("--purge", "jackstay")
        self.assertFalse(JOURNAL.exists())
        self.assertEqual(pids_of(), [])
        # `uninstall` leaves the package's unit enabled, as it was.
        dpkg("--install", DEB)
        self.node.inside("/usr/bin/jackstay", "install", *self.node.endpoints(), check=True)
        self.node.inside("/usr/bin/jackstay", "uninstall", check=True)
        self.assertEqual(self.node.ctl("is-enabled", "jackstay.service").stdout.strip(), "enabled")
        self.assertEqual(pids_of(), [])
        dpkg("--purge", "jackstay")

    @long_form("the unit tests of install::host choose the directory")
    def test_9_read_only_usr(self):
        """/usr/local/bin is read-only, as on Flatcar: the program goes to /opt/bin."""
        for words in (("-t", "tmpfs", "tmpfs", "/opt"), ("-o", "remount,bind,ro", "/usr/local/bin")):
            self.node.inside("mount", *words, check=True)
        self.addCleanup(self.node.inside, "umount", "/opt", check=True)
        self.addCleanup(self.node.inside, "mount", "-o", "remount,bind,rw", "/usr/local/bin", check=True)
        output, _ = self.install()
        self.assertIn("write /opt/bin/jackstay (0755)", output)
        self.assertIn("ExecStart=/opt/bin/jackstay run", self.node.ctl("cat", "jackstay.service").stdout)
        self.uninstall()
        self.node.wait_ready(READY)
        self.assertEqual(self.node.inside("ls", "/opt").stdout, "")
        self.assert_as_before()

    def another_version(self):
        """The program with another content."""
        program = self.node.home / "2" / "jackstay"
        program.parent.mkdir(exist_ok=True)
        program.write_bytes(self.node.program().read_bytes() + b"\nversion 2")
        program.chmod(0o755)
        return program

    def assert_runs(self, program):
        """The program is installed, and the process that serves executes it."""
        pid, = pids_of()
        for path in (f"/proc/{pid}/exe", self.node.bin / "jackstay"):
            self.assertEqual(Path(path).read_bytes() == program.read_bytes(), True, f"{path} is not {program}")
        return pid

    def test_10_another_version_replaces_the_running_one(self):
        """`jackstay install` of another version: without a gap, undone if that version cannot serve, and complete or undone
        after a kill."""
        self.install()
        old, new, kubelet = self.assert_runs(self.node.program()), self.another_version(), self.node.kubelet_pid()
        config, refused, stop = Path("/etc/jackstay/jackstay.yaml"), [], threading.Event()
        text = config.read_text()

        def connect():
            while not stop.is_set():
                try:
                    socket.create_connection(("127.0.0.1", 7443), 5).close()
                except OSError as error:
                    refused.append(str(error))
                time.sleep(0.01)  # the load
        load = threading.Thread(target=connect)
        load.start()
        try:
            def upgrade(code, *more):
                done = self.node.inside(new, *self.node.install_argv(*more)[1:])
                self.assertEqual(done.returncode, code, f"{done.stdout}{done.stderr}{self.node.logs()}")
                return done
            planned = json.loads(upgrade(0, "--dry-run", "-o", "json").stdout)
            self.assertEqual((planned["ok"], planned["outcome"], planned["steps"][0]["path"]), (True, "planned", "/usr/local/bin/jackstay"))
            self.assert_runs(self.node.program())
            # A version that cannot serve.
            config.write_text("listeners: 7\n")
            self.assertIn("the upgrade failed and was undone", upgrade(1).stderr)
            config.write_text(text)
            self.assertEqual(self.assert_runs(self.node.program()), old)
            result = json.loads(upgrade(0, "-o", "json").stdout)
            self.assertEqual((result["ok"], result["outcome"], result["node"]), (True, "upgraded", self.node.NAME))
            wait_for("the new version alone", lambda: len(pids_of()) == 1, 40)
            self.assertNotEqual(self.assert_runs(new), old)
            self.assertEqual(json.loads(upgrade(0, "-o", "json").stdout)["outcome"], "unchanged")
        finally:
            stop.set()
            load.join()
        self.assertEqual((refused, self.node.kubelet_pid()), ([], kubelet), "kubelet is not restarted")
        self.upgrade_killed(new)
        self.uninstall()
        self.node.wait_ready(4 * READY)
        self.assert_as_before()

    def upgrade_killed(self, new):
        """SIGKILL of the installing process, or of the whole node, while it changes the version."""
        rng, journal = random.Random(47), JOURNAL / "journal.json"
        for number in range(8 if LONG else 1):
            target = self.node.program() if number % 2 == 0 else new
            delay, reboot = rng.uniform(0, 0.6), number % 4 >= 1
            logfile = self.rig.dir / f"upgrade-killed-{number}.log"
            child = self.node.start_background(logfile, target, *self.node.install_argv()[1:])
            wait_for("the first change", lambda: '"upgrade"' in journal.read_text() or child.poll() is not None, 30, pause=0.005)
            time.sleep(delay)  # the fault itself: a random moment
            self.kill(child, b"install", reboot)
            with self.subTest(number=number, delay=round(delay, 2), reboot=reboot):
                self.node.wait_ready(4 * READY)
                wait_for("the end of the guard", lambda: not pids_of("jackstay", b"--recover"), 120)
                wait_for("one process", lambda: len(pids_of("jackstay", b"run")) == 1, 40)
                left = json.loads(journal.read_text())
                log(f"upgrade killed after {delay:.2f} s{', with the node' if reboot else ''}: {'pending' if left.get('upgrade') else 'complete or undone'}")
                if left.get("upgrade"):  # before the guard ran: the next command ends it
                    self.assertFalse(reboot)
                done = self.node.inside(target, *self.node.install_argv()[1:])
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                wait_for("one process", lambda: len(pids_of("jackstay", b"run")) == 1, 40)
                self.assert_runs(target)
                self.assertNotIn("upgrade", json.loads(journal.read_text()))

    def import_image(self, program, version):
        """Imports the image of a program; returns the program in it."""
        archive = self.node.home / f"{version}.tar"
        sh(DEPLOY / "image", program, archive, env={**os.environ, "JACKSTAY_VERSION": version})
        self.node.ctr("images", "import", archive, check=True)
        return program

    def assert_pinned(self, image):
        listed = self.node.ctr("images", "ls", "-q", f'name=={image},labels."io.cri-containerd.pinned"==pinned').stdout
        self.assertEqual(listed.split(), [image])

    @long_form("the unit has the same steps")
    def test_9_static_pod(self):
        from deployed import dist_file
        image = re.search(r"image: (\S+)", Path(__file__).parents[2].joinpath("deploy/static-pod/jackstay.yaml").read_text())[1]
        missing, _ = self.install("--as", "static-pod", "--image", "localhost/none:1", code=2)
        self.assertIn("the image localhost/none:1 is not on this node", missing)
        self.assert_as_before()
        self.node.ctr("images", "import", dist_file("jackstay-image.tar"), check=True)
        self.install("--as", "static-pod", "--image", image)
        self.assertTrue((MANIFESTS / "jackstay.yaml").exists())
        self.assert_pinned(image)
        # Another version: with its image, and not without it.
        new = self.another_version()
        other = image.rpartition(":")[0] + ":other"
        argv = [new, *self.node.install_argv("--as", "static-pod", "--image", other)[1:]]
        done = self.node.inside(*argv)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(f"the image {other} is not on this node", done.stderr)
        contained = self.import_image(new, "other")
        done = self.node.inside(*argv)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("is upgraded to", done.stdout)
        self.assert_pinned(other)
        pid, = pids_of()
        self.assertTrue(Path(f"/proc/{pid}/exe").read_bytes() == contained.read_bytes(), "the pod is of the other version")
        self.assertIn("already", self.node.inside(*argv).stdout)
        self.node.wait_ready(4 * READY)
        self.uninstall()
        self.node.wait_ready(4 * READY)
        self.assert_as_before()
