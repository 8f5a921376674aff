//! No secret appears in the log or on the admin endpoint. The tests put secrets into every place that clients,
//! operators and apiservers can fill, and search all output for them.
//!
//! The binary runs with level `trace` and `access: all`, in both log formats.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use crate::support::child::KillOnDrop;
use crate::support::{CONFIGMAPS, PATIENCE, TestCluster, pages, until};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::User;
use serde_json::json;

const BEARER: &str = "hunter2-bearer-AbCdEf0123456789";
const WRONG_BEARER: &str = "hunter2-wrong-AbCdEf0123456789";
const PROBE_TOKEN: &str = "hunter2-probe-token-file-012345";
const KUBECONFIG_TOKEN: &str = "hunter2-in-kubeconfig-012345678";
const SUBPROTOCOL: &str = "hunter2-in-subprotocol-01234567";
const QUERY: &str = "hunter2-in-query-AbCdEf012345678";
const COMMAND: &str = "hunter2-in-exec-command-0123456";
const COOKIE: &str = "hunter2-in-cookie-AbCdEf01234567";
const BASIC: &str = "hunter2-in-basic-AbCdEf012345678";
const IMPERSONATED: &str = "hunter2-impersonated-0123456789";
const REMOTE: &str = "hunter2-x-remote-user-012345678";
const BODY: &str = "hunter2-in-body-of-secret-012345";
const SECRETS: &[&str] = &[
    BEARER,
    WRONG_BEARER,
    PROBE_TOKEN,
    KUBECONFIG_TOKEN,
    SUBPROTOCOL,
    QUERY,
    COMMAND,
    COOKIE,
    BASIC,
    IMPERSONATED,
    REMOTE,
    BODY,
];

/// A running jackstay, and the lines that it has written to stderr.
struct Running {
    child: KillOnDrop,
    lines: Receiver<String>,
    output: String,
}

impl Running {
    fn start(config: &std::path::Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_jackstay"))
            .args(["run", "--config"])
            .arg(config)
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self { child: KillOnDrop(child), lines, output: String::new() }
    }

    /// Reads lines until one contains `word`, and returns the address in it.
    fn address(&mut self, word: &str) -> SocketAddr {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).expect("the log has the address");
            self.output.push_str(&line);
            self.output.push('\n');
            if line.contains(word) {
                let at = line.find("127.0.0.1:").expect("an address");
                let is_address = |c: char| c.is_ascii_digit() || c == '.' || c == ':';
                let text: String = line[at..].chars().take_while(|c| is_address(*c)).collect();
                return text.parse().expect("an address");
            }
        }
    }

    /// Stops it and returns all its output.
    fn end(mut self) -> String {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill").success());
        // Ends when the process closes the pipe.
        for line in &self.lines {
            self.output.push_str(&line);
            self.output.push('\n');
        }
        self.child.wait().expect("it ends");
        std::mem::take(&mut self.output)
    }
}

/// The encodings in which a secret might appear.
fn encodings(secret: &str) -> Vec<String> {
    let hex = secret.bytes().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    let list: Vec<String> = secret.bytes().map(|byte| byte.to_string()).collect();
    let unpadded = STANDARD.encode(secret).trim_end_matches('=').to_owned();
    vec![secret.to_owned(), unpadded, URL_SAFE_NO_PAD.encode(secret), hex, list.join(", ")]
}

/// Sends a GET and waits for the response head. Accepts every response, and the end of the connection.
async fn head(client: &Client, path: &str, headers: &[(&str, &str)]) {
    let response = client.send(Method::GET, path, headers, "");
    drop(
        tokio::time::timeout(PATIENCE, response).await.expect("a response, or the connection ends"),
    );
}

