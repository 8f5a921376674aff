//! Checks against real certificates, keys and tokens in a temporary directory.

use std::fs;
use std::time::{Duration, SystemTime};

use jackstay_apiserver::pki::{Pki, kubeconfig};
use jackstay_config::load;
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::certificate::CertInfo;
use jackstay_net::tls::local_ca::LocalCa;
use jackstay_net::tls::pem_files::load_ca;
use jackstay_sys::files::PRIVATE;
use rcgen::{CertificateParams, DnType, KeyPair};

use super::*;

/// 2026-07-01
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_782_864_000)
}

struct Dir(tempfile::TempDir);

impl Dir {
    /// A self-signed certificate that is valid in the years `from` to `to`.
    fn cert(&self, name: &str, cn: &str, from: i32, to: i32) {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if !cn.is_empty() {
            params.distinguished_name.push(DnType::CommonName, cn);
        }
        params.not_before = rcgen::date_time_ymd(from, 1, 1);
        params.not_after = rcgen::date_time_ymd(to, 1, 1);
        let key = KeyPair::generate().unwrap();
        self.write(&format!("{name}.crt"), &params.self_signed(&key).unwrap().pem());
        let path = self.0.path().join(format!("{name}.key"));
        jackstay_sys::files::replace(&path, key.serialize_pem().as_bytes(), PRIVATE).unwrap();
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.0.path().join(name), text).unwrap();
    }

    /// Errors, and warnings with notes, of a configuration in which `DIR` stands for this directory. The messages
    /// are returned without the directory.
    fn check(&self, readyz: &str, tls: &str, identities: &[&str]) -> (Vec<String>, Vec<String>) {
        let dir = self.0.path().display().to_string();
        let pair = |n: &str| format!("{{cert_file: DIR/{n}.crt, key_file: DIR/{n}.key}}");
        let identities: Vec<String> = identities.iter().map(|name| pair(name)).collect();
        let text = format!(
            "upstreams: [{{name: u, endpoints: ['10.0.0.1:6443'], tls: {{ca_file: DIR/ca.crt}}, \
             health: {{readyz: {{{readyz}}}}}}}]\n\
             listeners: [{{name: l, bind: ['127.0.0.1:0'], upstream: u, tls: {}, \
             client_ca_file: DIR/ca.crt, identities: [{}]}}]\n",
            pair(tls),
            identities.join(", ")
        );
        self.write("c.yaml", &text.replace("DIR", &dir));
        let file = self.0.path().join("c.yaml");
        let config = load(&file, [], &Overrides::default()).unwrap().config;
        let found = check_files(&file, &config, now());
        let clean = |text: String| text.replace(&format!("{dir}/"), "");
        let errors = found.errors.iter().map(|e| clean(e.to_string())).collect();
        let notes = [found.passed_checks, found.warnings, found.notes].concat();
        (errors, notes.into_iter().map(clean).collect())
    }
}

fn dir() -> Dir {
    let dir = Dir(tempfile::tempdir().unwrap());
    dir.cert("ca", "ca", 2020, 2040);
    dir.cert("ok", "localhost", 2020, 2040);
    dir.cert("node", "system:node:n1", 2020, 2040);
    // The bundle contains the client certificate itself, so it is valid.
    let read = |name: &str| fs::read_to_string(dir.0.path().join(name)).unwrap();
    let bundle = read("ca.crt") + &read("node.crt");
    dir.write("ca.crt", &bundle);
    dir
}

#[test]
fn check_files_valid_files_list_passed_checks_and_no_errors() {
    let dir = dir();
    dir.write("token", "abc\n");
    let (errors, notes) = dir.check("token_file: DIR/token", "ok", &["node", "later"]);
    assert_eq!(errors, [""; 0]);
    assert_eq!(
        notes,
        [
            "c.yaml: listeners[0].tls.cert_file: CN=localhost, valid until 2040-01-01T00:00:00Z",
            "c.yaml: listeners[0].identities[0].cert_file: CN=system:node:n1, valid until \
             2040-01-01T00:00:00Z",
            "c.yaml: listeners[0].identities[1]: later.crt does not exist yet; it is awaited",
        ]
    );
}

