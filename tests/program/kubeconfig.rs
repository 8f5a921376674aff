//! `jackstay kubeconfig`: the files that it reads and writes, and its output.

mod client_certificate;
mod passed_through;

use crate::support::tls::{self, Trust};
use crate::support::wait;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::Kubeconfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use serde_json::{Value, json};

use jackstay::app::{App, Running};
use jackstay_apiserver as apiserver;
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity as PkiValidity, kubeconfig};
use jackstay_apiserver::{ApiServerHandle, Options, RequestHook, ScriptedResponse};
use jackstay_config::{CertPaths, Overrides, load};
use jackstay_net::tls::certificate::Validity;
use jackstay_net::tls::local_ca::{LocalCa, is_constrained_issuer};
use jackstay_net::tls::pem_files::{load_cert, valid_certificates};
use jackstay_operator::commands::check::check_files;

const SERVER: &str = "https://10.0.0.1:6443";

struct Home {
    dir: tempfile::TempDir,
    pki: Pki,
    admin: Issued,
}

impl Home {
    fn new() -> Self {
        let pki = Pki::new("kubernetes").unwrap();
        let admin = pki.client(&Subject::admin()).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), pki, admin }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// A kubeconfig with a client certificate at `~/.kube/config`.
    fn write_kubeconfig(&self) -> PathBuf {
        let text = kubeconfig(SERVER, &self.pki.ca_pem(), Some(&self.admin), None);
        self.write(".kube/config", &text)
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_jackstay"))
            .args(args)
            .current_dir(self.dir.path())
            .env_clear()
            .env("HOME", self.dir.path())
            .output()
            .unwrap()
    }

    /// Runs `jackstay kubeconfig --offline`, asserts success and returns its output.
    fn run_offline(&self, args: &[&str]) -> String {
        self.run_online(&[&["--offline"], args].concat())
    }

    /// Runs `jackstay kubeconfig`, which may connect to the apiservers. Asserts success and returns its
    /// output.
    fn run_online(&self, args: &[&str]) -> String {
        let output = self.run(&[&["kubeconfig"], args].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}{error}");
        text
    }

    /// Runs `jackstay kubeconfig --offline`, asserts exit code 2 and returns its stderr.
    fn run_refused(&self, args: &[&str]) -> String {
        let output = self.run(&[&["kubeconfig", "--offline"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Parses a YAML file.
    fn tree(&self, name: &str) -> Value {
        serde_saphyr::from_str(&fs::read_to_string(self.path(name)).unwrap()).unwrap()
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// The value `key` of the entry named `demo` in a list of a kubeconfig.
fn demo_entry(tree: &Value, list: &str, key: &str) -> Value {
    let entry = tree[list].as_array().unwrap().iter().find(|entry| entry["name"] == "demo");
    entry.unwrap()[key].clone()
}

fn cluster(tree: &Value) -> Value {
    demo_entry(tree, "clusters", "cluster")
}

fn decode(data: &Value) -> Vec<u8> {
    STANDARD.decode(data.as_str().unwrap()).unwrap()
}

/// The content of a kubeconfig, independent of the order of its keys.
fn content(text: &str) -> Value {
    json!(Kubeconfig::from_yaml(text).unwrap())
}

#[test]
fn kubeconfig_without_mode_writes_only_a_kubeconfig() {
    let home = Home::new();
    let input = home.write_kubeconfig();
    let before = fs::read(&input).unwrap();
    let output = home.run_offline(&["--listen", "127.0.0.1:7443"]);
    assert_eq!(fs::read(&input).unwrap(), before, "the input is unchanged");
    let out = home.path(".kube/jackstay.kubeconfig");
    assert_eq!(mode(&out), 0o600);
    let tree = home.tree(".kube/jackstay.kubeconfig");
    let written = cluster(&tree);
    assert_eq!(written["server"], "https://127.0.0.1:7443");
    assert_eq!(written["tls-server-name"], "10.0.0.1");
    let old = home.tree(".kube/config");
    for key in ["client-certificate-data", "client-key-data"] {
        let value = |tree| demo_entry(tree, "users", "user")[key].clone();
        assert!(value(&tree).is_string() && value(&tree) == value(&old), "{key}");
    }
    let ca = "certificate-authority-data";
    assert_eq!(written[ca], cluster(&old)[ca], "clients still verify the apiserver with its CA");
    for part in [
        "server: https://10.0.0.1:6443 -> https://127.0.0.1:7443",
        "tls-server-name: set to 10.0.0.1",
        "user \"demo\" is unchanged (a client certificate)",
        "kubectl --kubeconfig",
    ] {
        assert!(output.contains(part), "no {part:?} in\n{output}");
    }
    assert!(!output.contains("PRIVATE KEY") && !output.contains("LS0tLS1CRUdJTiBQ"), "{output}");
}

#[test]
fn kubeconfig_output_json_and_yaml_list_files_changes_and_commands() {
    let home = Home::new();
    home.write_kubeconfig();
    let args = ["--mode", "passthrough", "-o"];
    let json = home.run_offline(&[&args[..], &["json"]].concat());
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["ok"], true);
    assert_eq!((&report["context"], &report["user"]), (&json!("demo"), &json!("demo")));
    let files = report["files"].as_array().unwrap();
    let kubeconfig = home.path(".kube/jackstay.kubeconfig").display().to_string();
    let last = files.last().unwrap();
    assert_eq!((&last["path"], &last["written"]), (&json!(kubeconfig), &json!(true)));
    assert!(
        files.iter().any(|file| file["description"] == "the configuration of jackstay"),
        "{json}"
    );
    let change = &report["clusters"][0]["changes"][0];
    assert_eq!(change, &json!({"key": "server", "from": SERVER, "to": "https://127.0.0.1:7443"}));
    assert!(report["next"][0].as_str().unwrap().starts_with("jackstay run --config "), "{json}");
    assert!(report["revert"].is_string() && report.get("error").is_none(), "{json}");
    assert!(!json.contains("PRIVATE KEY"), "{json}");
    let yaml = home.run_offline(&[&args[..], &["yaml"]].concat());
    let second: Value = serde_saphyr::from_str(&yaml).unwrap();
    assert!(second["files"].as_array().unwrap().iter().all(|file| file["written"] == false));

    let output = home.run(&["kubeconfig", "--offline", "--kubeconfig", "none", "-o", "json"]);
    assert_eq!(output.status.code(), Some(2));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["ok"], &report["files"]), (&json!(false), &json!([])));
    assert_eq!(report["error"], "cannot read none: no such file");
}

#[test]
fn kubeconfig_context_without_cluster_is_refused_only_if_used() {
    let home = Home::new();
    let input = home.write_kubeconfig();
    let mut tree = home.tree(".kube/config");
    let contexts = tree["contexts"].as_array_mut().unwrap();
    contexts.insert(0, json!({"name": "unused", "context": {"user": "demo"}}));
    contexts.push(json!({"name": "null", "context": {"cluster": null}}));
    fs::write(&input, tree.to_string()).unwrap();
    home.run_offline(&[]);
    let error = home.run_refused(&["--context", "unused"]);
    assert!(error.contains("context \"unused\" names no cluster"), "{error}");
    // The unused contexts are written as kubectl writes them.
    let written = home.tree(".kube/jackstay.kubeconfig");
    assert_eq!(
        written["contexts"][0],
        json!({"name": "unused", "context": {"cluster": "", "user": "demo"}})
    );
}

#[test]
fn kubeconfig_existing_file_is_overwritten_only_with_force() {
    let home = Home::new();
    home.write_kubeconfig();
    let out = home.write("mine", "existing content\n");
    let error = home.run_refused(&["--out", "mine"]);
    assert!(error.contains("nothing written"), "{error}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "existing content\n");
    home.run_offline(&["--out", "mine", "--force"]);
    let output = home.run_offline(&["--out", "mine"]);
    assert!(output.contains("unchanged"), "{output}");
    let error = home.run_refused(&["--out", ".kube/config"]);
    assert!(error.contains(".kube/config exists with other content"), "{error}");
}

#[test]
fn kubeconfig_revert_restores_an_in_place_change() {
    let home = Home::new();
    let text = "\
apiVersion: v1
clusters:
- cluster:
    certificate-authority: pki/ca.crt
    server: https://lb.example:6443
  name: demo
- cluster:
    server: https://other
  name: other
contexts:
- context:
    cluster: demo
    namespace: kube-system
    user: u
  name: c
current-context: c
kind: Config
users:
- name: u
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      args:
      - token
      command: bin/plugin
      interactiveMode: Never
    unknown-key: [1, 2]
";
    let input = home.write(".kube/config", text);
    fs::set_permissions(&input, fs::Permissions::from_mode(0o640)).unwrap();
    let output = home.run_offline(&["--in-place", "--listen", "localhost:7443"]);
    assert!(
        output.contains("\n  kubectl --context c get nodes\n"),
        "kubectl reads this file by default: {output}"
    );
    let written = home.tree(".kube/config");
    let cluster = cluster(&written);
    assert_eq!(cluster["server"], "https://localhost:7443");
    assert_eq!(cluster["tls-server-name"], "lb.example");
    assert_eq!(cluster["certificate-authority"], "pki/ca.crt", "the path stays relative");
    assert_eq!(mode(&input), 0o640, "the mode stays");
    // A second run starts from the original server.
    let input = input.to_str().unwrap();
    let output =
        home.run_offline(&["--kubeconfig", input, "--in-place", "--listen", "127.0.0.1:8443"]);
    let next = format!("\n  kubectl --kubeconfig {input} --context c get nodes\n");
    assert!(output.contains(&next), "{output}");
    let output = home.run_offline(&["--revert"]);
    assert!(
        output.contains("server: https://127.0.0.1:8443 -> https://lb.example:6443"),
        "{output}"
    );
    let reverted = fs::read_to_string(home.path(".kube/config")).unwrap();
    assert_eq!(content(&reverted), content(text));
    assert!(output.contains("current-context are unchanged"), "{output}");
    assert!(!output.contains("are left"), "nothing else was written: {output}");
    let output = home.run_offline(&["--revert"]);
    assert!(output.contains("nothing to revert"), "{output}");
}

#[test]
fn kubeconfig_list_of_files_is_merged_with_absolute_paths() {
    let home = Home::new();
    home.write(
        "a/config",
        "clusters: [{name: demo, cluster: {server: 'https://h:1', certificate-authority: ca.crt}}]\n",
    );
    home.write(
        "b/config",
        "contexts: [{name: c, context: {cluster: demo, user: u}}]\ncurrent-context: c\n\
         users: [{name: u, user: {tokenFile: token}}]\n",
    );
    let list = format!("{0}/a/config:{0}/none:{0}/b/config", home.dir.path().display());
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_jackstay"))
            .args([&["kubeconfig"], args].concat())
            .env_clear()
            .env("HOME", home.dir.path())
            .env("KUBECONFIG", &list)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    run(&["--out", home.path("out/k").to_str().unwrap()]);
    let tree = home.tree("out/k");
    let absolute = |name: &str| home.path(name).display().to_string();
    assert_eq!(cluster(&tree)["certificate-authority"], absolute("a/ca.crt"));
    assert_eq!(tree["users"][0]["user"]["tokenFile"], absolute("b/token"));
    // `--in-place` changes only the file that contains the cluster.
    let other = fs::read(home.path("b/config")).unwrap();
    run(&["--in-place"]);
    assert_eq!(cluster(&home.tree("a/config"))["certificate-authority"], "ca.crt");
    assert_eq!(fs::read(home.path("b/config")).unwrap(), other);
}

#[test]
fn kubeconfig_passthrough_writes_a_complete_configuration() {
    let home = Home::new();
    home.write_kubeconfig();
    let output = home.run_offline(&["--mode", "passthrough", "--endpoint", "10.0.0.2:6443"]);
    let config = home.path(".kube/jackstay/jackstay.yaml");
    assert!(output.contains(&format!("jackstay run --config {}", config.display())), "{output}");
    let check = home.run(&["check", "--config", config.to_str().unwrap()]);
    assert!(check.status.success(), "{check:?}");
    assert!(String::from_utf8_lossy(&check.stdout).contains("1 upstream, 2 endpoints"));
    let tree = home.tree(".kube/jackstay/jackstay.yaml");
    let tls = &tree["upstreams"][0]["tls"];
    assert!(
        tls.is_object() && tls.get("server_name").is_none(),
        "each endpoint is verified by its own address"
    );
    let written = cluster(&home.tree(".kube/jackstay.kubeconfig"));
    assert_eq!(written["tls-server-name"], "kubernetes", "an address is in one certificate only");
    assert!(output.contains("note: tls-server-name is \"kubernetes\""), "{output}");
    // The configuration has no copy of the user's private key.
    for entry in fs::read_dir(home.path(".kube/jackstay")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
        assert!(!text.contains("PRIVATE KEY"), "{text}");
    }
}

#[test]
fn kubeconfig_terminate_creates_a_local_ca_once() {
    let home = Home::new();
    home.write_kubeconfig();
    let args = ["--mode", "terminate", "--node-name", "node-1"];
    home.run_offline(&args);
    let dir = home.path(".kube/jackstay");
    for (name, expected) in [
        ("local-ca.crt", 0o644),
        ("serving.pem", 0o600),
        ("cluster-ca.crt", 0o644),
        ("jackstay.yaml", 0o644),
    ] {
        assert_eq!(mode(&dir.join(name)), expected, "{name}");
    }
    let files: Vec<_> = fs::read_dir(&dir).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(
        !files.iter().any(|name| name == "local-ca.key" || name == "client.key"),
        "neither the CA's key nor that of the user is stored: {files:?}"
    );
    let config = dir.join("jackstay.yaml");
    let check = home.run(&["check", "--config", config.to_str().unwrap()]);
    let output = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(check.status.success(), "{check:?}");
    assert!(output.contains("CN=kubernetes-admin"), "{output}");
    let written = cluster(&home.tree(".kube/jackstay.kubeconfig"));
    assert!(written.get("tls-server-name").is_none(), "{written}");
    let ca = decode(&written["certificate-authority-data"]);
    assert_eq!(ca, fs::read(dir.join("local-ca.crt")).unwrap());
    // The second run changes nothing.
    let before = fs::read(dir.join("serving.pem")).unwrap();
    let output = home.run_offline(&args);
    assert!(!output.contains("wrote "), "{output}");
    assert_eq!(fs::read(dir.join("serving.pem")).unwrap(), before);
    // Another name needs another CA, since this one is constrained to its names.
    let other = ["--mode", "terminate", "--node-name", "node-2"];
    let refused = home.run_refused(&other);
    assert!(
        refused.contains("serving.pem") && refused.contains("exist with other content"),
        "{refused}"
    );
    home.run_offline(&[&other[..], &["--force"]].concat());
    assert_ne!(fs::read(dir.join("serving.pem")).unwrap(), before);
    let changed = cluster(&home.tree(".kube/jackstay.kubeconfig"));
    assert_eq!(
        decode(&changed["certificate-authority-data"]),
        fs::read(dir.join("local-ca.crt")).unwrap()
    );
}

#[test]
fn kubeconfig_invalid_input_is_refused_with_remedy() {
    let home = Home::new();
    let ca = home.pki.ca_pem();
    let other_ca = Pki::new("stranger").unwrap().client(&Subject::admin()).unwrap();
    let version_1 = home.pki.client_version_1(&Subject::admin()).unwrap();
    let cases: [(&str, String, &[&str], &str); 8] = [
        (
            "version-1",
            kubeconfig(SERVER, &ca, Some(&version_1), None),
            &["--mode", "terminate"],
            "is X.509 version 1: reissue it as version 3",
        ),
        ("none", String::new(), &[], "no current-context"),
        (
            "stranger",
            kubeconfig(SERVER, &ca, Some(&other_ca), None),
            &["--mode", "terminate"],
            "name it with --client-ca-file",
        ),
        ("http", kubeconfig("http://10.0.0.1:8080", &ca, None, None), &[], "is not encrypted"),
        (
            "same",
            kubeconfig("https://127.0.0.1:7443", &ca, None, Some("t")),
            &[],
            "requests would loop",
        ),
        (
            "name",
            kubeconfig(SERVER, &ca, None, Some("t")),
            &["--mode", "passthrough", "--listen", "vip.example:7443"],
            "needs an IP address to listen on",
        ),
        (
            "port",
            kubeconfig(SERVER, &ca, None, Some("t")),
            &["--listen", "127.0.0.1"],
            "write it as 127.0.0.1:7443",
        ),
        (
            "loop",
            kubeconfig(SERVER, &ca, None, Some("t")),
            &["--mode", "passthrough", "--endpoint", "127.0.0.1:7443"],
            "requests would loop",
        ),
    ];
    for (name, text, args, expected) in cases {
        let file = home.write(name, &text);
        let out = home.path(&format!("{name}.out"));
        let paths = ["--kubeconfig", file.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let error = home.run_refused(&[&paths[..], args].concat());
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!out.exists(), "{name}");
        assert!(!home.path("jackstay").exists(), "{name}");
    }
}

/// Three apiservers, and a kubeconfig for the first. As with kubeadm, each certificate contains the
/// address of its server.
struct ThreeServers {
    home: Home,
    cluster: Cluster,
    servers: Vec<ApiServerHandle>,
}

impl ThreeServers {
    /// Starts them with these common names in every certificate.
    fn start(common: &[&str]) -> Self {
        let home = Home::new();
        let cluster = Cluster::new();
        let server = |last: u8| {
            let bind = SocketAddr::from(([127, 0, 0, last], 0));
            let ip = bind.ip().to_string();
            let names: Vec<&str> = common.iter().copied().chain([ip.as_str()]).collect();
            let certificate = home.pki.server_for(&names, PkiValidity::usual()).ok();
            let options = Options { bind, certificate, ..Options::named(&ip) };
            apiserver::start(&cluster, &home.pki, options).unwrap()
        };
        let servers: Vec<_> = [11, 12, 13].map(server).into();
        let url = format!("https://{}", servers[0].addr);
        let text = kubeconfig(&url, &home.pki.ca_pem(), Some(&home.admin), None);
        home.write(".kube/config", &text);
        Self { home, cluster, servers }
    }

    fn address(&self, index: usize) -> String {
        self.servers[index].addr.to_string()
    }

    /// Creates `EndpointSlice`s with these servers and their ports.
    fn create_slices(&self, servers: &[usize]) {
        let slices: Vec<_> = servers
            .iter()
            .map(|index| {
                let address = self.servers[*index].addr;
                json!({
                    "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                    "metadata": { "name": format!("kubernetes-{index}"), "namespace": "default",
                                  "labels": { "kubernetes.io/service-name": "kubernetes" } },
                    "addressType": "IPv4",
                    "endpoints": [{ "addresses": [address.ip().to_string()],
                                    "conditions": { "ready": true } }],
                    "ports": [{ "name": "https", "port": address.port(), "protocol": "TCP" }],
                })
            })
            .collect();
        let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
        let credentials =
            Credentials::anonymous(&self.home.pki.ca_pem()).certificate(&self.home.admin);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client =
                Client::connect(self.servers[0].addr, &credentials.expecting("127.0.0.11")).await;
            let client = client.unwrap();
            for slice in slices {
                let reply = client.post(path, &slice).await.unwrap();
                assert_eq!(reply.status, 201, "{reply:?}");
            }
        });
    }

    fn upstream(&self) -> Value {
        self.home.tree(".kube/jackstay/jackstay.yaml")["upstreams"][0].clone()
    }

    fn endpoints(&self) -> Vec<String> {
        let endpoints = self.upstream()["endpoints"].as_array().unwrap().clone();
        endpoints.iter().map(|e| e.as_str().unwrap().to_owned()).collect()
    }
}

