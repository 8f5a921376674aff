//! `jackstay check`: everything that can be said about a configuration without running it.
//!
//! Beyond the rules of `config` it loads every file the configuration names. `run` asks the same
//! questions before it binds anything, so what passes here starts there. The files that `run` follows
//! while it runs, and starts without, are no reason for it to stop: there they are warnings.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::time::SystemTime;

use crate::config::{
    self, CertPaths, Config, ConfigError, ConfigErrors, Draft, Overrides, Terminate,
};
use crate::control::discovery::{file as endpoints_file, kubeconfig};
use crate::net::files::bearer_token;
use crate::net::tls::certificate::{CertInfo, Subject, Validity};
use crate::net::tls::file_error::{TlsFileError, TlsFileProblem};
use crate::net::tls::local_ca::LocalCa;
use crate::net::tls::pem_files::{load_ca, load_cert};
use crate::observe::counted;
use crate::observe::utc::Utc;

/// What an upstream without a CA bundle means.
const UNVERIFIED: &str = "not given: health is probed without verifying the servers and without \
                          a credential; clients verify for themselves";

/// What the files of a configuration are like.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// What must be mended before it can run, each with its key path.
    pub errors: Vec<ConfigError>,
    /// What is wrong in the sources of endpoints: it runs without them, and takes them up when they
    /// are mended.
    pub sources: Vec<ConfigError>,
    /// What an operator should know: awaited files, clocks, expiry.
    pub notes: Vec<String>,
    /// What is as it should be: whose certificates there are, and until when.
    pub facts: Vec<String>,
}

/// Everything that is wrong with a configuration, whatever else is: its form and its values first,
/// then the files that it names.
pub fn check_draft(file: &Path, draft: &Draft, now: SystemTime) -> Findings {
    let mut found = match &draft.config {
        Some(config) => check_files(file, config, now),
        None => Findings::default(),
    };
    found.errors.splice(..0, draft.errors.iter().cloned());
    found
}

/// Loads every certificate, CA bundle and token that `config`, read from `file`, names. An empty
/// path is a stand-in for one that could not be read.
///
/// An identity whose files do not exist yet is a note: kubelet writes them once it has joined.
pub fn check_files(file: &Path, config: &Config, now: SystemTime) -> Findings {
    let mut check = Check { file: file.display().to_string(), now, found: Findings::default() };
    for (i, upstream) in config.upstreams.iter().enumerate() {
        let at = format!("upstreams[{i}]");
        match &upstream.tls.ca_file {
            Some(path) => check.ca(&format!("{at}.tls.ca_file"), path),
            None => check.note(&format!("{at}.tls.ca_file"), UNVERIFIED),
        }
        if let Some(path) = &upstream.endpoints_file {
            check.endpoints(&format!("{at}.endpoints_file"), path);
        }
        if let Some(path) = &upstream.discovery.kubeconfig {
            check.discovery(&format!("{at}.discovery.kubeconfig"), path);
        }
        let readyz = &upstream.health.readyz;
        if let Some(paths) = &readyz.cert {
            check.client_cert(&format!("{at}.health.readyz"), paths);
        }
        if let Some(path) = &readyz.token_file {
            check.token(&format!("{at}.health.readyz.token_file"), path);
        }
    }
    for (i, listener) in config.listeners.iter().enumerate() {
        let at = format!("listeners[{i}]");
        let Some(terminate) = listener.terminate() else { continue };
        check.serving(&format!("{at}.tls"), terminate);
        if let Some(path) = &terminate.client_ca_file {
            check.ca(&format!("{at}.client_ca_file"), path);
        }
        check.identities(&format!("{at}.identities"), &terminate.identities);
    }
    check.found
}

/// The command: reads the configuration, prints errors to `err` and the rest to `out`, and returns
/// the exit code: 0, or 2 for a configuration that cannot run.
pub fn run(
    file: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
    out: &mut impl Write,
    err: &mut impl Write,
) -> io::Result<u8> {
    let draft = config::draft(file, env, overrides);
    let found = check_draft(file, &draft, SystemTime::now());
    for warning in &draft.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    for note in found.facts.iter().chain(&found.notes) {
        writeln!(out, "note: {note}")?;
    }
    let errors = [found.errors, found.sources].concat();
    let config = match draft.config {
        Some(config) if errors.is_empty() => config,
        _ => {
            writeln!(err, "{}", ConfigErrors(errors))?;
            return Ok(2);
        }
    };
    let listeners = counted(config.listeners.len(), "listener");
    let upstreams = counted(config.upstreams.len(), "upstream");
    let endpoints: usize = config.upstreams.iter().map(|u| u.endpoints.len()).sum();
    let endpoints = counted(endpoints, "endpoint");
    writeln!(out, "{}: ok ({listeners}, {upstreams}, {endpoints})", file.display())?;
    Ok(0)
}