#[test]
fn check_files_certificate_near_expiry_is_noted() {
    let dir = dir();
    let at = |day: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(day * 86_400);
    let ca = load_ca(&dir.0.path().join("ok.crt")).unwrap().bundle.certificates[0].clone();
    let info = CertInfo { not_before: at(0), not_after: at(100), ..ca };
    assert!(
        !info.is_renewal_overdue(at(50))
            && !info.is_renewal_overdue(at(90))
            && info.is_renewal_overdue(at(91))
    );
    dir.cert("late", "late", 2020, 2027);
    let (_, notes) = dir.check("token_file: DIR/token", "ok", &["late"]);
    let late =
        "CN=late, valid until 2027-01-01T00:00:00Z: less than a tenth of its lifetime is left";
    assert!(notes.iter().any(|note| note.ends_with(late)), "{notes:?}");
}

#[test]
fn check_files_bad_file_is_reported_at_its_key() {
    let dir = dir();
    dir.cert("unnamed", "", 2020, 2040);
    dir.cert("mixed", "mixed", 2020, 2040);
    fs::copy(dir.0.path().join("ok.key"), dir.0.path().join("mixed.key")).unwrap();
    dir.write("broken.crt", "hello");
    dir.write("broken.key", "hello");
    dir.write("token", " \n");
    let (errors, _) =
        dir.check("token_file: DIR/token", "none", &["node", "mixed", "broken", "unnamed"]);
    assert_eq!(
        errors,
        [
            "c.yaml: upstreams[0].health.readyz.token_file: token: it is empty",
            "c.yaml: listeners[0].tls.cert_file: cannot read none.crt: No such file or \
             directory",
            "c.yaml: listeners[0].tls.key_file: cannot read none.key: No such file or \
             directory",
            "c.yaml: listeners[0].identities[1].key_file: mixed.key: the private key does not \
             belong to the certificate in mixed.crt",
            "c.yaml: listeners[0].identities[2].cert_file: broken.crt: contains no certificate \
             (PEM, -----BEGIN CERTIFICATE-----)",
            "c.yaml: listeners[0].identities[3].cert_file: unnamed.crt: the certificate has no \
             common name, which an apiserver takes as the user name",
        ]
    );
}

/// Other identities and tokens are served while one certificate is not valid.
#[test]
fn check_files_certificates_that_are_not_valid_now_are_warnings() {
    let dir = dir();
    dir.cert("old", "old", 2020, 2026);
    dir.cert("early", "early", 2030, 2040);
    dir.cert("ca", "ca", 2010, 2020);
    let (errors, notes) = dir.check(
        "cert_file: DIR/old.crt, key_file: DIR/old.key",
        "old",
        &["node", "old", "early"],
    );
    assert_eq!(errors, [""; 0]);
    let ca = "ca.crt: the certificate of CN=ca expired on 2020-01-01 (0 of 1 certificate in the bundle valid)";
    let old = "old.crt: the certificate of CN=old expired on 2026-01-01";
    let early = "early.crt: the certificate of CN=early is not valid before 2030-01-01T00:00:00Z; is this \
                 machine's clock right?";
    for (key, text) in [
        ("upstreams[0].tls.ca_file", ca),
        ("upstreams[0].health.readyz.cert_file", old),
        ("listeners[0].tls.cert_file", old),
        ("listeners[0].client_ca_file", ca),
        ("listeners[0].identities[1].cert_file", old),
        ("listeners[0].identities[2].cert_file", early),
    ] {
        let line = format!("c.yaml: {key}: {text}");
        assert!(notes.contains(&line), "no {line} in {notes:#?}");
    }
    // An expired member of a bundle does not hide its successor.
    dir.cert("new", "ca", 2020, 2040);
    let pem = |name: &str| fs::read_to_string(dir.0.path().join(name)).unwrap();
    dir.write("ca.crt", &format!("{}{}", pem("ca.crt"), pem("new.crt")));
    let (errors, notes) = dir.check("", "ok", &[]);
    assert_eq!(errors, [""; 0]);
    let member = "expired on 2020-01-01 (1 of 2 certificates in the bundle valid)";
    assert!(notes.iter().any(|note| note.ends_with(member)), "{notes:#?}");
    // The command succeeds. Its clock is that of this machine.
    let result = super::check(&dir.0.path().join("c.yaml"), [], &Overrides::default());
    assert!(result.ok && result.warnings.iter().any(|w| w.contains("CN=ca expired")), "{result:?}");
}

