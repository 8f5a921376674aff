//! PEM files and private keys: what is read, and the sentence for what is not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jackstay_apiserver::pki::{Issued, Pki, Subject};
use jackstay_testkit::child::{PROCESS_TIMEOUT, Process, free_address};
use jackstay_testkit::pages::get_blocking;
use jackstay_testkit::wait;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----\n";
const END: &str = "-----END CERTIFICATE-----";
const ENCRYPTED: &str =
    "the private key is encrypted; store it without a passphrase (openssl pkey -in FILE";

/// A directory with the certificates of two CAs and of one client.
struct Files {
    dir: tempfile::TempDir,
    old_ca: String,
    new_ca: String,
    client: Issued,
}

impl Files {
    fn new() -> Self {
        let (old, new) = (Pki::new("old").unwrap(), Pki::new("new").unwrap());
        let client = old.client(&Subject::admin()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        old.server().unwrap().write_to(dir.path(), "server").unwrap();
        let unix = |pem: String| pem.replace("\r\n", "\n");
        Self { dir, old_ca: unix(old.ca_pem()), new_ca: unix(new.ca_pem()), client }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, contents).unwrap();
        path
    }

    fn jackstay(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(args).current_dir(self.dir.path()).env_clear();
        command.env("HOME", self.dir.path()).output().unwrap()
    }

    /// Runs `check` for an upstream whose CA is the file `ca`. Returns the exit code and the output.
    fn check_ca(&self, ca: &Path) -> (Option<i32>, String) {
        let config = passthrough(ca, "127.0.0.1:0");
        self.write("jackstay.yaml", config);
        output(&self.jackstay(&["check", "--config", "jackstay.yaml"]))
    }

    /// Runs `check` for a listener with the identity in these files.
    fn check_identity(&self, cert: &str, key: &str) -> (Option<i32>, String) {
        self.write("ca.crt", &self.old_ca);
        let config = format!(
            "state_dir: ''\n\
             upstreams: [{{name: u, endpoints: ['127.0.0.1:1'], tls: {{ca_file: ca.crt}}}}]\n\
             listeners:\n\
             - name: l\n  bind: ['127.0.0.1:0']\n  mode: terminate\n  upstream: u\n  \
             tls: {{cert_file: server.crt, key_file: server.key}}\n  client_ca_file: ca.crt\n  \
             identities: [{{cert_file: {cert}, key_file: {key}}}]\n"
        );
        let absolute = |name: &str| self.path(name).display().to_string();
        let mut config = config;
        for name in ["ca.crt", "server.crt", "server.key", cert, key] {
            config = config.replace(&format!(": {name}"), &format!(": '{}'", absolute(name)));
        }
        self.write("jackstay.yaml", config);
        output(&self.jackstay(&["check", "--config", "jackstay.yaml"]))
    }

    /// Runs `kubeconfig --mode terminate` for a kubeconfig with these data, which may be text or its Base64.
    fn kubeconfig(&self, ca: &str, certificate: &str, key: &str) -> (Option<i32>, String) {
        let kubeconfig = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:6443",
                "certificate-authority-data": ca}}],
            "users": [{"name": "u", "user": {"client-certificate-data": certificate, "client-key-data": key}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        });
        self.write("in.kubeconfig", kubeconfig.to_string());
        let _ = fs::remove_dir_all(self.path("js"));
        let args = [
            "kubeconfig",
            "--offline",
            "--mode",
            "terminate",
            "--kubeconfig",
            "in.kubeconfig",
            "--force",
        ];
        let args =
            [&args[..], &["--out", "out.kubeconfig", "--config-out", "js/jackstay.yaml"]].concat();
        output(&self.jackstay(&args))
    }
}

fn passthrough(ca: &Path, admin: &str) -> String {
    format!(
        "state_dir: ''\nadmin: {{bind: '{admin}'}}\n\
         upstreams: [{{name: u, endpoints: ['127.0.0.1:1'], tls: {{ca_file: '{}'}}}}]\n\
         listeners: [{{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}}]\n",
        ca.display()
    )
}