#[test]
fn kubeconfig_server_name_is_in_every_certificate() {
    let three = ThreeServers::start(&["kubernetes", "kubernetes.default.svc"]);
    let (b, c) = (three.address(1), three.address(2));
    let output =
        three.home.run_online(&["--mode", "passthrough", "--endpoint", &b, "--endpoint", &c]);
    let server_name = three.upstream()["tls"].get("server_name").cloned();
    assert_eq!(server_name, None, "each endpoint is verified by its own address: {output}");
    let written = cluster(&three.home.tree(".kube/jackstay.kubeconfig"));
    assert_eq!(written["tls-server-name"], "kubernetes", "{output}");
    assert!(!output.contains("is not verified"), "{output}");

    // An apiserver that does not respond is reported and changes no name.
    assert!(!output.contains("warning: "), "{output}");
    three.servers[2].kill();
    let more = ["--out", "second/k", "--endpoint", &b, "--endpoint", &c];
    let output = three.home.run_online(&[&["--mode", "passthrough"][..], &more].concat());
    let warning = format!("warning: {c} does not answer as an apiserver: connect to {c}: ");
    assert!(output.contains(&warning) && !output.contains("no name is taken"), "{output}");
    let written = cluster(&three.home.tree("second/k"));
    assert_eq!(written["tls-server-name"], "kubernetes", "{output}");

    // If a certificate lacks the address of its server, the shared name is verified.
    let shared_name = ThreeServers::start(&["kubernetes"]);
    let other = shared_name.home.pki.server_for(&["kubernetes"], PkiValidity::usual()).unwrap();
    let bind = SocketAddr::from(([127, 0, 0, 14], 0));
    let options = Options { bind, certificate: Some(other), ..Options::named("d") };
    let fourth = apiserver::start(&shared_name.cluster, &shared_name.home.pki, options).unwrap();
    let d = fourth.addr.to_string();
    shared_name.home.run_online(&["--mode", "terminate", "--node-name", "n", "--endpoint", &d]);
    assert_eq!(shared_name.upstream()["tls"]["server_name"], "kubernetes");

    // If the certificates share no name, a note reports it.
    let no_shared_name = ThreeServers::start(&[]);
    let b = no_shared_name.address(1);
    let output = no_shared_name.home.run_online(&["--mode", "passthrough", "--endpoint", &b]);
    assert!(output.contains("no name is in every apiserver's certificate"), "{output}");
}

