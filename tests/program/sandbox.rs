//! The sandbox of `jackstay run`: its restrictions, their switches, and what must still work inside. The other
//! tests of the binary run inside it too, in mode `kill`.

use std::net;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::child::{Process, first_address};
use crate::support::{
    CONFIGMAPS, TestCluster, pages, replace_symlink, terminate_mode, until, write_config,
};
use jackstay_apiserver::client::Client;
use jackstay_config::{CertPaths, Config, IdentitySource, Seccomp, Switch};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_jackstay");

/// A running jackstay with a configuration file in a directory of its own.
struct Setup {
    cluster: TestCluster,
    config: Config,
    file: PathBuf,
    process: Process,
    admin: net::SocketAddr,
    address: net::SocketAddr,
}

impl Setup {
    async fn start(change: impl FnOnce(&mut Config)) -> Self {
        Self::start_with(change, &[]).await
    }

    async fn start_with(change: impl FnOnce(&mut Config), environment: &[(&str, &str)]) -> Self {
        let cluster = TestCluster::new(1);
        let mut config = cluster.config();
        config.state_dir = Some(cluster.certs.path().join("state"));
        change(&mut config);
        let file = cluster.certs.path().join("jackstay.yaml");
        write_config(&file, &config);
        let mut command = Command::new(BINARY);
        command.args(["run", "--config"]).arg(&file).envs(environment.iter().copied());
        let mut process = Process::spawn(command);
        let admin = first_address(&process.wait_output("the admin endpoint listens").await);
        let address = first_address(&process.wait_output("\"apiserver\"").await);
        Self { cluster, config, file, process, admin, address }
    }

    fn status_output(&self, format: &str) -> String {
        let admin = self.admin.to_string();
        let arguments = ["status", "--admin", &admin, "--output", format];
        let output = Command::new(BINARY).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.status_output("json")).unwrap()
    }

    /// Writes a changed configuration, reloads it, and returns the result.
    async fn reload(&mut self, change: impl FnOnce(&mut Config)) -> Value {
        let reloads = |status: &Value| status["config"]["reloads"].clone();
        let before = reloads(&self.status());
        let mut config = self.config.clone();
        change(&mut config);
        write_config(&self.file, &config);
        self.process.signal("HUP");
        until("the reload has ended", async || reloads(&self.status()) != before).await;
        self.status()["config"]["last_reload"].clone()
    }

    async fn expect_service(&self) {
        let client = Client::connect(self.address, &self.cluster.certs.credentials()).await;
        assert_eq!(client.unwrap().get(CONFIGMAPS).await.unwrap().status, 200);
    }

    /// The lines of `/proc/PID/task/*/status` with these keys, of all threads, each once.
    fn of_threads(&self, keys: &[&str]) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.pid())).unwrap();
        let status = |task: std::io::Result<std::fs::DirEntry>| {
            // A thread may have ended.
            std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default()
        };
        let all = tasks.map(status).collect::<String>();
        let has_key = |line: &&str| keys.iter().any(|key| line.starts_with(key));
        let mut lines: Vec<_> = all.lines().filter(has_key).map(|l| l.replace('\t', " ")).collect();
        lines.sort();
        lines.dedup();
        lines
    }
}

const THREAD_KEYS: [&str; 2] = ["NoNewPrivs:", "Seccomp:"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_by_default_restricts_every_thread_and_is_shown_in_the_status() {
    // Endpoints of a file are saved in the state directory.
    let endpoints = tempfile::tempdir().unwrap();
    let endpoints = endpoints.path().join("endpoints");
    let setup = Setup::start(|config| {
        config.sandbox.seccomp = Seccomp::On;
        let address = config.upstreams[0].endpoints[0].to_string();
        std::fs::write(&endpoints, address).unwrap();
        config.upstreams[0].endpoints_file = Some(endpoints.clone());
    })
    .await;
    setup.expect_service().await;
    assert_eq!(setup.of_threads(&THREAD_KEYS), ["NoNewPrivs: 1", "Seccomp: 2"]);
    let limits = format!("/proc/{}/limits", setup.process.pid());
    let limits = std::fs::read_to_string(limits).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(5), Some("0"), "{core}");

    let status = setup.status();
    let sandbox = &status["sandbox"];
    for key in ["not_dumpable", "no_new_privs", "seccomp"] {
        assert_eq!(sandbox[key], "on", "{sandbox}");
    }
    let landlock = sandbox["landlock"].as_str().unwrap();
    if landlock.starts_with("on") {
        let state = std::fs::canonicalize(setup.cluster.certs.path().join("state")).unwrap();
        assert_eq!(sandbox["writable"], serde_json::json!([state]));
        let readable: Vec<_> = sandbox["readable"].as_array().unwrap().iter().collect();
        let own = std::fs::canonicalize(setup.cluster.certs.path()).unwrap();
        assert!(readable.contains(&&serde_json::json!(own)), "{sandbox}");
    } else {
        assert!(landlock.starts_with("unavailable: "), "{sandbox}");
    }
    let text = setup.status_output("text");
    assert!(text.contains("sandbox: not_dumpable on, no_new_privs on, seccomp on"), "{text}");
    let state = setup.cluster.certs.path().join("state/control-plane.json");
    until("the endpoints are saved", async || state.exists()).await;
}