/// The exit code, and both outputs in one line.
fn output(output: &Output) -> (Option<i32>, String) {
    let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(!text.contains("panicked"), "{text}");
    (output.status.code(), text)
}

/// A bundle of two CAs in which the second is damaged or unusual: never "ok" without a word about it.
#[test]
fn ca_bundle_is_read_or_the_dropped_certificate_is_named() {
    let files = Files::new();
    let (old, new) = (&files.old_ca, &files.new_ca);
    let lines = old.lines().count();
    let glued = format!("{}{new}", old.trim_end());
    let line = lines + 1;
    // The text, and what check says besides "ok".
    let read: [(String, &str); 9] = [
        (format!("{old}{new}"), ""),
        (format!("{old}{}", new.trim_end()), ""),
        (format!("subject=CN = old\n\n{old}\nBag Attributes\n  friendlyName: new\n{new}"), ""),
        (format!("{old}{new}").replace('\n', "\r\n"), ""),
        (glued, "note: line N-1: other text follows the END of a block on the same line"),
        (
            format!("{old}{new}").replace('\n', "\r"),
            "note: line 1: the lines end with carriage returns alone",
        ),
        (format!("\u{feff}{old}{new}"), "note: line 1: the file begins with a byte order mark"),
        (
            format!("{old}  {}", new.replace('\n', "\n  ")),
            "note: line N: the BEGIN or END of a block is indented",
        ),
        (format!("{old}{old}{new}"), ""),
    ];
    let skipped: [(String, &str); 9] = [
        (new.replace(END, ""), "line N: this certificate is not used: it has no END line"),
        (
            new[..new.len() / 2].to_owned(),
            "line N: this certificate is not used: it has no END line",
        ),
        (new.replace(BEGIN, ""), "a certificate is not read: it has an END line and no BEGIN line"),
        (
            new.replace("-----BEGIN", "----BEGIN"),
            "line N: a certificate is not read: the line must begin with",
        ),
        (
            new.replace("CERTIFICATE", "TRUSTED CERTIFICATE"),
            "line N: the block TRUSTED CERTIFICATE is not read",
        ),
        (
            new.replace("CERTIFICATE", "X509 CERTIFICATE"),
            "line N: the block X509 CERTIFICATE is not read: write",
        ),
        (
            new.replace('\n', " "),
            "line N: this certificate is not used: its line breaks are missing",
        ),
        (
            new.replace(BEGIN, &format!("{BEGIN}%")),
            "line N: this certificate is not used: line N+1 is not Base64",
        ),
        (
            format!("{BEGIN}MIIB\n{END}\n"),
            "line N: this certificate is not used: not an X.509 certificate",
        ),
    ];
    let numbered = |text: &str| {
        let text = text.replace("N+1", &(line + 1).to_string());
        text.replace("N-1", &(line - 1).to_string()).replace("line N", &format!("line {line}"))
    };
    for (text, note) in &read {
        let (code, out) = files.check_ca(&files.write("ca.crt", text));
        assert_eq!(code, Some(0), "{out}");
        assert!(!out.contains("warning"), "{out}");
        let note = numbered(note);
        let parts: Vec<&str> = note.splitn(2, ": ").collect();
        assert!(parts.iter().all(|part| out.contains(part)), "{note}: {out}");
        assert_eq!(out.contains("note: "), !note.is_empty(), "{out}");
    }
    for (damaged, sentence) in &skipped {
        let ca = files.write("ca.crt", format!("{old}{damaged}"));
        let (code, out) = files.check_ca(&ca);
        assert_eq!(code, Some(0), "the other certificate is in use: {out}");
        let is_named = |line: &str| {
            let is_warning =
                line.starts_with("warning: ") && line.contains("upstreams[0].tls.ca_file");
            is_warning && line.contains("ca.crt: line ") && line.contains(&numbered(sentence))
        };
        assert!(out.lines().any(is_named), "{sentence}: {out}");
        // Alone it is an error.
        let (code, out) = files.check_ca(&files.write("ca.crt", damaged));
        assert_eq!(code, Some(2), "{out}");
        assert!(out.contains("ca.crt: line ") || out.contains(": line 1: "), "{out}");
    }
}