#[test]
fn check_draft_reports_files_beside_wrong_keys_and_values() {
    let dir = dir();
    dir.write(
        "c.yaml",
        "workers: many\nupstreams: [{name: u, colour: red, endpoints: ['10.0.0.1:6443'], \
         endpoints_file: /, tls: {ca_file: gone-ca.crt}, health: {readyz: {token_file: gone, \
         cert_file: 7}}}]\nlisteners: [{name: l, bind: ['127.0.0.1:0'], upstream: u, \
         tls: {cert_file: gone.crt, key_file: gone.key}, client_ca_file: gone-ca.crt, \
         identities: [{cert_file: node.crt}, {cert_file: later.crt, key_file: later.key}]}, \
         {name: m, bind: ['127.0.0.1:0'], upstream: u, tls: {cert_file: gone.crt}}]\n",
    );
    let path = dir.0.path().join("c.yaml");
    // Paths are relative to the directory of the process, where none of these files exists.
    let result = super::check(&path, [], &Overrides::default());
    let paths: Vec<_> = result.errors.iter().map(|error| error.path.as_str()).collect();
    assert_eq!(
        (result.ok, paths),
        (
            false,
            vec![
                "workers",
                "upstreams[0].health.readyz.cert_file",
                "upstreams[0].colour",
                "listeners[0].identities[0].key_file",
                "listeners[1].tls.key_file",
                "upstreams[0].tls.ca_file",
                "upstreams[0].health.readyz.token_file",
                "listeners[0].tls.cert_file",
                "listeners[0].tls.key_file",
                "listeners[0].client_ca_file",
                "listeners[1].tls.cert_file",
                "upstreams[0].endpoints_file",
            ]
        ),
        "{result:?}"
    );
}

#[test]
fn check_files_expired_certificate_with_issuer_is_only_noted() {
    let dir = dir();
    dir.cert("old", "localhost", 2020, 2026);
    let pem = |name: &str| fs::read_to_string(dir.0.path().join(name)).unwrap();
    dir.write("old.pem", &format!("{}{}", pem("old.crt"), pem("old.key")));
    let check = |issuer: &str| {
        let text = format!(
            "upstreams: [{{name: u, endpoints: ['10.0.0.1:6443'], tls: {{ca_file: DIR/ca.crt}}}}]\n\
             listeners: [{{name: l, bind: ['127.0.0.1:0'], upstream: u, tls: {{cert_file: \
             DIR/old.pem, key_file: DIR/old.pem, issuer: {{{issuer}}}}}}}]\n"
        );
        dir.write("c.yaml", &text.replace("DIR", &dir.0.path().display().to_string()));
        let file = dir.0.path().join("c.yaml");
        let config = load(&file, [], &Overrides::default()).unwrap().config;
        check_files(&file, &config, now())
    };
    let found = check("");
    let expired = found.warnings.iter().filter(|warning| warning.contains("expired")).count();
    assert!(found.errors.is_empty() && expired == 1, "{found:?}");
    let (_, made) = LocalCa::create("local", &[], SystemTime::now()).unwrap();
    dir.write("local.crt", &made.certificate);
    dir.write("local.key", &made.key);
    let found = check("cert_file: DIR/local.crt, key_file: DIR/local.key");
    assert_eq!(found.errors, []);
    let note = "expired on 2026-01-01; it is renewed at the start";
    assert!(found.notes.iter().any(|n| n.contains(note)), "{:?}", found.notes);
    assert!(found.notes.iter().any(|n| n.contains("can read the key of this CA")));
    // The certificate of a node is not a CA and cannot sign a new one.
    let found = check("cert_file: DIR/node.crt, key_file: DIR/node.key");
    assert!(found.errors[0].to_string().contains("is not the certificate of a CA"));
}

#[test]
fn check_files_warns_of_a_passthrough_name_in_the_serving_certificate() {
    let dir = dir();
    let mut params =
        CertificateParams::new(["localhost".to_owned(), "*.svc.example".to_owned()]).unwrap();
    params.not_after = rcgen::date_time_ymd(2040, 1, 1);
    let key = KeyPair::generate().unwrap();
    dir.write("named.crt", &params.self_signed(&key).unwrap().pem());
    let path = dir.0.path().join("named.key");
    jackstay_sys::files::replace(&path, key.serialize_pem().as_bytes(), PRIVATE).unwrap();
    let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443'], tls: {ca_file: DIR/ca.crt}}]\n\
                listeners: [{name: l, bind: ['127.0.0.1:0'], upstream: u, tls: {cert_file: DIR/named.crt, \
                key_file: DIR/named.key}, passthrough_server_names: [kubernetes, LOCALHOST, a.svc.example, '*.b.c']}]\n";
    dir.write("c.yaml", &text.replace("DIR", &dir.0.path().display().to_string()));
    let file = dir.0.path().join("c.yaml");
    let config = load(&file, [], &Overrides::default()).unwrap().config;
    let found = check_files(&file, &config, now());
    assert_eq!(found.errors, []);
    let name = "listeners[0].passthrough_server_names";
    let expected =
        [format!("{name}[1]: localhost is in"), format!("{name}[2]: *.svc.example is in")];
    assert_eq!(found.warnings.len(), expected.len(), "{:?}", found.warnings);
    for (warning, part) in found.warnings.iter().zip(expected) {
        assert!(warning.contains(&part), "{warning}");
    }
}