struct Check {
    file: String,
    now: SystemTime,
    found: Findings,
}

impl Check {
    fn error(&mut self, path: &str, message: impl Display) {
        let error = self.at(path, message);
        self.found.errors.push(error);
    }

    fn source_error(&mut self, path: &str, message: impl Display) {
        let error = self.at(path, message);
        self.found.sources.push(error);
    }

    fn at(&self, path: &str, message: impl Display) -> ConfigError {
        let (file, path) = (self.file.clone(), path.to_owned());
        ConfigError { file, path, message: message.to_string() }
    }

    fn note(&mut self, path: &str, message: impl Display) {
        self.found.notes.push(format!("{}: {path}: {message}", self.file));
    }

    fn fact(&mut self, path: &str, message: impl Display) {
        self.found.facts.push(format!("{}: {path}: {message}", self.file));
    }

    /// An error of a certificate at the key that names the file it is in.
    fn cert_error(&mut self, at: &str, paths: &CertPaths, error: &TlsFileError) {
        // In one file for both, only the key can be its second problem.
        let of_key = error.problem == TlsFileProblem::Mismatch
            || (error.path == paths.key_file && paths.key_file != paths.cert_file);
        let key = if of_key { "key_file" } else { "cert_file" };
        self.error(&format!("{at}.{key}"), error);
    }

    /// A certificate with its key that must be there.
    /// A serving certificate that has expired is no error where it will be renewed at the start.
    fn serving(&mut self, at: &str, terminate: &Terminate) {
        let Some(issuer) = &terminate.issuer else {
            self.cert(at, &terminate.tls);
            return;
        };
        match LocalCa::load(issuer) {
            Err(error) => self.error(&format!("{at}.issuer"), error),
            Ok(ca) => {
                self.time(&format!("{at}.issuer.cert_file"), &issuer.cert_file, ca.info());
            }
        }
        let before = self.found.errors.len();
        self.cert(at, &terminate.tls);
        let renewable = load_cert(&terminate.tls).is_ok();
        if renewable && self.found.errors.len() > before {
            for error in self.found.errors.split_off(before) {
                self.note(&error.path, format!("{}; it is renewed at the start", error.message));
            }
        }
    }

    /// Reports the files of a certificate that do not exist, but for `known`.
    fn missing(&mut self, at: &str, paths: &CertPaths, known: Option<&Path>) {
        for (key, file) in [("cert_file", &paths.cert_file), ("key_file", &paths.key_file)] {
            let is_new = !file.as_os_str().is_empty() && known != Some(file.as_path());
            if let Some(Err(error)) = is_new.then(|| std::fs::metadata(file)) {
                let reason = error.to_string();
                let reason = reason.split(" (os error").next().unwrap_or_default();
                let message = format!("cannot read {}: {reason}", file.display());
                self.error(&format!("{at}.{key}"), message);
            }
        }
    }

    fn cert(&mut self, at: &str, paths: &CertPaths) -> Option<CertInfo> {
        if [&paths.cert_file, &paths.key_file].iter().any(|file| file.as_os_str().is_empty()) {
            self.missing(at, paths, None);
            return None;
        }
        match load_cert(paths) {
            Ok(loaded) => {
                self.time(&format!("{at}.cert_file"), &paths.cert_file, &loaded.info);
                Some(loaded.info)
            }
            Err(error) => {
                self.cert_error(at, paths, &error);
                self.missing(at, paths, Some(&error.path));
                None
            }
        }
    }

    /// A certificate that is shown to an apiserver, which takes the user's name from it.
    fn client_cert(&mut self, at: &str, paths: &CertPaths) -> Option<Subject> {
        let info = self.cert(at, paths)?;
        if info.subject.common_name().is_none() {
            let message = "the certificate has no common name: to an apiserver it is nobody";
            let file = paths.cert_file.display();
            self.error(&format!("{at}.cert_file"), format!("{file}: {message}"));
        }
        Some(info.subject)
    }