#[test]
fn file_that_is_not_pem_is_named_with_its_format() {
    let files = Files::new();
    let certificate = Pki::new("x").unwrap();
    let (der, pem) = (certificate.ca_der(), certificate.ca_pem());
    let utf16: Vec<u8> =
        std::iter::once(0xfeff).chain(pem.encode_utf16()).flat_map(u16::to_le_bytes).collect();
    let pkcs12 =
        [&[0x30, 0x82, 0x09, 0x00, 2, 1, 3, 0x30][..], &[6, 9, 42, 134, 72, 134, 247, 13, 1, 7, 1]]
            .concat();
    let key = files.client.key_pem.clone();
    for (contents, expected) in [
        (Vec::new(), "is empty"),
        (b" \n\n".to_vec(), "is empty"),
        (der.to_vec(), "is a certificate in DER: convert it to PEM (openssl x509 -inform DER"),
        (pkcs12, "is PKCS #12: convert it to PEM (openssl pkcs12"),
        (b"\xfe\xed\xfe\xed\0\0\0\x02".to_vec(), "is a Java keystore"),
        (utf16, "is UTF-16: save it as UTF-8"),
        (
            STANDARD.encode(&pem).into_bytes(),
            "is PEM in Base64, as a Secret or a kubeconfig holds it",
        ),
        (STANDARD.encode(&der).into_bytes(), "is Base64 without its -----BEGIN and -----END lines"),
        (
            key.into_bytes(),
            "contains no certificate (PEM, -----BEGIN CERTIFICATE-----); it contains PRIVATE KEY (line 1)",
        ),
        (b"<html>".to_vec(), "contains no certificate (PEM, -----BEGIN CERTIFICATE-----)"),
    ] {
        let (code, out) = files.check_ca(&files.write("ca.crt", contents));
        assert_eq!(code, Some(2), "{out}");
        assert!(out.contains(&format!("ca.crt: {expected}")), "{expected}: {out}");
    }
    let huge = files.write("huge.crt", "");
    fs::File::options().write(true).open(&huge).unwrap().set_len(1 << 40).unwrap();
    fs::create_dir(files.path("dir.crt")).unwrap();
    for (path, expected) in [
        (huge, "larger than 4 MiB"),
        (files.path("dir.crt"), "not a regular file"),
        ("/dev/zero".into(), "not a regular file"),
        (files.path("none.crt"), "No such file"),
    ] {
        let (code, out) = files.check_ca(&path);
        assert_eq!(code, Some(2), "{out}");
        assert!(out.contains(&path.display().to_string()) && out.contains(expected), "{out}");
    }
}