#[test]
fn check_files_broken_endpoint_source_is_a_source_error() {
    let dir = dir();
    let check = || {
        let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443'], tls: {ca_file: DIR/ca.crt}, \
                    endpoints_file: DIR/endpoints, discovery: {kubeconfig: DIR/kubeconfig}}]\n\
                    listeners: [{name: l, bind: ['127.0.0.1:0'], upstream: u, \
                    tls: {cert_file: DIR/ok.crt, key_file: DIR/ok.key}}]\n";
        let here = dir.0.path().display().to_string();
        dir.write("c.yaml", &text.replace("DIR", &here));
        let file = dir.0.path().join("c.yaml");
        let config = load(&file, [], &Overrides::default()).unwrap().config;
        let found = check_files(&file, &config, now());
        // `run` starts with a missing or broken source.
        assert_eq!(found.errors, []);
        let clean = |text: String| text.replace(&format!("{here}/"), "");
        let errors: Vec<_> = found.sources.iter().map(|e| clean(e.to_string())).collect();
        (errors, found.notes.into_iter().map(clean).collect::<Vec<_>>())
    };
    let (errors, notes) = check();
    assert_eq!(errors, [""; 0]);
    for (key, name) in [("endpoints_file", "endpoints"), ("discovery.kubeconfig", "kubeconfig")] {
        let note = format!("c.yaml: upstreams[0].{key}: {name} does not exist yet; it is awaited");
        assert!(notes.contains(&note), "{notes:?}");
    }
    let user = |user: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: \
             {{cluster: k, user: u}}}}]\nclusters: []\nusers: [{{name: u, user: {user}}}]\n"
        );
        dir.write("kubeconfig", &text);
    };
    dir.write("endpoints", "# none\n");
    dir.write("kubeconfig", "hello");
    let (errors, _) = check();
    assert_eq!(
        errors,
        [
            "c.yaml: upstreams[0].endpoints_file: endpoints: names no endpoint",
            "c.yaml: upstreams[0].discovery.kubeconfig: kubeconfig: not a kubeconfig: it must \
             be a map of keys (clusters: …, users: …)",
        ]
    );
    dir.write("endpoints", "10.0.0.1:6443\nnonsense\n");
    user("{tokenFile: token}");
    let (errors, _) = check();
    assert_eq!(errors.len(), 2, "{errors:?}");
    let line = "c.yaml: upstreams[0].endpoints_file: endpoints: line 2: \"nonsense\" has no port";
    assert!(errors[0].starts_with(line), "{errors:?}");
    let token = "c.yaml: upstreams[0].discovery.kubeconfig: kubeconfig: token file token: ";
    assert!(errors[1].starts_with(token), "{errors:?}");
    dir.cert("old", "discovery", 2020, 2026);
    user("{client-certificate: old.crt, client-key: old.key}");
    let (errors, _) = check();
    assert!(errors[1].contains("CN=discovery expired on 2026-01-01"), "{errors:?}");
    // `check` fails because of a broken source.
    let path = dir.0.path().join("c.yaml");
    let result = super::check(&path, [], &Overrides::default());
    assert_eq!((result.ok, result.errors.len()), (false, 2), "{result:?}");
    dir.write("endpoints", "10.0.0.1:6443\n");
    dir.write("token", "abc\n");
    user("{tokenFile: token}");
    assert_eq!(check().0, [""; 0]);
}