/// Listens on a loopback address and completes TLS handshakes with this chain and key, which need not belong
/// together. Returns its address. The thread ends with the process.
fn serve_tls(chain: Vec<CertificateDer<'static>>, key: &PrivateKeyDer<'static>) -> SocketAddr {
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(key).unwrap();
    let certified = CertifiedKey::new(chain, key);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.21:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut tls = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            // Reads until the client closes the connection or fails the handshake.
            while tls.complete_io(&mut stream).is_ok_and(|(read, _)| read > 0) {}
        }
    });
    address
}

#[test]
fn kubeconfig_takes_no_name_from_a_server_that_is_not_verified() {
    let home = Home::new();
    let other = Pki::new("kubernetes").unwrap();
    let issue = |pki: &Pki, names: &[&str], validity| pki.server_for(names, validity).unwrap();
    let usual = PkiValidity::usual;
    let host = "127.0.0.21";
    let own = issue(&home.pki, &[host, "kubernetes", "evil"], usual());
    let expired = issue(&home.pki, &["kubernetes", "evil"], PkiValidity::expired());
    let foreign = issue(&other, &["kubernetes", "evil"], usual());
    let kubelet = issue(&home.pki, &["evil"], usual());
    let self_signed = rcgen::generate_simple_self_signed(["kubernetes".into(), "evil".into()]);
    let self_signed = self_signed.unwrap();
    let self_signed_key = PrivateKeyDer::try_from(self_signed.signing_key.serialize_der()).unwrap();
    let served = |issued: &Issued| serve_tls(vec![issued.cert_der()], &issued.key_der());
    let ca = home.pki.ca_pem();
    // The server, the CA in the kubeconfig, the expected name and the expected note.
    let cases = [
        ("right CA", served(&own), Some(&ca), "kubernetes", ""),
        ("other CA", served(&foreign), Some(&ca), host, "which is not verified"),
        ("expired", served(&expired), Some(&ca), host, "which is not verified"),
        (
            "self-signed",
            serve_tls(vec![self_signed.cert.der().clone()], &self_signed_key),
            Some(&ca),
            host,
            "which is not verified",
        ),
        // The system's CAs do not know the server, or there are none.
        ("no CA", served(&own), None, host, "no name is taken from the certificate"),
        ("other host of the CA", served(&kubelet), Some(&ca), host, "\"evil\" is not used"),
        (
            "copied certificate",
            serve_tls(vec![own.cert_der()], &kubelet.key_der()),
            Some(&ca),
            host,
            "does not answer as an apiserver: TLS: ",
        ),
    ];
    for (name, server, ca, expected, note) in cases {
        let text = kubeconfig(&format!("https://{server}"), ca.map_or("", |ca| ca), None, None);
        let mut config: Value = serde_json::from_str(&text).unwrap();
        if ca.is_none() {
            config["clusters"][0]["cluster"] = json!({ "server": format!("https://{server}") });
        }
        home.write(".kube/config", &config.to_string());
        let output = home.run_online(&["--mode", "passthrough", "--force"]);
        let written = cluster(&home.tree(".kube/jackstay.kubeconfig"));
        assert_eq!(written["tls-server-name"], expected, "{name}: {output}");
        assert!(output.contains(note), "{name}: {output}");
        assert!(!note.is_empty() || !output.contains("no name is taken"), "{name}: {output}");
        let config = home.tree(".kube/jackstay/jackstay.yaml");
        assert!(config["upstreams"][0]["tls"].get("server_name").is_none(), "{name}: {output}");
    }
}