/// Go reads the first private key whatever its label says, and none that is encrypted.
#[test]
fn private_key_is_read_or_the_reason_is_named() {
    let files = Files::new();
    let unix = |pem: &str| pem.replace("\r\n", "\n");
    let (cert, key) = (unix(&files.client.cert_pem), unix(&files.client.key_pem));
    let begin = "-----BEGIN PRIVATE KEY-----\n";
    let parameters =
        "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
    files.write("c.crt", &cert);
    for text in [
        key.clone(),
        key.replace("PRIVATE KEY", "EC PRIVATE KEY"),
        key.replace("PRIVATE KEY", "RSA PRIVATE KEY"),
        format!("{parameters}{key}"),
        format!("{key}{cert}"),
        format!("Bag Attributes\n  localKeyID: 01\n{key}"),
    ] {
        files.write("c.key", &text);
        let (code, out) = files.check_identity("c.crt", "c.key");
        assert_eq!(code, Some(0), "{text}: {out}");
    }
    // Certificate and key in one file, without a line break between them.
    files.write("pair.pem", format!("{}{key}", cert.trim_end()));
    let (code, out) = files.check_identity("pair.pem", "pair.pem");
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("other text follows the END of a block on the same line"), "{out}");

    let locked = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,6F7353FBC49FF298\n\n";
    let other = Pki::new("other").unwrap().client(&Subject::admin()).unwrap().key_pem;
    for (text, expected) in [
        (key.replace(begin, &format!("{begin}{locked}")), format!("line 1: {ENCRYPTED}")),
        (key.replace("PRIVATE", "ENCRYPTED PRIVATE"), format!("line 1: {ENCRYPTED}")),
        (
            key.replace("PRIVATE", "OPENSSH PRIVATE"),
            "line 1: the private key has the format of OpenSSH".into(),
        ),
        (
            key.replace("PRIVATE", "DSA PRIVATE"),
            "line 1: the private key is damaged or of a kind that is not".into(),
        ),
        (key.replace("PRIVATE", "PUBLIC"), "contains no private key".into()),
        (
            cert.clone(),
            "contains no private key (PEM, -----BEGIN PRIVATE KEY-----); it contains CERTIFICATE"
                .into(),
        ),
        (key[..90].to_owned(), "line 1: the private key is not read: it has no END line".into()),
        (
            format!("{begin}MIGH\n-----END PRIVATE KEY-----\n"),
            "line 1: the private key is damaged".into(),
        ),
        (STANDARD.encode(&key), "is PEM in Base64".into()),
        (other.clone(), "the private key does not belong to the certificate in".into()),
    ] {
        files.write("c.key", &text);
        let (code, out) = files.check_identity("c.crt", "c.key");
        assert_eq!(code, Some(2), "{text}: {out}");
        let is_named =
            |line: &str| line.contains("identities[0].key_file: ") && line.contains(&expected);
        assert!(out.lines().any(is_named) && out.contains("c.key: "), "{expected}: {out}");
    }
    files.write("c.key", &key);
    files.write("c.crt", &cert[..200]);
    let (code, out) = files.check_identity("c.crt", "c.key");
    assert_eq!(code, Some(2), "{out}");
    assert!(
        out.contains("c.crt: line 1: the certificate is not read: it has no END line"),
        "{out}"
    );
}