#[test]
fn check_files_warns_of_a_readable_key_and_of_a_state_directory_that_is_a_file() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = dir();
    let here = dir.0.path().display().to_string();
    let warnings = || {
        let file = dir.0.path().join("c.yaml");
        let draft = jackstay_config::draft(&file, [], &Overrides::default());
        let found = check_draft(&file, &draft, now(), &mut LoadedFiles::default());
        assert_eq!(found.errors, []);
        let clean = |text: String| text.replace(&format!("{here}/"), "");
        found.warnings.into_iter().map(clean).collect::<Vec<_>>()
    };
    let mode = |name: &str, mode| {
        fs::set_permissions(dir.0.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    dir.check("", "ok", &["node"]);
    let text = fs::read_to_string(dir.0.path().join("c.yaml")).unwrap();
    let with_state = |path: &str| {
        dir.write("c.yaml", &format!("state_dir: {path}\n{text}").replace("DIR", &here));
    };
    with_state("DIR/state");
    mode("ok.key", 0o640);
    mode("node.key", 0o644);
    // Other users cannot reach a file below a private directory. Temporary directories are private.
    mode("", 0o700);
    assert_eq!(warnings(), [""; 0]);
    mode("", 0o755);
    let key = "c.yaml: line 3: listeners[0].identities[0].key_file: node.key: every user of this node \
               can read this private key: chmod o-rwx";
    assert_eq!(warnings(), [key]);
    mode("node.key", 0o600);
    for path in ["DIR/ok.crt", "DIR/ok.crt/state"] {
        with_state(path);
        let expected = "c.yaml: line 1: state_dir: ok.crt is not a directory: endpoints are not saved, \
                        and no new process can take over";
        assert_eq!(warnings(), [expected], "{path}");
    }
    let result = super::check(&dir.0.path().join("c.yaml"), [], &Overrides::default());
    assert!(result.ok && super::text(&result).contains("c.yaml: ok, 1 warning ("), "{result:?}");
}

#[test]
fn check_command_result_has_counts_or_errors() {
    let dir = dir();
    dir.check("", "ok", &[]);
    let run = |name: &str| super::check(&dir.0.path().join(name), [], &Overrides::default());
    let result = run("c.yaml");
    assert!(result.ok, "{result:?}");
    let out = text(&result);
    assert!(out.ends_with("c.yaml: ok (1 listener, 1 upstream, 1 endpoint)\n"), "{out}");
    let result = run("none.yaml");
    assert_eq!((result.ok, text(&result).as_str()), (false, ""));
    let line = result.errors[0].to_string();
    assert!(line.ends_with("cannot read the configuration: No such file or directory"), "{line}");
    fs::remove_file(dir.0.path().join("ok.key")).unwrap();
    let result = run("c.yaml");
    assert_eq!((result.ok, result.errors.len()), (false, 1), "{result:?}");
}

#[test]
fn check_files_warns_of_a_copied_identity_unless_a_renewed_one_has_the_subject() {
    let dir = dir();
    dir.cert("client", "system:node:n1", 2020, 2040);
    let (errors, notes) = dir.check("", "ok", &["client"]);
    let warning = "listeners[0].identities[0].cert_file: client.crt (valid until 2040-01-01T00:00:00Z) is a copy";
    assert!(errors.is_empty() && notes.iter().any(|note| note.contains(warning)), "{notes:#?}");
    dir.cert("rotated", "system:node:n1", 2021, 2041);
    let (errors, notes) = dir.check("", "ok", &["client", "rotated"]);
    let superseded =
        "client.crt is not used: listeners[0].identities[1] has the same subject and expires later";
    assert!(errors.is_empty() && notes.iter().any(|note| note.contains(superseded)), "{notes:#?}");
    assert!(!notes.iter().any(|note| note.contains("is a copy")), "{notes:#?}");
    // One that has expired is not chosen over a valid one.
    dir.cert("client", "system:node:n1", 2020, 2021);
    let (_, notes) = dir.check("", "ok", &["client", "rotated"]);
    assert!(!notes.iter().any(|note| note.contains("expired")), "{notes:#?}");
}

#[test]
fn check_files_reads_an_identity_from_a_kubeconfig() {
    let dir = dir();
    let pki = Pki::new("kubernetes").unwrap();
    let admin = pki.client(&jackstay_apiserver::pki::Subject::admin()).unwrap();
    dir.write("ca.crt", &pki.ca_pem());
    let text = kubeconfig("https://10.0.0.1:6443", &pki.ca_pem(), Some(&admin), None);
    let path = dir.0.path().join("admin.conf");
    let write = |text: &str| jackstay_sys::files::replace(&path, text.as_bytes(), PRIVATE).unwrap();
    let check = |identity: &str| {
        let at = dir.0.path().display();
        let yaml = format!(
            "upstreams: [{{name: u, endpoints: ['10.0.0.1:6443'], tls: {{ca_file: {at}/ca.crt}}}}]\n\
             listeners: [{{name: l, bind: ['127.0.0.1:0'], upstream: u, client_ca_file: {at}/ca.crt, \
             tls: {{cert_file: {at}/ok.crt, key_file: {at}/ok.key}}, identities: [{identity}]}}]\n"
        );
        dir.write("c.yaml", &yaml);
        let file = dir.0.path().join("c.yaml");
        let loaded = load(&file, [], &Overrides::default());
        let config = loaded.map_err(|errors| errors.to_string())?.config;
        let found = check_files(&file, &config, SystemTime::now());
        let errors: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
        Ok::<_, String>((errors.join("\n"), [found.passed_checks, found.notes].concat().join("\n")))
    };
    let of_user = |user: &str| format!("{{kubeconfig: {}{user}}}", path.display());
    for user in ["", ", user: demo"] {
        let (errors, notes) = {
            write(&text);
            check(&of_user(user)).unwrap()
        };
        assert!(errors.is_empty() && notes.contains("CN=kubernetes-admin"), "{errors}{notes}");
    }
    let (errors, _) = check(&of_user(", user: other")).unwrap();
    assert!(
        errors.contains("identities[0].kubeconfig: ") && errors.contains("has no user \"other\""),
        "{errors}"
    );
    write(&kubeconfig("https://10.0.0.1:6443", &pki.ca_pem(), None, Some("s3cret")));
    let (errors, _) = check(&of_user("")).unwrap();
    assert!(
        errors.contains("user \"demo\" has no client certificate") && !errors.contains("s3cret"),
        "{errors}"
    );
    std::fs::remove_file(&path).unwrap();
    let (errors, notes) = check(&of_user("")).unwrap();
    assert!(
        errors.is_empty() && notes.contains("admin.conf does not exist yet; it is awaited"),
        "{errors}{notes}"
    );
    for (identity, expected) in [
        ("{user: demo}", "identities[0].user: needs kubeconfig"),
        (
            "{kubeconfig: /k, cert_file: /c}",
            "identities[0].cert_file: is not possible beside kubeconfig",
        ),
        ("{kubeconfig: ''}", "identities[0].kubeconfig: "),
        (
            "{kubeconfig: /k}, {kubeconfig: /k}",
            "the same certificate as listeners[0].identities[0]",
        ),
    ] {
        let error = check(identity).unwrap_err();
        assert!(error.contains(expected), "{identity}: {error}");
    }
}

#[test]
fn check_files_warns_of_a_serving_certificate_that_is_one_of_a_client() {
    let dir = dir();
    let warning = "is a client certificate of";
    // Signed by the CA of the cluster without usages, as an earlier recipe did, and for servers alone.
    let bundle = |name: &str| fs::read_to_string(dir.0.path().join(name)).unwrap();
    dir.write("ca.crt", &(bundle("ca.crt") + &bundle("ok.crt")));
    let (errors, notes) = dir.check("", "ok", &["node"]);
    let found = notes.iter().find(|note| note.contains(warning));
    assert!(
        errors.is_empty() && found.is_some_and(|note| note.contains("as \"localhost\"")),
        "{notes:#?}"
    );
    let pki = Pki::new("kubernetes").unwrap();
    let server = pki.server().unwrap();
    dir.write("ca.crt", &(pki.ca_pem() + &bundle("node.crt")));
    dir.write("ok.crt", &server.cert_pem);
    dir.write("ok.key", &server.key_pem);
    let (errors, notes) = dir.check("", "ok", &["node"]);
    assert!(errors.is_empty() && !notes.iter().any(|note| note.contains(warning)), "{notes:#?}");
}

#[test]
fn check_balancer_of_flows_is_a_note() {
    let dir = Dir(tempfile::tempdir().unwrap());
    let file = dir.0.path().join("c.yaml");
    let notes = |kind: &str| {
        dir.write(
            "c.yaml",
            &format!(
                "upstreams: [{{name: u, endpoints: ['10.0.0.1:6443'], kind: {kind}}}]\n\
                 listeners: [{{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}}]\n"
            ),
        );
        let config = load(&file, [], &Overrides::default()).unwrap().config;
        let report = check_files(&file, &config, now());
        assert_eq!((&report.errors[..], &report.warnings[..]), (&[][..], &[][..]));
        report
            .notes
            .into_iter()
            .filter(|note| note.contains("upstreams[0].kind"))
            .collect::<Vec<_>>()
    };
    let [note] = &notes("balancer")[..] else { panic!() };
    assert!(note.contains("balancer has no effect"), "{note}");
    assert_eq!(notes("auto"), [""; 0]);
}
