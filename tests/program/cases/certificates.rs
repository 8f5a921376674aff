//! Certificates of apiservers and clients that Go accepts or refuses in another way than webpki. The table of all
//! inputs is in `crates/net/src/tls/verification/tests.rs`.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output};

use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::pki::{Issued, Pki, Subject};
use jackstay_apiserver::{self as apiserver, ApiServerHandle, Options};
use jackstay_testkit::child::{Process, free_address};
use jackstay_testkit::tls::{self, Trust};
use jackstay_testkit::{pages, wait};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, SanType,
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// An apiserver with an unusual certificate, and the files of a jackstay in front of it.
struct Trial {
    dir: tempfile::TempDir,
    clients: Pki,
    admin: Issued,
    server: ApiServerHandle,
    admin_address: SocketAddr,
    terminating: SocketAddr,
    passing: SocketAddr,
}

/// Names of a serving certificate: its common name, and 127.0.0.1.
fn serving(change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
    change(&mut params);
    params
}

/// A self-signed certificate that is its own CA.
fn self_signed(change: impl FnOnce(&mut CertificateParams)) -> (Issued, String) {
    let key = KeyPair::generate().unwrap();
    let certificate = serving(change).self_signed(&key).unwrap();
    (Issued::new(&certificate, &key), certificate.pem())
}

/// A certificate with the CA that signed it.
fn signed(
    change_ca: impl FnOnce(&mut CertificateParams),
    change: impl FnOnce(&mut CertificateParams),
) -> (Issued, String) {
    let (key, ca_key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, "cluster-ca");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    change_ca(&mut ca);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let certificate = serving(change).signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
    (Issued::new(&certificate, &key), ca_pem)
}

impl Trial {
    fn new((certificate, ca): (Issued, String)) -> Self {
        let clients = Pki::new("clients").unwrap();
        let options = Options { certificate: Some(certificate), ..Options::named("a") };
        let server = apiserver::start(&Cluster::new(), &clients, options).unwrap();
        let admin = clients.client(&Subject::admin()).unwrap();
        let trial = Self {
            dir: tempfile::tempdir().unwrap(),
            clients,
            admin,
            server,
            admin_address: free_address(),
            terminating: free_address(),
            passing: free_address(),
        };
        fs::write(trial.path("ca.crt"), ca).unwrap();
        trial
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a configuration with listeners of these modes, each with an upstream of its own.
    fn configure(&self, modes: &[&str]) -> PathBuf {
        let dir = self.dir.path();
        let ca = self.path("ca.crt");
        let client_ca = self.clients.write_ca(&{
            let path = self.path("clients");
            fs::create_dir_all(&path).unwrap();
            path
        });
        let (cert_file, key_file) = self.admin.write_to(dir, "admin").unwrap();
        let serving = self.clients.server().unwrap().write_pair(dir, "serving").unwrap();
        let upstreams = modes.iter().map(|mode| {
            json!({ "name": mode, "endpoints": [self.server.addr.to_string()], "tls": { "ca_file": ca } })
        });
        let listeners = modes.iter().map(|mode| match *mode {
            "terminate" => json!({
                "name": mode, "mode": mode, "upstream": mode, "bind": [self.terminating.to_string()],
                "tls": { "cert_file": serving, "key_file": serving },
                "client_ca_file": client_ca.as_ref().unwrap(),
                "identities": [{ "cert_file": cert_file, "key_file": key_file }],
            }),
            _ => json!({
                "name": mode, "mode": mode, "upstream": mode, "bind": [self.passing.to_string()],
            }),
        });
        let config = json!({
            "admin": { "bind": self.admin_address.to_string() },
            "state_dir": "",
            "upstreams": upstreams.collect::<Vec<_>>(),
            "listeners": listeners.collect::<Vec<_>>(),
        });
        let file = self.path("jackstay.yaml");
        fs::write(&file, config.to_string()).unwrap();
        file
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(args).current_dir(self.dir.path()).env_clear().env("HOME", self.dir.path());
        command
    }

    fn output(&self, args: &[&str]) -> (Output, String) {
        let output = self.command(args).output().unwrap();
        let text = [&output.stdout[..], &output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        (output, words(&text))
    }

    fn start(&self, modes: &[&str]) -> Process {
        let file = self.configure(modes);
        Process::spawn(self.command(&["run", "--config", file.to_str().unwrap()]))
    }

    async fn status(&self) -> Option<Value> {
        let page = pages::get(self.admin_address, "/status").await.ok()?;
        serde_json::from_str(page.split_once("\r\n\r\n")?.1).ok()
    }

    /// Waits until the endpoint of an upstream is in one of these states, and returns its reason.
    async fn endpoint_is(&self, upstream: &str, states: &[&str]) -> String {
        wait::until_ok(wait::PATIENCE, &format!("{upstream} is in {states:?}"), async || {
            let status = self.status().await.ok_or_else(|| "no status".to_owned())?;
            let upstreams = status["upstreams"].as_array().cloned().unwrap_or_default();
            let found = upstreams.iter().find(|entry| entry["name"] == upstream);
            let endpoint = found.map(|entry| entry["endpoints"][0].clone()).unwrap_or_default();
            let is_there = states.iter().any(|state| endpoint["state"] == *state);
            let reason = endpoint["reason"].as_str().unwrap_or_default().to_owned();
            if is_there { Ok(reason) } else { Err(endpoint.to_string()) }
        })
        .await
    }

    /// A request through the listener that terminates TLS.
    async fn request(&self, shown: &Issued) -> (u16, String) {
        let credentials = Credentials::anonymous(&self.clients.ca_pem()).certificate(shown);
        let client = Client::connect(self.terminating, &credentials).await.unwrap();
        let reply = client.get("/api/v1/namespaces/default/configmaps").await.unwrap();
        let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
        (reply.status.as_u16(), message)
    }

    /// A TLS handshake with the apiserver through the listener that passes connections through.
    async fn handshake(&self) {
        let config = tls::client(Trust::Any, None, "h2");
        let stream = TcpStream::connect(self.passing).await.unwrap();
        let name = "127.0.0.1".try_into().unwrap();
        TlsConnector::from(config).connect(name, stream).await.unwrap();
    }
}

/// A text with line breaks and indents as single spaces.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn any_usage(params: &mut CertificateParams) {
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any];
}