    fn identities(&mut self, at: &str, identities: &[CertPaths]) {
        let mut subjects: Vec<(usize, Subject)> = Vec::new();
        for (i, paths) in identities.iter().enumerate() {
            let at_item = format!("{at}[{i}]");
            // An identity may be awaited: only a whole one is looked at.
            if [&paths.cert_file, &paths.key_file].iter().any(|file| file.as_os_str().is_empty()) {
                continue;
            }
            if let Err(error) = load_cert(paths)
                && error.is_missing()
            {
                let file = error.path.display();
                self.note(&at_item, format!("{file} does not exist yet; it is awaited"));
                continue;
            }
            let Some(subject) = self.client_cert(&at_item, paths) else { continue };
            match subjects.iter().find(|(_, known)| *known == subject) {
                Some((first, _)) => {
                    let message = format!("the same subject as {at}[{first}]: {subject}");
                    self.error(&format!("{at_item}.cert_file"), message);
                }
                None => subjects.push((i, subject)),
            }
        }
    }

    fn ca(&mut self, at: &str, path: &Path) {
        let certificates = match load_ca(path) {
            Ok(loaded) => loaded.certificates,
            Err(error) => return self.error(at, error),
        };
        let expired = |info: &&CertInfo| info.validity(self.now) == Validity::Expired;
        let old: Vec<CertInfo> = certificates.iter().filter(expired).cloned().collect();
        let all = old.len() == certificates.len();
        for info in old {
            if let Err(error) = info.check_time(path, self.now) {
                // A bundle keeps an old CA beside its successor for a while.
                if all { self.error(at, error) } else { self.note(at, error) }
            }
        }
    }

    /// A note about a file that is written later; whether it is one.
    fn is_awaited(&mut self, at: &str, path: &Path) -> bool {
        let missing = matches!(path.try_exists(), Ok(false));
        if missing {
            self.note(at, format!("{} does not exist yet; it is awaited", path.display()));
        }
        missing
    }

    /// A file of addresses.
    fn endpoints(&mut self, at: &str, path: &Path) {
        if self.is_awaited(at, path) {
            return;
        }
        let file = path.display();
        let said = match endpoints_file::read(path) {
            Ok(text) => endpoints_file::parse(&text),
            Err(why) => return self.source_error(at, why),
        };
        for why in &said.refused {
            self.source_error(at, format!("{file}: {why}"));
        }
        if said.entries.is_empty() && said.refused_count == 0 {
            self.source_error(at, format!("{file}: names no endpoint"));
        }
    }

    /// The kubeconfig whose user looks for endpoints.
    fn discovery(&mut self, at: &str, path: &Path) {
        if self.is_awaited(at, path) {
            return;
        }
        let user = match kubeconfig::load(path) {
            Ok(user) => user,
            Err(why) => return self.source_error(at, why),
        };
        if let Err(why) = user.token.header() {
            self.source_error(at, format!("{}: {why}", path.display()));
        }
        let Some(certificate) = user.certificate else { return };
        match certificate.info.check_time(path, self.now) {
            Err(error) if error.problem == TlsFileProblem::Expired => self.source_error(at, error),
            Err(error) => self.note(at, error),
            Ok(()) => {}
        }
    }

    fn time(&mut self, at: &str, path: &Path, info: &CertInfo) {
        match info.check_time(path, self.now) {
            Err(error) if error.problem == TlsFileProblem::Expired => self.error(at, error),
            Err(error) => self.note(at, error),
            Ok(()) => {
                let until = Utc(info.not_after).seconds();
                let is = format!("{}, valid until {until}", info.subject);
                if is_late(info, self.now) {
                    self.note(at, format!("{is}: less than a tenth of its life is left"));
                } else {
                    self.fact(at, is);
                }
            }
        }
    }

    fn token(&mut self, at: &str, path: &Path) {
        match bearer_token::authorization_from_file(path) {
            Err(why) => self.error(at, why),
            // "Bearer a b" is the token "a" to an apiserver.
            Ok(value) if value.as_bytes().splitn(3, |byte| *byte == b' ').nth(2).is_some() => {
                let what = "there is a blank in the token: an apiserver reads what is before it";
                self.note(at, format!("{}: {what}", path.display()));
            }
            Ok(_) => {}
        }
    }
}

