"""Installs, upgrades and removes the packages under the systemd that `boot` started; runs inside its namespaces."""

import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import unittest
from pathlib import Path

UNIT = "jackstay.service"
CONFIG, STATE = Path("/etc/jackstay/jackstay.yaml"), Path("/var/lib/jackstay")
LISTENER, TLS_LISTENER, SERVER = ("127.0.0.1", 7443), ("127.0.0.1", 7444), ("127.0.0.1", 6443)
LOG, DROP_IN = Path("/var/log/jackstay.log"), Path("/run/systemd/system/jackstay.service.d")
CONFIGURATION = f"""
upstreams: [{{ name: control-plane, endpoints: ["{SERVER[0]}:{SERVER[1]}"] }}]
listeners: [{{ name: apiserver, mode: passthrough, bind: ["{LISTENER[0]}:{LISTENER[1]}"], upstream: control-plane }}]
"""
BROKEN = CONFIGURATION.replace("upstream: control-plane", "upstream: another")
# Times at which dpkg is killed, besides those that depend on what it does.
SEED = int(os.environ.get("JACKSTAY_SEED") or time.time())


def sh(*command, check=True, **options):
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False, timeout=60, **options)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def wait_for(what, condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            log = LOG.read_text()[-4000:] if LOG.exists() else ""
            raise AssertionError(f"no {what} within {seconds} s\n{log}")
        time.sleep(0.02)


def show(name):
    return sh("systemctl", "show", "--property", name, "--value", UNIT).strip()


def main_pid():
    return int(show("MainPID"))


def state():
    """What dpkg knows of the package, such as `installed 1.0.0-1`."""
    return sh("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", "jackstay", check=False).strip()


def install(version):
    return sh("dpkg", "--install", f"/packages/{version}.deb")


def serves():
    try:
        with Client() as client:
            return client.echoes()
    except OSError:
        return False


def accepts(port):
    """Whether a socket listens there, also one that systemd keeps while no process accepts."""
    try:
        with socket.create_connection((LISTENER[0], port), 5):
            return True
    except ConnectionRefusedError:
        return False


class Server:
    """Takes the place of an apiserver: answers jackstay's probes with 200, and sends back everything else."""

    def __init__(self):
        files = "/tmp/server.crt", "/tmp/server.key"
        sh("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=apiserver", "-days", "1",
           "-addext", f"subjectAltName=IP:{SERVER[0]}", "-out", files[0], "-keyout", files[1])
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(*files)
        self.tls.set_alpn_protocols(["http/1.1"])
        self.listener = socket.create_server(SERVER, backlog=100)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        try:
            with self.tls.wrap_socket(connection, server_side=True) as stream:
                while data := stream.recv(4096):
                    stream.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" if data.startswith(b"GET ") else data)
        except OSError:
            pass


class Client:
    """One connection through jackstay."""

    TLS = ssl.create_default_context()
    TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE

    def __init__(self):
        self.socket = self.TLS.wrap_socket(socket.create_connection(LISTENER, 5))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def echoes(self):
        self.socket.sendall(b"ping")
        return self.socket.recv(4) == b"ping"


class Connecting:
    """Opens connections all the time, and counts those that fail."""

    def __init__(self):
        self.opened, self.failed, self.running = 0, [], True
        self.slowest = 0  # seconds from connect to the first byte
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while self.running:
            begun = time.monotonic()
            try:
                with Client() as client:
                    assert client.echoes(), "closed without an answer"
                self.opened += 1
                self.slowest = max(self.slowest, time.monotonic() - begun)
            except (OSError, AssertionError) as error:
                self.failed.append(f"{time.strftime('%H:%M:%S', time.gmtime())} {error}")
            time.sleep(0.005)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.running = False
        self.thread.join()


class LongLived(Connecting):
    """One connection with a request every 20 ms. When it ends it is opened again at once; only that must not fail."""

    def __init__(self):
        super().__init__()
        self.ended = 0

    def run(self):
        while self.running:
            begun = time.monotonic()
            try:
                client = Client()
            except OSError as error:
                self.failed.append(f"{time.strftime('%H:%M:%S', time.gmtime())} {error}")
                continue
            with client:
                try:
                    while client.echoes():
                        if begun:
                            self.slowest, begun, self.opened = max(self.slowest, time.monotonic() - begun), 0, self.opened + 1
                        time.sleep(0.02)
                        if not self.running:
                            return
                except OSError:
                    pass
                self.ended += 1


class Requesting(Connecting):
    """Opens connections over HTTP/1.1 all the time, with one request on each, and counts those without a response. The status
    does not count: the server does not speak HTTP/2."""

    def run(self):
        while self.running:
            begun = time.monotonic()
            try:
                answer = get_version()
                assert answer.startswith(b"HTTP/1.1 "), f"closed without a response: {answer}"
                self.opened += 1
                self.slowest = max(self.slowest, time.monotonic() - begun)
            except (OSError, AssertionError) as error:
                self.failed.append(f"{time.strftime('%H:%M:%S', time.gmtime())} {error}")
            time.sleep(0.005)


def get_version():
    """The first bytes of a response at L7."""
    with Client.TLS.wrap_socket(socket.create_connection(TLS_LISTENER, 5)) as stream:
        stream.sendall(b"GET /version HTTP/1.1\r\nhost: jackstay\r\nconnection: close\r\n\r\n")
        return stream.recv(9)


def serves_requests():
    try:
        return get_version() == b"HTTP/1.1 "
    except OSError:
        return False


def both_modes():
    """A configuration with a listener for L4 and one for L7, whose certificate is that of the server."""
    CONFIG.parent.mkdir(exist_ok=True)
    for name in ("crt", "key"):
        shutil.copy(f"/tmp/server.{name}", CONFIG.parent / f"tls.{name}")
    upstream, listener = CONFIGURATION.strip().split("\n")
    upstream = upstream.replace(" }]", f", tls: {{ ca_file: {CONFIG.parent}/tls.crt }} }}]")
    return f"""{upstream}
listeners:
  - {listener.removeprefix('listeners: [').removesuffix(']')}
  - name: l7
    bind: ["{TLS_LISTENER[0]}:{TLS_LISTENER[1]}"]
    upstream: control-plane
    tls: {{ cert_file: {CONFIG.parent}/tls.crt, key_file: {CONFIG.parent}/tls.key }}
"""


class Node(unittest.TestCase):
    """A machine on which jackstay is not installed."""

    @classmethod
    def setUpClass(cls):
        # systemd has no journal here.
        DROP_IN.mkdir(parents=True, exist_ok=True)
        (DROP_IN / "test.conf").write_text(f"[Service]\nStandardOutput=append:{LOG}\nStandardError=inherit\n")
        sh("systemctl", "daemon-reload")

    def setUp(self):
        self.clean()

    def tearDown(self):
        log = LOG.read_text() if LOG.exists() else ""
        self.assertNotIn("panicked", log)
        Path("/packages", f"{self.id()}.log").write_text(log)

    def clean(self):
        sh("dpkg", "--purge", "jackstay", check=False)
        sh("rpm", "--erase", "jackstay", check=False)
        sh("systemctl", "reset-failed", check=False)
        shutil.rmtree(CONFIG.parent, ignore_errors=True)
        LOG.unlink(missing_ok=True)

    @staticmethod
    def configure(text=CONFIGURATION):
        CONFIG.parent.mkdir(exist_ok=True)
        fresh = CONFIG.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(CONFIG)

    def start_installed(self):
        """Installs version 1 with a configuration; returns the PID of its process."""
        self.configure()
        install(1)
        wait_for("served connection", serves)
        return main_pid()

    def assert_replaced(self, pid):
        """The process is another one, of the installed file."""
        wait_for("another process", lambda: main_pid() not in (0, pid))
        # A process that systemd has started is systemd until it executes the program.
        wait_for("the installed program", lambda: os.readlink(f"/proc/{main_pid()}/exe") == "/usr/bin/jackstay")
        self.assertEqual(Path(f"/proc/{main_pid()}/exe").read_bytes(), Path("/usr/bin/jackstay").read_bytes())
        wait_for("served connection", serves)


class Files(unittest.TestCase):
    """What the packages contain."""

    def test_both_packages_have_the_same_files(self):
        deb = {line.split()[5].removeprefix(".") for line in sh("dpkg-deb", "--contents", "/packages/1.deb").splitlines() if not line.startswith("d")}
        rpm = set(sh("rpm", "--query", "--list", "--package", "/packages/1.rpm").splitlines())

        def paths(names):
            names = {name.removesuffix(".gz").replace("vendor-completions", "site-functions") for name in names}
            return {name for name in names if not name.startswith(("/usr/share/doc", "/usr/share/licenses"))}
        self.assertEqual(paths(deb), paths(rpm))
        for name in ("/usr/bin/jackstay", "/usr/bin/kubectl-jackstay", "/usr/bin/kubectl_complete-jackstay", "/usr/lib/systemd/system/jackstay.service",
                     "/usr/share/man/man1/jackstay-doctor.1", "/usr/lib/jackstay/nftables/install.sh"):
            self.assertIn(name, paths(deb))
        for name in ("/usr/share/doc/jackstay/copyright", "/usr/share/doc/jackstay/THIRD-PARTY-NOTICES"):
            self.assertIn(name, deb)
        self.assertIn("/usr/share/licenses/jackstay/LICENSE", rpm)

    def test_nothing_is_for_usr_local_or_writable_by_others(self):
        sh("dpkg-deb", "--extract", "/packages/1.deb", "/tmp/extracted")
        for file in Path("/tmp/extracted").rglob("*"):
            if file.is_file() and not file.is_symlink():
                self.assertEqual(file.stat().st_mode & 0o022, 0, file)
                if "usr/lib" in str(file):
                    self.assertNotIn("/usr/local", file.read_text(), file)
        shutil.rmtree("/tmp/extracted")

    def test_archive_has_the_program_licences_and_deployment(self):
        names = {name.partition("/")[2] for name in sh("tar", "--list", "--file", "/packages/1.tar.gz").splitlines()}
        for name in ("jackstay", "LICENSE", "THIRD-PARTY-NOTICES", "man/jackstay.1", "completions/_jackstay",
                     "config/jackstay.yaml", "deploy/README.md", "deploy/static-pod/jackstay.yaml", "deploy/systemd/jackstay.service"):
            self.assertIn(name, names)


class Deb(Node):
    """The Debian package."""

    def test_installs_without_configuration_and_starts_with_one(self):
        self.assertIn("/etc/jackstay/jackstay.yaml", install(1))
        self.assertEqual(state(), "installed 1.0.0-1")
        self.assertEqual((show("ActiveState"), show("UnitFileState"), main_pid()), ("inactive", "enabled", 0))
        sh("systemctl", "start", UNIT)
        self.assertEqual((show("ActiveState"), show("ConditionResult")), ("inactive", "no"))
        verified = sh("systemd-analyze", "verify", "--man=no", *sorted(Path("/usr/lib/systemd/system").glob("jackstay*")), check=False)
        self.assertEqual(verified, "")
        self.assertIn("jackstay:", sh("getent", "passwd", "jackstay"))
        self.assertTrue(CONFIG.parent.is_dir())
        self.assertIn("Usage: kubectl jackstay", sh("kubectl-jackstay", "--help"))
        self.assertRegex(sh("kubectl_complete-jackstay", "sta"), r"^status\t.*\n:4$")
        self.configure()
        sh("systemctl", "start", UNIT)
        self.assertTrue(serves())

    def test_upgrade_keeps_connections(self):
        pid = self.start_installed()
        with Client() as client, Connecting() as connecting:
            self.assertTrue(client.echoes())
            install(2)
            self.assertEqual(state(), "installed 1.1.0-1")
            self.assertTrue(client.echoes(), "a connection that was open before the upgrade")
            self.assert_replaced(pid)
            self.assertTrue(client.echoes())
        self.assertEqual(connecting.failed[:5], [])
        self.assertGreater(connecting.opened, 0)
        print(f"{connecting.opened} connections during the upgrade, none failed")

    def test_upgrade_with_broken_configuration_keeps_the_running_process(self):
        pid = self.start_installed()
        self.configure(BROKEN)
        with Client() as client, Connecting() as connecting:
            output = install(2)
            self.assertTrue(client.echoes())
        self.assertEqual((state(), main_pid(), connecting.failed), ("installed 1.1.0-1", pid, []))
        self.assertIn("still has the previous version", output)
        self.assertIn("another", output, "the reason")
        self.configure()
        sh("/usr/lib/jackstay/take-over")
        self.assert_replaced(pid)

    def test_stopped_or_disabled_service(self):
        self.start_installed()
        sh("systemctl", "disable", "--now", UNIT)
        install(2)
        self.assertEqual((show("UnitFileState"), main_pid()), ("disabled", 0))

    def test_port_in_use(self):
        self.configure()
        with socket.create_server(LISTENER):
            output = install(1)
            self.assertEqual(state(), "installed 1.0.0-1")
            self.assertIn("the service does not start", output)
            self.assertIn("127.0.0.1:7443", LOG.read_text())
        wait_for("served connection, after the port is free", serves)

    def test_interrupted_upgrades(self):
        """dpkg and its scripts are killed at different moments; `dpkg --configure -a` or the same command again finishes."""
        self.start_installed()
        moments = {
            "while it unpacks": Path("/usr/bin/jackstay.dpkg-new").exists,
            "after it has unpacked": lambda: state().startswith(("unpacked 1", "half-configured 1")),
            "while the new process takes over": lambda: "/usr/lib/jackstay/take-over" in sh("ps", "-eo", "args"),
        }
        chosen = random.Random(SEED)
        for _ in range(3):
            delay = chosen.uniform(0, 1.5)
            moments[f"after {delay:.2f} s (seed {SEED})"] = lambda until=[delay]: self.elapsed > until[0]
        with Connecting() as connecting:
            for number, (moment, reached) in enumerate(moments.items()):
                version = 2 - number % 2
                pid = main_pid()
                left = self.interrupt(version, reached)
                sh("dpkg", "--configure", "-a", check=False)
                if state().split()[0] != "installed":
                    install(version)
                print(f"killed {moment}: {left}, then {state()}")
                install(version)
                self.assertEqual(state(), f"installed 1.{version - 1}.0-1")
                self.assert_replaced(pid)
        self.assertEqual(connecting.failed[:5], [])

    def interrupt(self, version, reached):
        """Kills dpkg and all of its children when `reached`; returns what dpkg knows then."""
        dpkg = subprocess.Popen(["dpkg", "--install", f"/packages/{version}.deb"], stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        began = time.monotonic()
        self.elapsed = 0
        while dpkg.poll() is None and not reached():
            self.elapsed = time.monotonic() - began
        if dpkg.poll() is None:
            os.killpg(dpkg.pid, signal.SIGKILL)
        dpkg.wait()
        return state()

    def test_remove_and_purge(self):
        pid = self.start_installed()
        with Client() as client:
            self.assertTrue(client.echoes())
            sh("dpkg", "--remove", "jackstay")
        self.assertFalse(Path(f"/proc/{pid}").exists())
        self.assertFalse(Path("/usr/bin/jackstay").exists())
        self.assertFalse(serves())
        self.assertTrue(CONFIG.exists() and STATE.is_dir())
        install(2)
        wait_for("served connection, after another installation", serves)
        sh("dpkg", "--purge", "jackstay")
        self.assertFalse(STATE.exists())
        self.assertTrue(CONFIG.exists(), "a file of the administrator")
        left = sh("find", "/etc/systemd", "/usr/lib", "/usr/bin", "/var/lib/systemd", "/run/systemd/system", "-name", "*jackstay*")
        self.assertEqual(left, f"{DROP_IN}\n", "the drop-in of this test")

    def test_removal_is_refused_while_kubelet_uses_jackstay(self):
        pid = self.start_installed()
        kubeconfig, permission = Path("/etc/kubernetes/kubelet.conf"), CONFIG.parent / "allow-removal"
        kubeconfig.parent.mkdir(exist_ok=True)
        self.addCleanup(shutil.rmtree, kubeconfig.parent)
        kubeconfig.write_text("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:7443'}}]\n")
        output = sh("dpkg", "--remove", "jackstay", check=False)
        self.assertIn(f"{kubeconfig} has server: https://127.0.0.1:7443", output)
        self.assertEqual((state(), main_pid()), ("installed 1.0.0-1", pid))
        self.assertTrue(serves())
        permission.touch()
        sh("dpkg", "--remove", "jackstay")
        self.assertFalse(serves())
        permission.unlink()
        install(1)
        kubeconfig.write_text(kubeconfig.read_text().replace("127.0.0.1:7443", "10.0.0.1:6443"))
        sh("dpkg", "--remove", "jackstay")
        self.assertFalse(Path("/usr/bin/jackstay").exists())

    def test_installation_with_umask_077_is_readable(self):
        self.configure()
        shutil.rmtree(CONFIG.parent)
        sh("sh", "-c", "umask 077; dpkg --install /packages/1.deb")
        for path in (Path("/usr/bin/jackstay"), CONFIG.parent):
            self.assertEqual(path.stat().st_mode & 0o777, 0o755, path)

    def test_dynamic_user_is_the_user_of_the_package(self):
        folder = Path("/etc/systemd/system/jackstay.service.d")
        folder.mkdir(parents=True)
        try:
            (folder / "user.conf").write_text("[Service]\nDynamicUser=yes\n")
            pid = self.start_installed()
            uid = re.search(r"^Uid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
            self.assertEqual(sh("id", "--user", "jackstay").strip(), uid)
            install(2)
            self.assert_replaced(pid)
        finally:
            shutil.rmtree(folder)
            sh("dpkg", "--purge", "jackstay")


class OtherProgram(Node):
    """The service runs another program than that of the package."""

    OWN, UNIT_FILE = Path("/usr/local/bin/jackstay"), Path("/etc/systemd/system/jackstay.service")

    def setUp(self):
        super().setUp()
        self.addCleanup(self.remove)
        install(1)
        shutil.copy("/usr/bin/jackstay", self.OWN)
        self.configure()

    def remove(self):
        sh("systemctl", "stop", UNIT, check=False)
        self.OWN.unlink(missing_ok=True)
        self.UNIT_FILE.unlink(missing_ok=True)
        sh("systemctl", "daemon-reload")

    def override(self, program):
        """A unit of the administrator, as `jackstay install` writes it."""
        text = Path("/usr/lib/systemd/system/jackstay.service").read_text()
        self.UNIT_FILE.write_text(text.replace("/usr/bin/jackstay", str(program)))
        sh("systemctl", "daemon-reload")

    def take_over(self):
        done = subprocess.run(["/usr/lib/jackstay/take-over"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stderr

    def test_upgrade_says_that_the_unit_runs_another_program(self):
        self.override(self.OWN)
        sh("systemctl", "start", UNIT)
        wait_for("served connection", serves)
        pid = main_pid()
        with Connecting() as connecting:
            output = install(2)
            self.assertIn(f"nothing is upgraded: jackstay.service runs {self.OWN}, not /usr/bin/jackstay", output)
            self.assertIn(str(self.UNIT_FILE), output)
            code, error = self.take_over()
        self.assertEqual((code, main_pid(), connecting.failed), (3, pid, []), error)
        # As the message says.
        self.UNIT_FILE.unlink()
        sh("systemctl", "daemon-reload")
        sh("systemctl", "restart", UNIT)
        wait_for("served connection", serves)
        self.assertEqual(os.readlink(f"/proc/{main_pid()}/exe"), "/usr/bin/jackstay")

    def test_upgrade_says_that_the_unit_will_start_another_program(self):
        sh("systemctl", "start", UNIT)
        wait_for("served connection", serves)
        pid = main_pid()
        self.override(self.OWN)
        code, error = self.take_over()
        self.assertEqual((code, main_pid()), (3, pid), error)
        self.assertIn(f"runs {self.OWN}", error)
        sh("systemctl", "stop", UNIT)
        code, error = self.take_over()
        self.assertEqual(code, 3, error)
        self.assertIn(f"nothing is upgraded: jackstay.service runs {self.OWN}", install(2))

    def test_unit_of_the_administrator_with_the_program_of_the_package_is_upgraded(self):
        self.override("/usr/bin/jackstay")
        sh("systemctl", "start", UNIT)
        wait_for("served connection", serves)
        pid = main_pid()
        output = install(2)
        self.assertIn(f"{self.UNIT_FILE} replaces the unit of the package", output)
        self.assert_replaced(pid)

    def test_message_names_jackstay_install_that_has_written_the_unit(self):
        self.override(self.OWN)
        journal = Path("/var/lib/jackstay-install/journal.json")
        journal.parent.mkdir()
        self.addCleanup(shutil.rmtree, journal.parent)
        journal.write_text("{}")
        code, error = self.take_over()
        self.assertEqual(code, 3, error)
        self.assertIn("/usr/bin/jackstay install", error)


class Rules(Node):
    """What the units of the package keep while another program empties the rules of nftables."""

    ADDRESS = "10.0.0.5"

    def peer(self):
        """Another host on a link of this one: the prefix of commands that run there."""
        process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        own = os.readlink("/proc/self/ns/net")
        wait_for("a network namespace", lambda: os.readlink(f"/proc/{process.pid}/ns/net") != own)
        prefix = ["nsenter", f"--net=/proc/{process.pid}/ns/net"]
        sh("ip", "link", "add", "node0", "type", "veth", "peer", "name", "peer0", "netns", process.pid)
        for command in (["addr", "add", "10.0.0.2/24", "dev", "node0"], ["link", "set", "node0", "up"]):
            sh("ip", *command)
        for command in (["addr", "add", "10.0.0.3/24", "dev", "peer0"], ["link", "set", "peer0", "up"]):
            sh(*prefix, "ip", *command)
        return prefix

    def test_address_is_silent_on_arp_without_rules(self):
        unit = f"jackstay-address@{self.ADDRESS}.service"
        install(1)
        peer = self.peer()
        settings = [Path(f"/proc/sys/net/ipv4/conf/node0/{name}") for name in ("arp_ignore", "arp_announce")]
        before = [setting.read_text() for setting in settings]

        def answers(address):
            sh(*peer, "ip", "neigh", "flush", "all", check=False)
            connect = f"import socket; socket.create_connection(('{address}', 9), 1)"
            sh(*peer, "python3", "-c", connect, check=False)
            return "lladdr" in sh(*peer, "ip", "neigh", "show", address)
        sh("systemctl", "start", unit)
        self.assertFalse(answers(self.ADDRESS))
        sh("nft", "flush", "ruleset")
        self.assertFalse(answers(self.ADDRESS))
        self.assertTrue(answers("10.0.0.2"), "an address of its own")
        sh("systemctl", "stop", unit)
        self.assertEqual([setting.read_text() for setting in settings], before)

    def test_interception_is_installed_again(self):
        folder = Path("/run/systemd/system/jackstay.service.d")
        (folder / "capability.conf").write_text("[Service]\nCapabilityBoundingSet=CAP_NET_ADMIN\nAmbientCapabilities=CAP_NET_ADMIN\n")
        self.addCleanup((folder / "capability.conf").unlink)
        self.configure(CONFIGURATION.replace("mode: passthrough,", "mode: passthrough, transparent: true,"))
        for variant, priority in (("lb-redirect", 0), ("lb-tproxy", 100)):
            unit = f"jackstay-intercept@{variant}.service"
            (CONFIG.parent / f"intercept-{variant}").write_text(f"VALUES=lb4={self.ADDRESS} lb_port=6443\n")
            install(1)
            sh("systemctl", "start", UNIT, unit)

            def installed(marked=priority):
                return "jackstay_lb" in sh("nft", "list", "tables") and (not marked or "fwmark 0x306b" in sh("ip", "rule", "list"))
            self.assertTrue(installed())
            sh("nft", "flush", "ruleset")
            wait_for("interception", installed, 10)
            if priority:
                sh("ip", "rule", "del", "priority", priority)
                wait_for("routing rule", installed, 10)
            sh("systemctl", "stop", UNIT)
            self.assertEqual(show("ActiveState"), "inactive")
            self.assertFalse(installed())


class Restart(Node):
    """What `systemctl restart` and the restart after a crash cost clients."""

    # The drain of a restart takes 2 s at most; the rest is the start of a process on a loaded machine.
    LONGEST = 6

    def setUp(self):
        super().setUp()
        self.start_installed()

    def assert_served(self, *loads):
        for load in loads:
            self.assertEqual(load.failed[:5], [])
            self.assertGreater(load.opened, 0)
            self.assertLess(load.slowest, self.LONGEST)

    def test_twenty_restarts_refuse_no_connection(self):
        durations = []
        self.configure(both_modes())
        sh("systemctl", "reload", UNIT)
        wait_for("a response at L7", serves_requests)
        with Connecting() as connecting, Requesting() as requesting, LongLived() as first, LongLived() as second:
            for _ in range(20):
                pid, begun = main_pid(), time.monotonic()
                sh("systemctl", "restart", UNIT)
                durations.append(time.monotonic() - begun)
                self.assert_replaced(pid)
        self.assert_served(connecting, requesting, first, second)
        self.assertGreater(first.ended, 0)
        print(f"20 restarts of {max(durations):.2f} s at most: {connecting.opened} connections at L4 and {requesting.opened} at L7, none failed, the "
              f"slowest had its first byte after {max(connecting.slowest, first.slowest, second.slowest):.2f} s and {requesting.slowest:.2f} s; "
              f"{first.ended + second.ended} long-lived ones ended")

    def test_restart_while_the_previous_version_drains(self):
        """As needrestart does when a process drains with a deleted binary."""
        with LongLived() as long_lived, Connecting() as connecting:
            wait_for("long-lived connection", lambda: long_lived.opened)
            install(2)
            begun = time.monotonic()
            sh("systemctl", "restart", UNIT)
            duration = time.monotonic() - begun
        self.assert_served(connecting, long_lived)
        self.assertLess(duration, self.LONGEST)

    def test_killed_process_refuses_no_connection(self):
        with Connecting() as connecting:
            for _ in range(3):
                pid = main_pid()
                opened = connecting.opened
                os.kill(pid, signal.SIGKILL)
                self.assert_replaced(pid)
                wait_for("a later connection", lambda before=opened: connecting.opened > before + 1)
        # The kill resets the connections that are open.
        self.assertEqual([failed for failed in connecting.failed if "refused" in failed], [])
        self.assertLess(connecting.slowest, self.LONGEST)
        print(f"3 kills: {connecting.opened} connections, {len(connecting.failed)} reset, the slowest had its first byte after {connecting.slowest:.2f} s")

    def test_stop_closes_the_sockets_at_once(self):
        with LongLived() as long_lived:
            wait_for("long-lived connection", lambda: long_lived.opened)
            stopping = subprocess.Popen(["systemctl", "stop", UNIT])
            wait_for("refused connection", lambda: not serves(), 5)
            self.assertEqual(show("ActiveState"), "deactivating", "the drain")
            long_lived.running = False
        self.assertEqual(stopping.wait(30), 0)
        sh("systemctl", "start", UNIT)
        wait_for("served connection", serves)

    def test_stored_socket_without_listener_is_closed(self):
        """The configuration has changed when the process starts again after a crash."""
        pid = main_pid()
        sh("systemctl", "stop", UNIT)
        sh("systemctl", "start", UNIT)
        pid = main_pid()
        os.kill(pid, signal.SIGSTOP)  # it does not apply the change itself
        self.configure(CONFIGURATION.replace("7443", "7444"))
        os.kill(pid, signal.SIGKILL)
        wait_for("another process", lambda: main_pid() not in (0, pid))
        wait_for("new listener", lambda: accepts(7444))
        # systemd closes it when it has read the message of the process.
        wait_for("end of the stored socket of a listener that is gone", lambda: not accepts(7443), 5)

    def test_broken_configuration_closes_the_sockets(self):
        pid = main_pid()
        os.kill(pid, signal.SIGSTOP)
        self.configure(BROKEN)
        os.kill(pid, signal.SIGKILL)
        wait_for("refused connection", lambda: not serves(), 10)
        self.configure()
        wait_for("served connection", serves)


def permitted(version):
    """The system calls that the unit permits under a version of systemd: names and groups of `SystemCallFilter=` in their order."""
    groups = json.loads(Path(__file__).with_name("system_calls.json").read_text())[version]

    def expand(word):
        return set().union(*(expand(name) for name in groups[word].split())) if word.startswith("@") else {word}
    # Each list of permitted calls begins with @default (systemd.exec(5)).
    calls = expand("@default")
    for words in re.findall(r"^SystemCallFilter=(.+)$", Path("/usr/lib/systemd/system", UNIT).read_text(), re.MULTILINE):
        named = set().union(*(expand(word) for word in words.lstrip("~").split()))
        calls = calls - named if words.startswith("~") else calls | named
    return calls


class OlderSystemd(Node):
    """The unit with the system calls that other versions of systemd permit it. `system_calls.json` has their groups: of
    src/shared/seccomp-util.c of v239, v249 and v252, and of `systemd-analyze syscall-filter` of 257."""

    DROP_IN = Path("/etc/systemd/system/jackstay.service.d/system-calls.conf")

    def clean(self):
        super().clean()
        shutil.rmtree(self.DROP_IN.parent, ignore_errors=True)
        sh("systemctl", "daemon-reload")

    def test_unit_serves_reloads_takes_over_restarts_and_stops(self):
        for version in ("239", "249", "252", "257"):
            with self.subTest(systemd=version):
                self.clean()
                sh("systemctl", "stop", UNIT, check=False)
                install(1)
                self.permit(permitted(version))
                self.serve()
                self.assertNotIn("not permitted", LOG.read_text())

    def permit(self, calls):
        self.DROP_IN.parent.mkdir(parents=True, exist_ok=True)
        self.DROP_IN.write_text("[Service]\nSystemCallFilter=\nSystemCallFilter=" + " ".join(sorted(calls)) + "\n")
        sh("systemctl", "daemon-reload")

    def serve(self):
        self.configure(both_modes())
        sh("systemctl", "start", UNIT)
        self.assertTrue(self.both_serve())
        sh("systemctl", "reload", UNIT)
        self.assertTrue(self.both_serve())
        pid = main_pid()
        with Connecting() as connecting:
            os.kill(pid, signal.SIGUSR2)
            self.assert_replaced(pid)
        self.assertEqual(connecting.failed, [])
        pid = main_pid()
        sh("systemctl", "restart", UNIT)
        self.assert_replaced(pid)
        self.assertTrue(self.both_serve())
        sh("systemctl", "stop", UNIT)
        self.assertEqual((show("Result"), show("ExecMainStatus")), ("success", "0"))

    def both_serve(self):
        return serves_requests() and serves()


class Rpm(Node):
    """The RPM package, on this Debian: its files, and its scripts under systemd."""

    def test_install_upgrade_and_erase(self):
        def rpm(*arguments):
            return sh("rpm", "--force-debian", "--nodeps", *arguments)
        self.configure()
        rpm("--install", "/packages/1.rpm")
        self.assertIn("Usage: kubectl jackstay", sh("kubectl-jackstay", "--help"))
        self.assertRegex(sh("kubectl_complete-jackstay", "sta"), r"^status\t.*\n:4$")
        sh("systemctl", "enable", "--now", UNIT)
        pid = main_pid()
        with Client() as client, Connecting() as connecting:
            self.assertTrue(client.echoes())
            rpm("--upgrade", "/packages/2.rpm")
            self.assert_replaced(pid)
            self.assertTrue(client.echoes())
        self.assertEqual(connecting.failed[:5], [])
        rpm("--erase", "jackstay")
        self.assertFalse(Path("/usr/bin/jackstay").exists())
        self.assertFalse(serves())


if __name__ == "__main__":
    os.chdir("/")
    Server()
    unittest.main()