/// The sandbox forbids to connect to abstract sockets of other processes (Linux 6.12); that of the service manager is
/// connected before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_manager_with_an_abstract_socket_is_notified_from_the_sandbox() {
    let name = format!("jackstay-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    manager.set_nonblocking(true).unwrap();
    let setup = Setup::start_with(|_| {}, &[("NOTIFY_SOCKET", &format!("@{name}"))]).await;
    setup.expect_service().await;
    let received = || {
        let mut message = [0; 4096];
        let size = manager.recv(&mut message).unwrap_or(0);
        String::from_utf8_lossy(&message[..size]).into_owned()
    };
    until("READY=1", async || received().contains("READY=1")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restriction_that_is_switched_off_is_absent_and_shown_in_the_status() {
    let setup = Setup::start(|config| {
        config.sandbox.not_dumpable = Switch::Off;
        config.sandbox.no_new_privs = Switch::Off;
        config.sandbox.seccomp = Seccomp::Off;
        config.sandbox.landlock = Switch::Off;
    })
    .await;
    assert_eq!(setup.of_threads(&THREAD_KEYS), ["NoNewPrivs: 0", "Seccomp: 0"]);
    let text = setup.status_output("text");
    let expected = "sandbox: not_dumpable off, no_new_privs off, seccomp off, landlock off";
    assert!(text.contains(expected), "{text}");
    drop(setup);

    for mode in [Seccomp::Log, Seccomp::Kill] {
        let setup = Setup::start(|config| {
            config.sandbox.seccomp = mode;
            config.sandbox.landlock = Switch::Off;
        })
        .await;
        setup.expect_service().await;
        assert_eq!(setup.of_threads(&THREAD_KEYS), ["NoNewPrivs: 1", "Seccomp: 2"]);
        let sandbox = setup.status()["sandbox"].clone();
        assert_eq!(sandbox["seccomp"], if mode == Seccomp::Log { "log" } else { "kill" });
        assert_eq!(sandbox["landlock"], "off");
        assert_eq!(sandbox["readable"], serde_json::json!([]));
    }
}

/// The files in `/proc` of a process that is not dumpable belong to root.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_of_another_user_is_dumpable_only_if_configured() {
    const UID: u32 = 65534;
    let dir = tempfile::tempdir().unwrap();
    if std::os::unix::fs::chown(dir.path(), Some(UID), None).is_err() {
        println!("skipped: only root can change the user");
        return;
    }
    // The user may not be able to read the binary of the build. `cp` makes the copy, because a copy that this
    // process has open for writing cannot be executed.
    let binary = dir.path().join("jackstay");
    assert!(Command::new("cp").arg(BINARY).arg(&binary).status().unwrap().success());
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (switch, owner) in [("on", 0), ("off", UID)] {
        let mut command = Command::new(&binary);
        command.args(["run", "--listen", "127.0.0.1:0", "--endpoint", "127.0.0.1:9"]);
        command.env("JACKSTAY__ADMIN__BIND", "127.0.0.1:0").env("JACKSTAY__STATE_DIR", "");
        command.env("JACKSTAY__SANDBOX__NOT_DUMPABLE", switch);
        std::os::unix::process::CommandExt::uid(&mut command, UID);
        let mut process = Process::spawn(command);
        process.wait_output("listening").await;
        let environ = format!("/proc/{}/environ", process.pid());
        assert_eq!(std::fs::metadata(environ).unwrap().uid(), owner, "not_dumpable {switch}");
        // Its own files in /proc stay readable.
        let admin = first_address(&process.wait_output("the admin endpoint listens").await);
        let metrics = pages::get(admin, "/metrics").await.unwrap();
        assert!(metrics.contains("\nprocess_open_fds "), "{metrics}");
        assert!(metrics.contains("\nprocess_resident_memory_bytes "), "{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_that_names_a_path_outside_is_refused_until_a_restart() {
    let outside = tempfile::tempdir().unwrap();
    let mut setup = Setup::start(|_| {}).await;
    if setup.status()["sandbox"]["landlock"] == "off"
        || setup.status()["sandbox"]["landlock"].as_str().unwrap().starts_with("unavailable")
    {
        println!("skipped: the kernel has no Landlock");
        return;
    }
    let token = outside.path().join("token");
    std::fs::write(&token, "t").unwrap();
    let refused = |result: &Value, key: &str| {
        assert_eq!(result["outcome"], "failed", "{result}");
        let error = result["errors"][0].as_str().unwrap();
        assert!(error.starts_with(key) && error.contains("restart jackstay"), "{error}");
    };
    let result = setup
        .reload(|config| {
            config.upstreams[0].health.readyz.cert = None;
            config.upstreams[0].health.readyz.token_file = Some(token.clone());
        })
        .await;
    refused(&result, "upstreams[0].health.readyz.token_file");
    // Also a file that does not exist yet, and a directory for writing.
    let missing = outside.path().join("client.pem");
    let pair = CertPaths { cert_file: missing.clone(), key_file: missing };
    let result =
        setup.reload(|config| terminate_mode(config).identities.push(pair.clone().into())).await;
    refused(&result, "listeners[0].identities[1].cert_file");
    let result = setup.reload(|config| config.state_dir = Some(outside.path().join("state"))).await;
    refused(&result, "state_dir");
    setup.expect_service().await;

    // A file in an accessible directory is read, and other settings are applied.
    std::fs::copy(&token, setup.cluster.certs.path().join("token")).unwrap();
    let token = setup.cluster.certs.path().join("token");
    let result = setup
        .reload(|config| {
            config.upstreams[0].health.readyz.cert = None;
            config.upstreams[0].health.readyz.token_file = Some(token);
        })
        .await;
    assert_eq!(result["outcome"], "ok", "{result}");
    let result = setup.reload(|config| config.sandbox.seccomp = Seccomp::Off).await;
    assert_eq!(result["needs_restart"][0], "sandbox changed", "{result}");
    assert_eq!(setup.status()["sandbox"]["seccomp"], "kill");
    setup.expect_service().await;
}

/// kubelet replaces a link in the directory of the files. A projected volume replaces a link to a directory,
/// which is not the directory that existed at the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_rotate_inside_the_sandbox() {
    // Not below the directory of the other files, which is accessible as a whole.
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let setup = Setup::start(|config| {
        let volume = root.join("volume");
        std::fs::create_dir_all(volume.join("..1")).unwrap();
        let serving = terminate_mode(config).tls.paths.clone();
        std::fs::copy(&serving.cert_file, volume.join("..1/tls.crt")).unwrap();
        std::fs::copy(&serving.key_file, volume.join("..1/tls.key")).unwrap();
        std::os::unix::fs::symlink("..1", volume.join("..data")).unwrap();
        for name in ["tls.crt", "tls.key"] {
            std::os::unix::fs::symlink(Path::new("..data").join(name), volume.join(name)).unwrap();
        }
        terminate_mode(config).tls.paths =
            CertPaths { cert_file: volume.join("tls.crt"), key_file: volume.join("tls.key") };
        // The link is in a directory of its own, and leads to another one.
        let (links, pki) = (root.join("links"), root.join("pki"));
        for directory in [&links, &pki] {
            std::fs::create_dir(directory).unwrap();
        }
        let IdentitySource::Files(identity) = terminate_mode(config).identities[0].clone() else {
            unreachable!("the identity has files");
        };
        let pem =
            [&identity.cert_file, &identity.key_file].map(|file| std::fs::read(file).unwrap());
        std::fs::write(pki.join("client-1.pem"), pem.concat()).unwrap();
        let link = links.join("current.pem");
        std::os::unix::fs::symlink("../pki/client-1.pem", &link).unwrap();
        let pair = CertPaths { cert_file: link.clone(), key_file: link };
        terminate_mode(config).identities = vec![pair.into()];
    })
    .await;
    setup.expect_service().await;
    let serials = || {
        let listener = &setup.status()["listeners"][0];
        let [serving, identity] = [&listener["certificate"], &listener["identities"][0]];
        [serving["serial"].clone(), identity["serial"].clone()]
    };
    let before = serials();

    let certs = &setup.cluster.certs;
    let volume = root.join("volume");
    std::fs::create_dir(volume.join("..2")).unwrap();
    let next = certs.pki.server().unwrap().write_to(certs.path(), "next").unwrap();
    std::fs::copy(next.0, volume.join("..2/tls.crt")).unwrap();
    std::fs::copy(next.1, volume.join("..2/tls.key")).unwrap();
    std::os::unix::fs::symlink("..2", volume.join("..data_tmp")).unwrap();
    std::fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    std::fs::remove_dir_all(volume.join("..1")).unwrap();

    let subject = jackstay_apiserver::pki::Subject::admin();
    let next = certs.pki.client(&subject).unwrap().write_to(certs.path(), "next-client").unwrap();
    let pem = [next.0, next.1].map(|file| std::fs::read(file).unwrap());
    std::fs::write(root.join("pki/client-2.pem"), pem.concat()).unwrap();
    replace_symlink(&root.join("links/current.pem"), Path::new("../pki/client-2.pem"));
    until("both certificates are replaced", async || {
        let now = serials();
        now[0] != before[0] && now[1] != before[1]
    })
    .await;
    setup.expect_service().await;
}