/// Whether a certificate that is valid should have been renewed: kubelet does so with at least a tenth
/// of its life left, kubeadm and we ourselves earlier.
fn is_late(info: &CertInfo, now: SystemTime) -> bool {
    let span = |from: SystemTime, to: SystemTime| to.duration_since(from).unwrap_or_default();
    span(now, info.not_after) < span(info.not_before, info.not_after) / 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;
    use rcgen::{CertificateParams, DnType, KeyPair};
    use std::fs;
    use std::time::Duration;

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
            self.write(&format!("{name}.key"), &key.serialize_pem());
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.path().join(name), text).unwrap();
        }

        /// Findings about a configuration in which `DIR` stands for this directory, which is
        /// taken out of the messages again.
        fn check(
            &self,
            readyz: &str,
            tls: &str,
            identities: &[&str],
        ) -> (Vec<String>, Vec<String>) {
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
            // 2026-07-01
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_782_864_000);
            let found = check_files(&file, &config, now);
            let clean = |text: String| text.replace(&format!("{dir}/"), "");
            let errors = found.errors.iter().map(|e| clean(e.to_string())).collect();
            (errors, found.facts.into_iter().chain(found.notes).map(clean).collect())
        }
    }

    fn dir() -> Dir {
        let dir = Dir(tempfile::tempdir().unwrap());
        dir.cert("ca", "ca", 2020, 2040);
        dir.cert("ok", "localhost", 2020, 2040);
        dir.cert("node", "system:node:n1", 2020, 2040);
        dir
    }

    #[test]
    fn a_good_configuration_has_no_errors() {
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
    fn a_certificate_near_its_end_is_worth_a_word() {
        let dir = dir();
        let at = |day: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(day * 86_400);
        let ca = load_ca(&dir.0.path().join("ok.crt")).unwrap().certificates.remove(0);
        let info = CertInfo { not_before: at(0), not_after: at(100), ..ca };
        assert!(!is_late(&info, at(50)) && !is_late(&info, at(90)) && is_late(&info, at(91)));
        dir.cert("late", "late", 2020, 2027);
        let (_, notes) = dir.check("token_file: DIR/token", "ok", &["late"]);
        let late =
            "CN=late, valid until 2027-01-01T00:00:00Z: less than a tenth of its life is left";
        assert!(notes.iter().any(|note| note.ends_with(late)), "{notes:?}");
    }

    #[test]
    fn every_bad_file_is_reported_at_its_key() {
        let dir = dir();
        dir.cert("old", "old", 2020, 2026);
        dir.cert("early", "early", 2030, 2040);
        dir.cert("twin", "system:node:n1", 2020, 2040);
        dir.cert("nobody", "", 2020, 2040);
        dir.cert("mixed", "mixed", 2020, 2040);
        fs::copy(dir.0.path().join("ok.key"), dir.0.path().join("mixed.key")).unwrap();
        dir.write("broken.crt", "hello");
        dir.write("broken.key", "hello");
        dir.cert("ca", "ca", 2010, 2020);
        dir.write("token", " \n");
        let (errors, notes) = dir.check(
            "token_file: DIR/token",
            "none",
            &["node", "old", "mixed", "broken", "twin", "nobody", "early"],
        );
        let expired = "the certificate of CN=ca expired on 2020-01-01";
        assert_eq!(
            errors,
            [
                format!("c.yaml: upstreams[0].tls.ca_file: ca.crt: {expired}"),
                "c.yaml: upstreams[0].health.readyz.token_file: token: it is empty".into(),
                "c.yaml: listeners[0].tls.cert_file: cannot read none.crt: No such file or \
                 directory"
                    .into(),
                "c.yaml: listeners[0].tls.key_file: cannot read none.key: No such file or \
                 directory"
                    .into(),
                format!("c.yaml: listeners[0].client_ca_file: ca.crt: {expired}"),
                "c.yaml: listeners[0].identities[1].cert_file: old.crt: the certificate of CN=old \
                 expired on 2026-01-01"
                    .into(),
                "c.yaml: listeners[0].identities[2].key_file: mixed.key: the private key does not \
                 belong to the certificate in mixed.crt"
                    .into(),
                "c.yaml: listeners[0].identities[3].cert_file: broken.crt: contains no certificate \
                 (PEM, -----BEGIN CERTIFICATE-----)"
                    .into(),
                "c.yaml: listeners[0].identities[4].cert_file: the same subject as \
                 listeners[0].identities[0]: CN=system:node:n1"
                    .into(),
                "c.yaml: listeners[0].identities[5].cert_file: nobody.crt: the certificate has no \
                 common name: to an apiserver it is nobody"
                    .into(),
            ]
        );
        let early = "early.crt: the certificate of CN=early is not valid before \
                     2030-01-01T00:00:00Z; is this machine's clock right?";
        let early = format!("c.yaml: listeners[0].identities[6].cert_file: {early}");
        assert!(notes.contains(&early), "{notes:?}");
    }

    #[test]
    fn check_reports_files_beside_wrong_keys_and_values() {
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
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let path = dir.0.path().join("c.yaml");
        // Paths are relative to the directory of the process: none of these is there.
        let code = super::run(&path, [], &Overrides::default(), &mut out, &mut err).unwrap();
        let err = String::from_utf8(err).unwrap();
        let prefix = format!("{}: ", path.display());
        let paths: Vec<_> = err
            .lines()
            .map(|line| line.strip_prefix(&prefix).unwrap().split(": ").next().unwrap())
            .collect();
        assert_eq!(
            (code, paths),
            (
                2,
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
            "{err}"
        );
    }

    #[test]
    fn a_certificate_that_will_be_renewed_may_have_expired() {
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
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_782_864_000);
            check_files(&file, &config, now)
        };
        assert_eq!(check("").errors.len(), 1);
        let made = crate::net::tls::local_ca::create_ca("local", SystemTime::now()).unwrap();
        dir.write("local.crt", &made.certificate);
        dir.write("local.key", &made.key);
        let found = check("cert_file: DIR/local.crt, key_file: DIR/local.key");
        assert_eq!(found.errors, []);
        let note = "expired on 2026-01-01; it is renewed at the start";
        assert!(found.notes.iter().any(|n| n.contains(note)), "{:?}", found.notes);
        // One that cannot sign cannot renew.
        let found = check("cert_file: DIR/node.crt, key_file: DIR/node.key");
        assert!(found.errors[0].to_string().contains("is not the certificate of a CA"));
    }

    #[test]
    fn the_sources_of_endpoints_are_read_too() {
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
            // 2026-07-01
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_782_864_000);
            let found = check_files(&file, &config, now);
            // It starts all the same: what is missing or wrong there is taken up later.
            assert_eq!(found.errors, []);
            let clean = |text: String| text.replace(&format!("{here}/"), "");
            let errors: Vec<_> = found.sources.iter().map(|e| clean(e.to_string())).collect();
            (errors, found.notes.into_iter().map(clean).collect::<Vec<_>>())
        };
        let (errors, notes) = check();
        assert_eq!(errors, [""; 0]);
        for (key, name) in [("endpoints_file", "endpoints"), ("discovery.kubeconfig", "kubeconfig")]
        {
            let note =
                format!("c.yaml: upstreams[0].{key}: {name} does not exist yet; it is awaited");
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
                "c.yaml: upstreams[0].discovery.kubeconfig: kubeconfig: not a kubeconfig: it cannot \
                 be parsed",
            ]
        );
        dir.write("endpoints", "10.0.0.1:6443\nnonsense\n");
        user("{tokenFile: token}");
        let (errors, _) = check();
        assert_eq!(errors.len(), 2, "{errors:?}");
        let line =
            "c.yaml: upstreams[0].endpoints_file: endpoints: line 2: \"nonsense\" has no port";
        assert!(errors[0].starts_with(line), "{errors:?}");
        let token = "c.yaml: upstreams[0].discovery.kubeconfig: kubeconfig: token file token: ";
        assert!(errors[1].starts_with(token), "{errors:?}");
        dir.cert("old", "discovery", 2020, 2026);
        user("{client-certificate: old.crt, client-key: old.key}");
        let (errors, _) = check();
        assert!(errors[1].contains("CN=discovery expired on 2026-01-01"), "{errors:?}");
        // The command fails.
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let path = dir.0.path().join("c.yaml");
        let code = super::run(&path, [], &Overrides::default(), &mut out, &mut err).unwrap();
        assert_eq!((code, String::from_utf8(err).unwrap().lines().count()), (2, 2));
        dir.write("endpoints", "10.0.0.1:6443\n");
        dir.write("token", "abc\n");
        user("{tokenFile: token}");
        assert_eq!(check().0, [""; 0]);
    }

    #[test]
    fn the_command_prints_and_exits() {
        let dir = dir();
        dir.check("", "ok", &[]);
        let run = |name: &str| {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let path = dir.0.path().join(name);
            let code = super::run(&path, [], &Overrides::default(), &mut out, &mut err).unwrap();
            (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
        };
        let (code, out, err) = run("c.yaml");
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(out.ends_with("c.yaml: ok (1 listener, 1 upstream, 1 endpoint)\n"), "{out}");
        let (code, out, err) = run("none.yaml");
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.ends_with("cannot read the configuration: No such file or directory\n"));
        fs::remove_file(dir.0.path().join("ok.key")).unwrap();
        let (code, _, err) = run("c.yaml");
        assert_eq!((code, err.lines().count()), (2, 1));
    }
}