fn as_ca(params: &mut CertificateParams) {
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_whose_certificates_go_accepts_are_used_in_both_modes() {
    for certificate in [self_signed(as_ca), self_signed(|_| ()), signed(|_| (), any_usage)] {
        let trial = Trial::new(certificate);
        let _process = trial.start(&["terminate", "passthrough"]);
        for upstream in ["terminate", "passthrough"] {
            trial.endpoint_is(upstream, &["ready"]).await;
        }
        let (status, message) = trial.request(&trial.admin).await;
        assert_eq!(status, 200, "{message}");
        trial.handshake().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_any_extended_key_usage_is_served() {
    let trial = Trial::new(signed(|_| (), |_| ()));
    let authority = trial.clients.authority().unwrap();
    let ca_key = KeyPair::from_pem(&authority.key_pem).unwrap();
    let issuer = Issuer::from_ca_cert_der(&authority.cert_der(), ca_key).unwrap();
    let issue = |usage: ExtendedKeyUsagePurpose| {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let admin = Subject::admin();
        for group in &admin.groups {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.distinguished_name.push(DnType::CommonName, &admin.user);
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        Issued::new(&params.signed_by(&key, &issuer).unwrap(), &key)
    };
    let _process = trial.start(&["terminate"]);
    trial.endpoint_is("terminate", &["ready"]).await;
    let (status, message) = trial.request(&issue(ExtendedKeyUsagePurpose::Any)).await;
    assert_eq!(status, 200, "{message}");
    let (status, message) = trial.request(&issue(ExtendedKeyUsagePurpose::ServerAuth)).await;
    assert_eq!(status, 401, "{message}");
    let sentence = "it does not permit client authentication, only serverAuth (extendedKeyUsage): reissue it with \
                    extendedKeyUsage clientAuth";
    assert!(message.contains(sentence), "{message}");
}

/// Each input, with the certificate and the reason, and the remedy, as every output says them.
fn refused() -> [((Issued, String), String, &'static str); 4] {
    let past = rcgen::date_time_ymd(2024, 1, 2);
    let foreign = (signed(|_| (), |_| ()).0, signed(|_| (), |_| ()).1);
    let leaf = |reason: &str| format!("the certificate of CN=kube-apiserver {reason}");
    [
        (
            signed(|_| (), |params| params.subject_alt_names.clear()),
            leaf("is not valid for 127.0.0.1: it has no subject alternative name"),
            "eissue it with subjectAltName, since the common name is not used",
        ),
        (
            signed(|ca| ca.not_after = past, |_| ()),
            "the CA certificate of CN=cluster-ca in DIR/ca.crt expired on 2024-01-02T00:00:00Z"
                .to_owned(),
            "enew the CA",
        ),
        (
            signed(|_| (), as_ca),
            leaf(
                "is that of a CA (basicConstraints CA:TRUE) and is used as that of a client or server",
            ),
            "eissue it with CA:FALSE, or add the certificate itself to DIR/ca.crt",
        ),
        (
            foreign,
            leaf("is not signed by a trusted CA"),
            "has the name of a CA in DIR/ca.crt and another key; name the CA file of this cluster",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_certificate_has_one_sentence_in_every_output() {
    for (certificate, statement, remedy) in refused() {
        let trial = Trial::new(certificate);
        let dir = trial.dir.path().display().to_string();
        let (statement, remedy) = (statement.replace("DIR", &dir), remedy.replace("DIR", &dir));
        let says = |place: &str, text: &str| {
            assert!(text.contains(&statement) && text.contains(&remedy), "{place}: {text}");
        };
        let mut process = trial.start(&["terminate"]);
        says("/status", &trial.endpoint_is("terminate", &["ejected"]).await);
        says("503", &trial.request(&trial.admin).await.1);
        says("log", &process.wait_output("to=\"ejected\"").await);
        let admin = trial.admin_address.to_string();
        says("status", &trial.output(&["status", "--admin", &admin]).1);
        let doctor = ["doctor", "--config", "jackstay.yaml", "--duration", "1s"];
        says("doctor", &trial.output(&doctor).1);

        // The configuration is refused before a file is written, except for a wrong name, for which there is a note.
        let kubeconfig = apiserver::pki::kubeconfig(
            &format!("https://{}", trial.server.addr),
            &fs::read_to_string(trial.path("ca.crt")).unwrap(),
            Some(&trial.admin),
            None,
        );
        fs::write(trial.path("in.kubeconfig"), kubeconfig).unwrap();
        if statement.contains("is not valid for") {
            continue;
        }
        let ca = trial.clients.write_ca(&trial.path("clients")).unwrap();
        let (output, text) = trial.output(&[
            "kubeconfig",
            "--mode",
            "terminate",
            "--kubeconfig",
            "in.kubeconfig",
            "--out",
            "out.kubeconfig",
            "--config-out",
            "out/jackstay.yaml",
            "--client-ca-file",
            ca.to_str().unwrap(),
        ]);
        assert!(!output.status.success() && !trial.path("out.kubeconfig").exists(), "{text}");
        let in_entry = text.replace("cluster \"demo\" of the kubeconfig", &format!("{dir}/ca.crt"));
        says("kubeconfig", &in_entry);
    }
}

/// The clients verify the server themselves, so the opinion of the probe must not say that nothing is usable.
#[tokio::test(flavor = "multi_thread")]
async fn flows_pass_to_a_server_that_the_probe_cannot_verify() {
    for (certificate, statement, _) in refused() {
        let trial = Trial::new(certificate);
        let statement = statement.replace("DIR", &trial.dir.path().display().to_string());
        let mut process = trial.start(&["passthrough"]);
        let reason = trial.endpoint_is("passthrough", &["unverified"]).await;
        assert!(reason.contains(&statement) && reason.contains("flows are forwarded"), "{reason}");
        trial.handshake().await;
        let admin = trial.admin_address.to_string();
        let wait = ["status", "--wait", "--timeout", "10s", "--admin", &admin];
        let (output, text) = trial.output(&wait);
        assert!(output.status.success() && text.contains(&statement), "{text}");
        let readyz = pages::get(trial.admin_address, "/readyz").await.unwrap();
        assert!(readyz.contains(&statement), "{readyz}");
        let line = process.wait_output("to=\"unverified\"").await;
        assert!(line.contains(&statement), "{line}");
        let all = [words(&process.output()), text, readyz].concat();
        for wrong in ["unusable", "no usable", "not ready"] {
            assert!(!all.contains(wrong), "{wrong}: {all}");
        }
    }
}

#[test]
fn check_names_the_identity_whose_clients_are_refused() {
    let trial = Trial::new(signed(|_| (), |_| ()));
    let file = trial.configure(&["terminate"]);
    let other = Pki::new("clients").unwrap().client(&Subject::admin()).unwrap();
    other.write_to(trial.dir.path(), "admin").unwrap();
    let (output, text) = trial.output(&["check", "--config", file.to_str().unwrap()]);
    assert!(output.status.success(), "{text}");
    let sentence = "is not signed by a trusted CA: its issuer, CN=clients, has the name of a CA in";
    assert!(text.contains(sentence) && text.contains("clients that use it get 401"), "{text}");
    assert!(text.contains("listeners[0].identities[0].cert_file"), "{text}");
}