/// Sends a request for each place where a client can put a secret.
async fn send_secrets(world: &TestCluster, listener: SocketAddr) {
    let certs = &world.certs;
    let anonymous = certs.anonymous();
    let client = Client::connect(listener, &anonymous).await.expect("HTTP/2");
    let basic = format!("Basic {}", STANDARD.encode(format!("root:{BASIC}")));
    let bearer = format!("Bearer {BEARER}");
    let wrong = format!("Bearer {WRONG_BEARER}");
    let cookie = format!("session={COOKIE}");
    let encoded = URL_SAFE_NO_PAD.encode(SUBPROTOCOL);
    let subprotocol = format!("base64url.bearer.authorization.k8s.io.{encoded}, v5.channel.k8s.io");
    let exec = format!("/api/v1/namespaces/default/pods/p/exec?command=mysql&command=-p{COMMAND}");
    let query = format!("{CONFIGMAPS}?access_token={QUERY}&token={QUERY}&limit=1");
    let requests: &[(&str, &[(&str, &str)])] = &[
        (CONFIGMAPS, &[("authorization", &bearer)]),
        (CONFIGMAPS, &[("authorization", &wrong)]),
        (CONFIGMAPS, &[("authorization", &basic)]),
        (CONFIGMAPS, &[("authorization", &bearer), ("cookie", &cookie)]),
        (CONFIGMAPS, &[("authorization", &bearer), ("impersonate-user", IMPERSONATED)]),
        (CONFIGMAPS, &[("authorization", &bearer), ("impersonate-extra-x", IMPERSONATED)]),
        (CONFIGMAPS, &[("x-remote-user", REMOTE), ("x-remote-extra-token", REMOTE)]),
        (&query, &[("authorization", &bearer)]),
        (&exec, &[("authorization", &bearer)]),
        (CONFIGMAPS, &[("sec-websocket-protocol", &subprotocol)]),
    ];
    for (path, headers) in requests {
        // The response does not matter: the test searches the output.
        head(&client, path, headers).await;
    }

    let upgrade = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-protocol", subprotocol.as_str()),
    ];
    let http1 = Client::connect_http1(listener, &anonymous).await.expect("HTTP/1.1");
    head(&http1, &exec, &upgrade).await;
    for hop_by_hop in ["authorization", "cookie, x-remote-user"] {
        let http1 = Client::connect_http1(listener, &anonymous).await.expect("HTTP/1.1");
        let headers =
            [("connection", hop_by_hop), ("authorization", bearer.as_str()), ("cookie", &cookie)];
        head(&http1, CONFIGMAPS, &headers).await;
    }

    // A secret in a request body, a response and a watch event.
    let admin = Client::connect(listener, &certs.credentials()).await.expect("HTTP/2");
    let secret = |name: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name},
            "data": {"password": BODY, "encoded": STANDARD.encode(BODY)}})
    };
    let mut watch = admin.watch(&format!("{CONFIGMAPS}?watch=1")).await.expect("a watch");
    assert_eq!(admin.post(CONFIGMAPS, &secret("s")).await.expect("an answer").status, 201);
    let event = tokio::time::timeout(PATIENCE, watch.next()).await.expect("an event");
    assert!(
        format!("{:?}", event.expect("no error")).contains(BODY),
        "the watch delivers the secret"
    );
    let reply = admin.get(&format!("{CONFIGMAPS}/s")).await.expect("an answer");
    assert!(String::from_utf8_lossy(&reply.body).contains(BODY));
    // The errors of a killed apiserver are logged too.
    world.servers[0].kill();
    let _ = tokio::time::timeout(PATIENCE, admin.post(CONFIGMAPS, &secret("t"))).await;
}