#[test]
fn kubeconfig_takes_no_name_if_the_cluster_is_not_verified() {
    let home = Home::new();
    let issued = home.pki.server_for(&["kubernetes", "127.0.0.21"], PkiValidity::usual()).unwrap();
    let server = format!("https://{}", serve_tls(vec![issued.cert_der()], &issued.key_der()));
    let text = kubeconfig(&server, "", None, None);
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["clusters"][0]["cluster"] =
        json!({ "server": server, "insecure-skip-tls-verify": true });
    home.write(".kube/config", &config.to_string());
    let output = home.run_online(&[]);
    let written = cluster(&home.tree(".kube/jackstay.kubeconfig"));
    assert_eq!(written.get("tls-server-name"), None, "{output}");
    assert!(
        output.contains("insecure-skip-tls-verify is set, so they are not verified"),
        "{output}"
    );
    // With a CA the certificate is verified, although kubectl still does not verify it.
    let ca = home.write("ca.crt", &home.pki.ca_pem());
    let output = home.run_online(&["--ca-file", ca.to_str().unwrap(), "--force"]);
    assert!(!output.contains("no name is taken"), "{output}");
}

#[test]
fn kubeconfig_endpoints_of_the_cluster_are_suggested_and_used_with_discover() {
    let three = ThreeServers::start(&["kubernetes"]);
    let mode = ["--mode", "passthrough"];
    let output = three.home.run_online(&mode);
    assert!(output.contains("only one endpoint is known"), "{output}");
    three.create_slices(&[0, 1, 2]);
    let output = three.home.run_online(&mode);
    let (a, b, c) = (three.address(0), three.address(1), three.address(2));
    assert!(
        output.contains(&format!(
            "only one endpoint is known, {a}; the cluster names 2 apiservers more"
        )),
        "{output}"
    );
    assert!(
        output.contains("--discover") && output.contains(&format!("--endpoint {b}")),
        "{output}"
    );
    assert_eq!(three.endpoints(), [a.as_str()], "the note only suggests them");
    let output = three.home.run_online(&[&mode[..], &["--discover", "--force"]].concat());
    assert_eq!(three.endpoints(), [a.as_str(), &b, &c], "{output}");
    assert!(!output.contains("only one endpoint"), "{output}");

    // A forbidden list and `--offline` are notes, not failures.
    let other = ThreeServers::start(&["kubernetes"]);
    let refuse: RequestHook = Arc::new(|head: &http::request::Parts| {
        head.uri
            .path()
            .contains("endpoint")
            .then(|| ScriptedResponse::status(403, "Forbidden", "no"))
    });
    other.servers[0].set_faults(|faults| faults.on_request = Some(refuse));
    let output = other.home.run_online(&mode);
    assert!(output.contains("only one endpoint is known") && output.contains("(403)"), "{output}");
    let output = other.home.run_offline(&[&mode[..], &["--out", "offline/k"]].concat());
    assert!(output.contains("apiservers are not known: --offline"), "{output}");
}