/// `kubeconfig` names the entry of the kubeconfig, not a file that it does not write.
#[test]
fn kubeconfig_names_the_entry_whose_pem_is_not_read() {
    let files = Files::new();
    let (old, new) = (&files.old_ca, &files.new_ca);
    let (cert, key) =
        (files.client.cert_pem.replace("\r\n", "\n"), files.client.key_pem.replace("\r\n", "\n"));
    let encode = |text: &str| STANDARD.encode(text);
    let usual = [encode(old), encode(&cert), encode(&key)];
    let run = |ca: Option<String>, cert: Option<String>, key: Option<String>| {
        let [usual_ca, usual_cert, usual_key] = usual.clone();
        let (cert, key) = (cert.unwrap_or(usual_cert), key.unwrap_or(usual_key));
        files.kubeconfig(&ca.unwrap_or(usual_ca), &cert, &key)
    };
    let written = || fs::read_to_string(files.path("js/cluster-ca.crt")).unwrap();
    let (code, out) = run(Some(encode(&format!("{}{new}", old.trim_end()))), None, None);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("other text follows the END of a block on the same line"), "{out}");
    assert_eq!(written().matches("BEGIN CERTIFICATE").count(), 2);
    let (code, out) = run(Some(encode(&format!("{old}{}", &new[..200]))), None, None);
    assert_eq!(code, Some(0), "{out}");
    let warning = "warning: cluster \"k\": certificate-authority-data: line ";
    assert!(
        out.lines().any(|line| line.starts_with(warning) && line.contains("no END line")),
        "{out}"
    );

    let locked = key.replace("PRIVATE", "ENCRYPTED PRIVATE");
    let old_form = "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,6F73\n\nAAAA\n\
                    -----END EC PRIVATE KEY-----\n";
    for (ca, cert, key, expected) in [
        (
            Some(old.clone()),
            None,
            None,
            "certificate-authority-data is PEM: it must hold the Base64 of it",
        ),
        (
            Some(encode(&encode(old))),
            None,
            None,
            "cluster \"k\": certificate-authority-data: is PEM in Base64",
        ),
        (
            Some(encode("x")),
            None,
            None,
            "cluster \"k\": certificate-authority-data: contains no certificate",
        ),
        (
            None,
            Some(encode(&key)),
            None,
            "user \"u\": client-certificate-data: contains no certificate",
        ),
        (
            None,
            None,
            Some(encode(&locked)),
            "user \"u\": client-key-data: line 1: the private key is encrypted",
        ),
        (
            None,
            None,
            Some(encode(old_form)),
            "user \"u\": client-key-data: line 1: the private key is encrypted",
        ),
        (None, None, Some(encode(&cert)), "user \"u\": client-key-data: contains no private key"),
        (None, None, Some(key.clone()), "client-key-data is PEM: it must hold the Base64 of it"),
    ] {
        let (code, out) = run(ca, cert, key);
        assert_eq!(code, Some(2), "{expected}: {out}");
        assert!(out.contains(expected), "{expected}: {out}");
        assert!(!files.path("js").exists(), "{out}");
    }
}

/// A CA that is dropped is in the log at the start, in the status, and in the events of each reload.
#[tokio::test]
async fn dropped_ca_is_reported_at_the_start_and_at_a_reload() {
    let files = Files::new();
    let (good, damaged) = (format!("{}{}", files.old_ca, files.new_ca), {
        format!("{}{}", files.old_ca, files.new_ca.replace(END, ""))
    });
    let ca = files.write("ca.crt", &damaged);
    let admin = free_address();
    let config = files.write("jackstay.yaml", passthrough(&ca, &admin.to_string()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
    command.args(["run", "--config"]).arg(&config).env_clear();
    let mut process = Process::spawn(command);
    let sentence = "this certificate is not used: it has no END line";
    let line = process.wait_output(sentence).await;
    assert!(line.contains("WARN"), "{line}");
    let page = |path: &'static str| get_blocking(admin, path).unwrap_or_default();
    let shows = |path: &'static str, text: &str| {
        wait::until_blocking(PROCESS_TIMEOUT, text, || page(path).contains(text));
    };
    // The configuration is checked before the admin endpoint listens.
    shows("/status", sentence);
    assert!(ca_error(&page("/status")).as_str().unwrap().contains(sentence));
    shows("/events", sentence);
    shows("/events", "in use in part");
    let replace = |contents: &str| {
        files.write("next.crt", contents);
        fs::rename(files.path("next.crt"), &ca).unwrap();
    };
    replace(&good);
    process.wait_output("every certificate of the file is read").await;
    let read = "the status has no error of the CA";
    wait::until_blocking(PROCESS_TIMEOUT, read, || ca_error(&page("/status")).is_null());
    let before = process.output().matches(sentence).count();
    replace(&damaged);
    let limit = "the damaged file is reported again";
    wait::until_blocking(PROCESS_TIMEOUT, limit, || {
        process.output().matches(sentence).count() > before
    });
}

/// The error of the CA bundle of the upstream in a status page.
fn ca_error(page: &str) -> serde_json::Value {
    let (_, body) = page.split_once("\r\n\r\n").expect(page);
    let status: serde_json::Value = serde_json::from_str(body).expect(page);
    let ca = &status["upstreams"][0]["ca"];
    assert!(ca["file"].is_string(), "{page}");
    ca["error"].clone()
}