async fn assert_no_secret_leaks(format: &str) {
    let world = TestCluster::new(1);
    world.state.add_token(BEARER, User::new("alice", &["system:masters"]));
    world.state.add_token(PROBE_TOKEN, User::new("probe", &[]));
    let dir = world.certs.path();
    let file = |name: &str| dir.join(name).to_str().expect("UTF-8").to_owned();
    std::fs::write(dir.join("probe.token"), PROBE_TOKEN).expect("written");
    // Discovery uses this token, and the apiserver refuses it, which is logged with the reason.
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:6443"}}],
        "users": [{"name": "u", "user": {"token": KUBECONFIG_TOKEN}}],
    });
    std::fs::write(dir.join("kubeconfig"), kubeconfig.to_string()).expect("written");
    let endpoints: Vec<_> = world.addresses().iter().map(ToString::to_string).collect();
    let config = json!({
        "admin": {"bind": "127.0.0.1:0"},
        "state_dir": "",
        "shutdown": {"drain_timeout": "1s"},
        "log": {"level": "trace", "format": format, "access": "all"},
        "upstreams": [{
            "name": "control-plane",
            "endpoints": endpoints,
            "discovery": {"kubeconfig": file("kubeconfig")},
            "tls": {"ca_file": file("ca.crt")},
            "health": {"readyz": {"interval": "1s", "token_file": file("probe.token")}},
        }],
        "listeners": [{
            "name": "apiserver",
            "bind": ["127.0.0.1:0"],
            "upstream": "control-plane",
            "tls": {"cert_file": file("serving.crt"), "key_file": file("serving.key")},
            "client_ca_file": file("ca.crt"),
            "identities": [{"cert_file": file("admin.crt"), "key_file": file("admin.key")}],
        }],
    });
    let path = dir.join("jackstay.yaml");
    std::fs::write(&path, config.to_string()).expect("written");

    let mut running = Running::start(&path);
    let admin = running.address("the admin endpoint listens");
    let listener = running.address("\"apiserver\"");
    let contains = async |path, text: &str| pages::get(admin, path).await.unwrap().contains(text);
    until("it is ready", async || contains("/readyz", "readyz check passed").await).await;
    until("discovery is refused", async || contains("/events", "401").await).await;
    send_secrets(&world, listener).await;

    let mut output = String::new();
    for path in ["/", "/status", "/config", "/metrics", "/events", "/history", "/readyz", "/livez"]
    {
        let text = pages::get(admin, path).await.unwrap();
        assert!(text.len() > 100 || path == "/livez", "{path}: {text}");
        output.push_str(&text);
    }
    let log = running.end();
    let refused = |line: &&str| line.contains("slices") && line.contains("401");
    assert!(log.lines().any(|line| refused(&line)), "discovery is refused:\n{log}");
    let lines = |part: &str| log.lines().filter(|line| line.contains(part)).count();
    assert!(lines("/configmaps") >= 10, "every request is logged:\n{log}");
    let reused = lines("reused=true") + lines("\"reused\":true");
    assert!(reused > 0, "some requests use an open connection");
    assert!(lines("TRACE") > 100, "the log has level trace");
    assert!(lines("?access_token=***") == 1, "the query is logged masked");
    output.push_str(&log);

    let mut secrets: Vec<String> = SECRETS.iter().flat_map(|secret| encodings(secret)).collect();
    for key in ["serving.key", "admin.key"] {
        let pem = std::fs::read_to_string(dir.join(key)).expect("a key");
        secrets.extend(pem.lines().filter(|line| !line.starts_with("---")).map(str::to_owned));
    }
    let leaked: Vec<_> = output
        .lines()
        .filter(|line| secrets.iter().any(|secret| line.contains(secret.as_str())))
        .map(|line| &line[..line.len().min(600)])
        .collect();
    assert!(leaked.is_empty(), "{} lines with a secret, such as\n{}", leaked.len(), leaked[0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn text_log_and_admin_pages_contain_no_secret() {
    assert_no_secret_leaks("text").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn json_log_and_admin_pages_contain_no_secret() {
    assert_no_secret_leaks("json").await;
}

#[test]
fn encodings_match_headers_and_debug_output() {
    let encodings = encodings(BEARER);
    assert!(encodings.iter().all(|encoding| encoding.len() >= BEARER.len()));
    assert!(format!("authorization: Bearer {BEARER}").contains(&encodings[0]));
    assert!(format!("{:?}", BEARER.as_bytes()).contains(&encodings[4]));
}