/// Accepts TLS and HTTP/2, and answers every request as etcd does: 200 and its version, or 404.
/// With `client_ca` it requires client certificates of that CA.
fn serve_etcd(issued: &Issued, client_ca: Option<&Pki>) -> SocketAddr {
    let clients = client_ca.map_or_else(WebPkiClientVerifier::no_client_auth, |pki| {
        tls::clients_of(pki.ca_der(), false)
    });
    let config = tls::server(issued, clients, &["h2"]);
    let listener = TcpListener::bind("127.0.0.22:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let serve = |stream| async move {
                let mut connection = h2::server::handshake(stream).await.ok()?;
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let is_version = request.uri().path() == "/version";
                    let status = if is_version { 200 } else { 404 };
                    let response = http::Response::builder().status(status).body(()).ok()?;
                    let mut body = respond.send_response(response, false).ok()?;
                    let text = "{\"etcdserver\":\"3.6.1\",\"etcdcluster\":\"3.6.0\"}";
                    body.send_data(text.into(), true).ok()?;
                }
                Some(())
            };
            tls::accept_each(listener, config, serve).await;
        });
    });
    address
}

#[test]
fn kubeconfig_upstream_that_is_no_apiserver_is_a_warning() {
    let three = ThreeServers::start(&["kubernetes"]);
    let (own, b) = (three.address(0), three.address(1));
    let issue = |names: &[&str]| three.home.pki.server_for(names, PkiValidity::usual()).unwrap();
    let etcd = serve_etcd(&issue(&["kubernetes", "127.0.0.22"]), None).to_string();
    // The socket is bound, so that no other process gets the port, and does not listen.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let closed = socket.local_addr().unwrap().as_socket().unwrap().to_string();
    let args = |upstreams: &[&str]| -> Vec<String> {
        let upstreams = upstreams.iter().flat_map(|upstream| ["--endpoint", upstream]);
        ["--mode", "passthrough", "--force"].into_iter().chain(upstreams).map(Into::into).collect()
    };
    let run = |upstreams: &[&str]| {
        let args = args(upstreams);
        three.home.run_online(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let warning = |address: &str, why: &str| {
        format!("warning: {address} does not answer as an apiserver: {why}")
    };
    let output = run(&[&b, &etcd, &closed, "no-such-name.invalid:6443"]);
    assert!(output.contains(&warning(&etcd, "it is an etcd; ")), "{output}");
    assert!(output.contains(&warning(&closed, &format!("connect to {closed}: "))), "{output}");
    assert!(output.contains(&warning("no-such-name.invalid:6443", "")), "{output}");
    assert!(!output.contains(&warning(&own, "")) && !output.contains(&warning(&b, "")), "{output}");
    assert_eq!(output.matches("warning: ").count(), 3, "{output}");
    // An etcd with a CA of its own, as kubeadm makes it, and one that requires client certificates.
    let own_ca = Pki::new("etcd-ca").unwrap();
    let issued = own_ca.server_for(&["localhost", "127.0.0.22"], PkiValidity::usual()).unwrap();
    let foreign = serve_etcd(&issued, None).to_string();
    let strict = serve_etcd(&issued, Some(&own_ca)).to_string();
    let output = run(&[&b, &foreign, &strict]);
    assert!(output.contains(&warning(&foreign, "it is an etcd; ")), "{output}");
    assert!(output.contains(&warning(&strict, "")), "{output}");
    assert_eq!(output.matches("warning: ").count(), 2, "{output}");
    let output = run(&[&b]);
    assert!(!output.contains("warning: "), "{output}");
    // 401 and 403 with a Status are responses of an apiserver.
    for (code, reason) in [(401, "Unauthorized"), (403, "Forbidden")] {
        let refuse: RequestHook =
            Arc::new(move |_| Some(ScriptedResponse::status(code, reason, "no")));
        three.servers[1].set_faults(|faults| faults.on_request = Some(refuse));
        let output = run(&[&b]);
        assert!(!output.contains("warning: "), "{code}: {output}");
    }
    // The apiserver is recognized without a CA, too.
    let mut config = three.home.tree(".kube/config");
    config["clusters"][0]["cluster"] =
        json!({ "server": format!("https://{etcd}"), "insecure-skip-tls-verify": true });
    three.home.write(".kube/config", &config.to_string());
    let output = run(&[&own]);
    assert!(output.contains(&warning(&etcd, "it is an etcd; ")), "{output}");
    assert_eq!(output.matches("warning: ").count(), 1, "{output}");
}

#[test]
fn kubeconfig_stopped_upstream_is_not_called_a_wrong_address() {
    let three = ThreeServers::start(&["kubernetes"]);
    three.create_slices(&[0, 1, 2]);
    let (b, c) = (three.address(1), three.address(2));
    three.servers[2].stop();
    let output = three.home.run_online(&["--mode", "passthrough", "--endpoint", &c]);
    three.servers[2].cont();
    assert!(
        output.contains(&format!("warning: {c} does not answer as an apiserver: ")),
        "{output}"
    );
    assert!(output.contains("check that it runs"), "{output}");
    assert!(!output.contains("right address instead of"), "{output}");
    assert!(output.contains(&format!("with --endpoint {c} --endpoint {b} --force")), "{output}");
}

#[test]
fn kubeconfig_discover_reports_apiservers_that_it_leaves_out() {
    let three = ThreeServers::start(&["kubernetes"]);
    three.create_slices(&[0, 1, 2]);
    let (a, b, c) = (three.address(0), three.address(1), three.address(2));
    three.servers[1].kill();
    three.servers[2].kill();
    let output = three.home.run_online(&["--mode", "passthrough", "--discover"]);
    assert_eq!(three.endpoints(), [a.as_str()]);
    for address in [b, c] {
        let note = format!("note: {address} is an apiserver of the cluster and was left out: ");
        assert!(output.contains(&note), "{output}");
    }
    assert!(output.contains("names 2 apiservers more, which were left out"), "{output}");
    assert!(!output.contains("names no other") && !output.contains("warning: "), "{output}");
}

#[test]
fn kubeconfig_writes_no_file_if_the_configuration_cannot_run() {
    let home = Home::new();
    let other = home.pki.client(&Subject::admin()).unwrap();
    let mut mixed = home.admin.clone();
    mixed.key_pem.clone_from(&other.key_pem);
    let text = kubeconfig(SERVER, &home.pki.ca_pem(), Some(&mixed), None);
    let input = home.write(".kube/config", &text);
    let entries = |path: &Path| -> Vec<_> {
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for mode in ["terminate", "passthrough"] {
        let ca = home.write("ca.crt", "not a certificate\n");
        let with_ca = ["--ca-file", ca.to_str().unwrap()];
        let more = if mode == "passthrough" { &with_ca[..] } else { &[] };
        let error = home.run_refused(&[&["--mode", mode, "--node-name", "n"], more].concat());
        let start = if mode == "passthrough" {
            "nothing written: "
        } else {
            "user \"demo\": client-key-data: "
        };
        assert!(error.starts_with(start), "{error}");
        assert_eq!(entries(input.parent().unwrap()), ["config"], "{mode}: {error}");
    }
    let error = home.run_refused(&["--mode", "terminate", "--node-name", "n"]);
    assert!(
        error.contains("the private key does not belong to the certificate in user \"demo\""),
        "{error}"
    );
    assert!(
        !error.contains("client.key") && !error.contains("/.client."),
        "no path of a file: {error}"
    );
    assert_eq!(fs::read_to_string(&input).unwrap(), text);
}

#[test]
fn kubeconfig_revert_names_the_files_that_it_leaves() {
    let home = Home::new();
    let input = home.write_kubeconfig();
    let before = content(&fs::read_to_string(&input).unwrap());
    let config = home.path("etc/jackstay.yaml");
    let args = ["--mode", "terminate", "--node-name", "n", "--in-place", "--config-out"];
    home.run_offline(&[&args[..], &[config.to_str().unwrap()]].concat());
    let output = home.run_offline(&["--revert"]);
    assert_eq!(content(&fs::read_to_string(&input).unwrap()), before);
    let note = output.lines().find(|line| line.contains("are left")).unwrap();
    let mut written = 0;
    for entry in fs::read_dir(home.path("etc")).unwrap() {
        let path = entry.unwrap().path();
        assert!(note.contains(path.to_str().unwrap()), "no {} in {note}", path.display());
        written += 1;
    }
    assert!(written >= 4, "{note}");
}

#[test]
fn kubeconfig_user_without_credential_for_readyz_gets_a_note() {
    let home = Home::new();
    let ca = home.pki.ca_pem();
    let note = "note: jackstay has no credential for /readyz, because ";
    let run = |user: Value, mode: &str| {
        let text = kubeconfig(SERVER, &ca, None, None);
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["users"] = json!([{ "name": "demo", "user": user }]);
        home.write(".kube/config", &config.to_string());
        home.run_offline(&["--mode", mode, "--node-name", "n", "--force"])
    };
    let (certificate, key) = home.admin.write_to(home.dir.path(), "admin").unwrap();
    let data = |pem: &str| STANDARD.encode(pem);
    let embedded = json!({ "client-certificate-data": data(&home.admin.cert_pem),
        "client-key-data": data(&home.admin.key_pem) });
    let files = json!({ "client-certificate": certificate, "client-key": key });
    let token_file = home.write("token", "t\n");
    let exec = json!({ "exec": { "apiVersion": "client.authentication.k8s.io/v1",
        "command": "plugin", "interactiveMode": "Never" } });
    let token = json!({ "token": "t" });
    let both = ["passthrough", "terminate"];
    for (user, modes, reason) in [
        (token, &both[..], Some("the user's token is embedded in the kubeconfig: ")),
        (exec, &both, Some("the user's credential comes from an exec plugin: ")),
        (
            embedded.clone(),
            &both[..1],
            Some("the user's certificate is embedded in the kubeconfig: "),
        ),
        (embedded, &both[1..], None),
        (files, &both, None),
        (json!({ "tokenFile": token_file }), &both, None),
    ] {
        for mode in modes {
            let output = run(user.clone(), mode);
            match reason {
                Some(reason) => assert!(output.contains(&format!("{note}{reason}")), "{output}"),
                None => assert!(!output.contains(note), "{mode} {output}"),
            }
            let key = "upstreams[0].health.readyz.token_file";
            assert_eq!(output.contains(key), reason.is_some(), "{output}");
        }
    }
}

#[test]
fn kubeconfig_exec_plugin_runs_only_with_discover() {
    let three = ThreeServers::start(&["kubernetes"]);
    three.create_slices(&[0, 1]);
    let runs = three.home.path("plugin-ran");
    let plugin = three.home.write(
        "plugin",
        &format!(
            "#!/bin/sh\necho ran >> {}\ncat <<'END'\n{}\nEND\n",
            runs.display(),
            json!({ "apiVersion": "client.authentication.k8s.io/v1",
                "kind": "ExecCredential", "status": {
                    "clientCertificateData": three.home.admin.cert_pem,
                    "clientKeyData": three.home.admin.key_pem } })
        ),
    );
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    let text = fs::read_to_string(three.home.path(".kube/config")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["users"][0]["user"] = json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1", "command": plugin,
        "interactiveMode": "Never" } });
    three.home.write(".kube/config", &config.to_string());
    let output = three.home.run_online(&["--mode", "passthrough"]);
    assert!(!runs.exists(), "the plugin ran without --discover: {output}");
    assert!(output.contains("is run by --discover only"), "{output}");
    three.home.run_online(&["--mode", "passthrough", "--discover", "--force"]);
    assert_eq!(fs::read_to_string(&runs).unwrap(), "ran\n", "the plugin runs once");
    assert_eq!(three.endpoints(), [three.address(0), three.address(1)]);
}

#[test]
fn kubeconfig_keeps_endpoints_of_an_existing_configuration() {
    let home = Home::new();
    home.write_kubeconfig();
    let mode = ["--mode", "terminate", "--node-name", "n"];
    let with = |more: &[&str]| home.run_offline(&[&mode[..], more].concat());
    let endpoints = || {
        let config = home.tree(".kube/jackstay/jackstay.yaml");
        let items = config["upstreams"][0]["endpoints"].as_array().unwrap().clone();
        items.iter().map(|e| e.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    with(&["--endpoint", "10.0.0.2:6443", "--endpoint", "10.0.0.3:6443"]);
    let three = ["10.0.0.1:6443", "10.0.0.2:6443", "10.0.0.3:6443"];
    assert!(!with(&[]).contains("wrote "), "a second run changes nothing");
    home.run_offline(&["--mode", "terminate", "--node-name", "other", "--force"]);
    assert_eq!(endpoints(), three);
    // The given endpoints replace the existing ones, and a note names the removed ones.
    let output = with(&["--endpoint", "10.0.0.3:6443", "--force"]);
    assert_eq!(endpoints(), [three[0], three[2]]);
    assert!(output.contains("no longer an endpoint: 10.0.0.2:6443;"), "{output}");
    // The endpoints in the configuration of another cluster are not used.
    let text = kubeconfig("https://10.9.9.9:6443", &home.pki.ca_pem(), Some(&home.admin), None);
    home.write(".kube/config", &text);
    with(&["--force"]);
    assert_eq!(endpoints(), ["10.9.9.9:6443"]);
}

#[test]
fn kubeconfig_beside_a_file_named_jackstay_uses_another_directory() {
    let home = Home::new();
    home.write_kubeconfig();
    home.write("bin/jackstay", "the program\n");
    let out = home.path("bin/x");
    let args = ["--mode", "passthrough", "--out", out.to_str().unwrap()];
    let output = home.run_offline(&args);
    let config = home.path("bin/jackstay.d/jackstay.yaml");
    assert!(config.is_file() && out.is_file(), "{output}");
    assert!(output.contains(&format!("jackstay run --config {}", config.display())), "{output}");
    assert_eq!(fs::read_to_string(home.path("bin/jackstay")).unwrap(), "the program\n");

    let below = home.path("bin/jackstay/jackstay.yaml");
    let error = home.run_refused(&[&args[..], &["--config-out", below.to_str().unwrap()]].concat());
    let file = home.path("bin/jackstay");
    assert!(error.contains(&format!("{} is a file", file.display())), "{error}");
    let error = home.run_refused(&["--out", home.path("bin").to_str().unwrap()]);
    assert!(error.contains("bin is a directory"), "{error}");
    assert!(!error.contains("os error"), "{error}");
}

/// jackstay in this process, with the written configuration but on a free port, and a demo apiserver.
struct RunningProxy {
    home: Home,
    _server: ApiServerHandle,
    addr: SocketAddr,
    admin: SocketAddr,
    proxy: Running,
}

impl RunningProxy {
    fn start(mode: &str, prepare: impl FnOnce(&Path)) -> Self {
        Self::start_at("127.0.0.1:7443", mode, prepare)
    }

    fn start_at(at: &str, mode: &str, prepare: impl FnOnce(&Path)) -> Self {
        let home = Home::new();
        let server = apiserver::start(&Cluster::new(), &home.pki, Options::named("a")).unwrap();
        let url = format!("https://{}", server.addr);
        let text = kubeconfig(&url, &home.pki.ca_pem(), Some(&home.admin), None);
        home.write(".kube/config", &text);
        home.run_online(&["--listen", at, "--mode", mode, "--node-name", "node-1"]);
        let dir = home.path(".kube/jackstay");
        prepare(&dir);
        let file = dir.join("jackstay.yaml");
        let mut config = load(&file, [], &Overrides::default()).unwrap().config;
        let errors = check_files(&file, &config, SystemTime::now()).errors;
        assert!(errors.is_empty(), "{errors:?}");
        config.admin.bind = (Ipv4Addr::LOCALHOST, 0).into();
        config.listeners[0].bind = vec![(Ipv4Addr::LOCALHOST, 0).into()];
        let app = App::bind(config).unwrap();
        let addr = app.listener_addresses("apiserver")[0];
        let admin = app.admin_address().unwrap();
        Self { home, _server: server, addr, admin, proxy: app.start().unwrap() }
    }

    /// Sends requests with the CA, server name and certificate of the written kubeconfig until one
    /// succeeds.
    fn wait_for_response(&self) {
        let written = cluster(&self.home.tree(".kube/jackstay.kubeconfig"));
        let ca = String::from_utf8(decode(&written["certificate-authority-data"])).unwrap();
        let url = written["server"].as_str().unwrap();
        let host = url.strip_prefix("https://").unwrap().rsplit_once(':').unwrap().0;
        let name = written["tls-server-name"].as_str().unwrap_or(host);
        let credentials = Credentials::anonymous(&ca).certificate(&self.home.admin).expecting(name);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        wait::until_ok_blocking(Duration::from_secs(30), "a response through jackstay", || {
            let response = runtime.block_on(async {
                let client = Client::connect(self.addr, &credentials).await?;
                client.get("/api/v1/namespaces").await
            });
            match response {
                Ok(reply) if reply.status == 200 => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}

#[test]
fn kubeconfig_written_files_serve_requests() {
    for mode in ["passthrough", "terminate"] {
        let running = RunningProxy::start(mode, |_| {});
        running.wait_for_response();
        assert!(running.proxy.stop());
    }
}

/// `localhost` means both loopback addresses. In mode terminate the client verifies this name.
#[test]
fn kubeconfig_server_localhost_binds_both_loopbacks() {
    let cases = [("passthrough", Some("kubernetes.default.svc")), ("terminate", None)];
    for (mode, server_name) in cases {
        let running = RunningProxy::start_at("localhost:7443", mode, |dir| {
            let text = fs::read_to_string(dir.join("jackstay.yaml")).unwrap();
            let config: Value = serde_saphyr::from_str(&text).unwrap();
            let bind = &config["listeners"][0]["bind"];
            assert_eq!(*bind, json!(["127.0.0.1:7443", "[::1]:7443"]), "{mode}");
        });
        let written = cluster(&running.home.tree(".kube/jackstay.kubeconfig"));
        assert_eq!(written["server"], "https://localhost:7443");
        assert_eq!(written.get("tls-server-name").and_then(Value::as_str), server_name, "{mode}");
        running.wait_for_response();
        assert!(running.proxy.stop());
    }
}

/// A DNS name other than `localhost` is allowed in a kubeconfig, but not as the address of a listener.
#[test]
fn kubeconfig_server_with_dns_name_is_accepted_without_mode() {
    let home = Home::new();
    home.write_kubeconfig();
    home.run_offline(&["--listen", "vip.example:7443"]);
    let written = cluster(&home.tree(".kube/jackstay.kubeconfig"));
    assert_eq!(written["server"], "https://vip.example:7443");
    assert_eq!(written["tls-server-name"], "10.0.0.1", "the apiserver's address");
}

/// A configuration of an earlier version, with the CA's key in a file.
#[test]
fn kubeconfig_expired_serving_certificate_with_issuer_is_renewed_at_start() {
    let prepare = |dir: &Path| {
        let old_ca = fs::read_to_string(dir.join("local-ca.crt")).unwrap();
        let (ca, created) = LocalCa::create("local", &[], SystemTime::now()).unwrap();
        fs::write(dir.join("local-ca.crt"), &created.certificate).unwrap();
        fs::write(dir.join("local-ca.key"), &created.key).unwrap();
        let long_ago = SystemTime::now() - Duration::from_secs(400 * 24 * 3600);
        let issued = ca.issue(&["127.0.0.1".to_owned()], long_ago).unwrap();
        fs::write(dir.join("serving.pem"), issued.pair()).unwrap();
        let edit = |file: PathBuf, from: &str, to: &str| {
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains(from), "{text}");
            fs::write(&file, text.replace(from, to)).unwrap();
        };
        let (old, new) = (STANDARD.encode(old_ca), STANDARD.encode(&created.certificate));
        edit(dir.with_file_name("jackstay.kubeconfig"), &old, &new);
        let mut config: Value =
            serde_saphyr::from_str(&fs::read_to_string(dir.join("jackstay.yaml")).unwrap())
                .unwrap();
        config["listeners"][0]["tls"]["issuer"] = json!({
            "cert_file": dir.join("local-ca.crt"), "key_file": dir.join("local-ca.key") });
        fs::write(dir.join("jackstay.yaml"), config.to_string()).unwrap();
    };
    let running = RunningProxy::start("terminate", prepare);
    running.wait_for_response();
    let serving = running.home.path(".kube/jackstay/serving.pem");
    let paths = CertPaths { cert_file: serving.clone(), key_file: serving.clone() };
    let renewed = load_cert(&paths).unwrap().info;
    assert_eq!(renewed.validity(SystemTime::now()), Validity::Valid);
    assert_eq!(mode(&serving), 0o600);
    // The command does not take over from an issuer.
    let arguments = ["--renew", "--kubeconfig", ".kube/jackstay.kubeconfig"];
    let refused = running.home.run(&[&["kubeconfig"][..], &arguments].concat());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("tls.issuer"), "{refused:?}");
    assert!(running.proxy.stop());
}

/// A kubectl that has read the kubeconfig before a renewal is served through both steps of it, and one that reads the
/// kubeconfig of any moment, too.
#[test]
fn kubeconfig_renewal_serves_clients_of_the_old_ca_until_the_second_step() {
    let running = RunningProxy::start("terminate", |_| {});
    running.wait_for_response();
    let serving = running.home.path(".kube/jackstay/serving.pem");
    let paths = CertPaths { cert_file: serving.clone(), key_file: serving };
    let before = load_cert(&paths).unwrap();
    let kubeconfig = ".kube/jackstay.kubeconfig";
    let cas = || {
        let data = cluster(&running.home.tree(kubeconfig))["certificate-authority-data"].clone();
        valid_certificates(&STANDARD.decode(data.as_str().unwrap()).unwrap())
    };
    let renew = ["--renew", "--kubeconfig", kubeconfig];
    let forced = [&renew[..], &["--force"]].concat();
    let old = cas();
    let output = running.home.run_online(&renew);
    assert!(output.contains("--force publishes it now"), "{output}");
    assert_eq!(load_cert(&paths).unwrap().info, before.info);

    // The first step: the old certificate is served, and the kubeconfig has both CAs.
    let output = running.home.run_online(&forced);
    assert!(output.contains("published the next local CA"), "{output}");
    let both = cas();
    assert_eq!((both.len(), &both[0]), (2, &old[0]));
    let next = running.home.path(".kube/jackstay/serving.next.pem");
    assert_eq!(mode(&next), 0o600);
    assert_eq!(load_cert(&paths).unwrap().info, before.info);
    assert_eq!(served_certificate(running.addr), before.chain[0]);
    let trusts = |cas: &[CertificateDer<'static>], leaf: &CertificateDer<'static>| {
        cas.iter().any(|ca| is_constrained_issuer(ca, leaf))
    };
    assert!(trusts(&old, &before.chain[0]) && trusts(&both, &before.chain[0]));
    let output = running.home.run_online(&renew);
    assert!(output.contains("--force serves it now"), "{output}");
    assert_eq!((cas(), load_cert(&paths).unwrap().info), (both.clone(), before.info.clone()));

    // A missing kubeconfig, as of a user who has left, is a warning.
    let more = [
        &["--renew", "--kubeconfig", "missing", "--config-out"][..],
        &[".kube/jackstay/jackstay.yaml"],
    ];
    let failed = running.home.run(&[&["kubeconfig"][..], &more.concat()].concat());
    let text = String::from_utf8_lossy(&failed.stdout).into_owned();
    assert!(text.contains("warning: ") && text.contains("missing does not exist"), "{text}");
    let alarm = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(alarm.contains("alarm: no listed kubeconfig trusts"), "{alarm}");
    assert_eq!(failed.status.code(), Some(1));

    // The second step.
    let output = running.home.run_online(&forced);
    assert!(output.contains("the next certificate is served"), "{output}");
    let after = load_cert(&paths).unwrap();
    assert_ne!(after.info.serial, before.info.serial);
    assert!(!next.exists() && running.home.path(".kube/jackstay/serving.previous.pem").exists());
    assert!(trusts(&both, &after.chain[0]) && !trusts(&old, &after.chain[0]));
    wait::until_ok_blocking(Duration::from_secs(30), "the new certificate", || {
        let served = served_certificate(running.addr);
        if served == after.chain[0] { Ok(()) } else { Err("the old certificate".to_owned()) }
    });
    running.wait_for_response();
    assert!(running.proxy.stop());
}

/// The certificate that a TLS server presents.
fn served_certificate(server: SocketAddr) -> CertificateDer<'static> {
    let config = tls::client(Trust::Any, None, "h2");
    let name = "localhost".try_into().unwrap();
    let mut tls = rustls::ClientConnection::new(config, name).unwrap();
    let mut stream = TcpStream::connect(server).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut stream).unwrap();
    }
    tls.peer_certificates().unwrap()[0].clone().into_owned()
}
