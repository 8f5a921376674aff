//! The restrictions that the process places on itself at the start, and what the configuration needs of them.
//!
//! They cannot be widened later. A reload that names a file outside of them is refused, and the old configuration
//! stays until a restart.

use std::fs;
use std::path::{Path, PathBuf};

use jackstay_config::{Admin, CertPaths, Config, IdentitySource, Sandbox, Seccomp, Switch};
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_kubeconfig::discovery as kubeconfig;
use jackstay_net::dns::ResolverFiles;
use jackstay_sys::process::sandbox;
use jackstay_sys::process::sandbox::file_rules::{FileAccess, FileRules};
use jackstay_sys::process::sandbox::landlock::Domain;
use jackstay_sys::process::sandbox::seccomp::Violation;
use jackstay_sys::process::sandbox::{landlock, seccomp};
use serde::Serialize;

use crate::upstream::credentials::files_of_identity;

/// Files of the system that are read while the process runs, besides those of the configuration: metrics of the
/// process, its limits, the name of the host, random numbers, and the program for backtraces. A static program has no
/// `getrandom` that its libraries could look up, so they read `/dev/urandom`, after they have waited for `/dev/random`.
const SYSTEM_FILES: [&str; 7] = [
    "/proc/self",
    "/proc/sys/kernel/hostname",
    "/proc/self/exe",
    "/sys/fs/cgroup",
    "/dev/random",
    "/dev/urandom",
    "/dev/sysgenid",
];

/// The restrictions in use.
#[derive(Debug)]
pub struct ProcessSandbox {
    config: Sandbox,
    /// The accessible files, if access is restricted.
    rules: Option<FileRules>,
    status: SandboxStatus,
    _domain: Option<Domain>,
}

/// The state of each restriction: `on`, `off`, `log`, `kill`, or `unavailable: ` and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxStatus {
    not_dumpable: String,
    no_new_privs: String,
    seccomp: String,
    landlock: String,
    /// The files and directories that can be read, unless all can.
    readable: Vec<PathBuf>,
    /// The directories that can be read and written, unless all can.
    writable: Vec<PathBuf>,
}

impl ProcessSandbox {
    /// Places the configured restrictions on this process, which must not have started a thread yet. `file` is the
    /// configuration file. A restriction that the kernel does not support is left out, and [`Self::warn_if_incomplete`]
    /// says so.
    pub fn enter(config: &Config, file: Option<&Path>) -> Self {
        let wanted = config.sandbox;
        let state = |switch: Switch, restrict: &dyn Fn() -> std::io::Result<()>| match switch {
            Switch::Off => "off".to_owned(),
            Switch::On => match restrict() {
                Ok(()) => "on".to_owned(),
                Err(error) => format!("unavailable: {error}"),
            },
        };
        let not_dumpable = state(wanted.not_dumpable, &sandbox::forbid_dumps);
        let no_new_privs = state(wanted.no_new_privs, &sandbox::forbid_new_privileges);
        let (mut rules, mut domain) = (None, None);
        let landlock = match wanted.landlock {
            Switch::Off => "off".to_owned(),
            Switch::On => {
                let wanted = all_rules(config, file);
                match landlock::restrict(wanted.list()) {
                    Ok(entered) => {
                        let (complete, socket_paths) =
                            (entered.is_complete, entered.restricts_socket_paths);
                        wanted.set_granted();
                        (rules, domain) = (Some(wanted), Some(entered));
                        match (complete, socket_paths) {
                            (true, true) => "on",
                            (true, false) => "on (not for paths of sockets: Linux before 7.1)",
                            (false, _) => "on (partly: old kernel)",
                        }
                        .to_owned()
                    }
                    Err(reason) => format!("unavailable: {reason}"),
                }
            }
        };
        let (name, violation) = match wanted.seccomp {
            Seccomp::On => ("on", Some(Violation::Fails)),
            Seccomp::Log => ("log", Some(Violation::Logged)),
            Seccomp::Kill => ("kill", Some(Violation::Kills)),
            Seccomp::Off => ("off", None),
        };
        let seccomp = match violation.map(seccomp::install) {
            Some(Err(reason)) => format!("unavailable: {reason}"),
            Some(Ok(())) | None => name.to_owned(),
        };
        let paths = |access| {
            let rules = rules.iter().flat_map(FileRules::list).filter(|rule| rule.access == access);
            rules.map(|rule| rule.path.clone()).collect()
        };
        let status = SandboxStatus {
            not_dumpable,
            no_new_privs,
            seccomp,
            landlock,
            readable: paths(FileAccess::Read),
            writable: paths(FileAccess::Write),
        };
        Self { config: wanted, rules, status, _domain: domain }
    }

    /// The state of each restriction.
    pub fn status(&self) -> &SandboxStatus {
        &self.status
    }

    /// Warns if the kernel does not support a restriction. [`Self::summary`] has the state of each.
    pub fn warn_if_incomplete(&self) {
        let SandboxStatus { not_dumpable, no_new_privs, seccomp, landlock, .. } = &self.status;
        let all = [not_dumpable, no_new_privs, seccomp, landlock];
        if all.iter().any(|state| state.starts_with("unavailable")) {
            tracing::warn!(not_dumpable, no_new_privs, seccomp, landlock, "sandbox incomplete");
        }
    }

    /// An error for each file of a new configuration that this process cannot access.
    ///
    /// # Errors
    /// One line for each file.
    pub fn check(&self, config: &Config) -> Result<(), Vec<String>> {
        let Some(granted) = &self.rules else { return Ok(()) };
        let errors: Vec<_> = named_files(config)
            .into_iter()
            .filter_map(|file| {
                let reason = granted.describe_outside(&file.path, &file.rules())?;
                Some(format!("{}: {reason}", file.key))
            })
            .collect();
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// The restrictions in one line.
    pub fn summary(&self) -> String {
        let SandboxStatus { not_dumpable, no_new_privs, seccomp, landlock, .. } = &self.status;
        format!(
            "not_dumpable {not_dumpable}, no_new_privs {no_new_privs}, seccomp {seccomp}, landlock {landlock}"
        )
    }

    /// The restrictions of the configuration that this process was started with.
    pub fn config(&self) -> Sandbox {
        self.config
    }
}

/// How a file of the configuration is used.
#[derive(Debug, Clone, Copy)]
enum FileUse {
    /// Read, and read again when it is replaced.
    Read,
    /// Replaced, in its directory.
    Replace,
    /// A directory in which files are created and replaced.
    Directory,
}

/// A file that the configuration names.
#[derive(Debug)]
struct NamedFile {
    /// The path of the configuration key.
    key: String,
    path: PathBuf,
    usage: FileUse,
}

impl NamedFile {
    fn rules(&self) -> FileRules {
        let mut rules = FileRules::default();
        match self.usage {
            FileUse::Read => rules.add_replaceable(&self.path),
            FileUse::Replace => rules.add_replaced(&self.path),
            FileUse::Directory => rules.add_directory(&self.path),
        }
        rules
    }
}

/// The files of the configuration and of the system. Creates missing directories for written files, since there is
/// no rule for a directory that does not exist.
fn all_rules(config: &Config, file: Option<&Path>) -> FileRules {
    let mut rules = FileRules::default();
    for path in SYSTEM_FILES {
        rules.add_path(Path::new(path), FileAccess::Read);
    }
    if let Some(file) = file {
        rules.add_replaceable(file);
    }
    for named in named_files(config) {
        let directory = match named.usage {
            FileUse::Read => None,
            FileUse::Replace => named.path.parent(),
            FileUse::Directory => Some(named.path.as_path()),
        };
        // An error is reported when the file is written.
        let _ = directory.map(fs::create_dir_all);
        rules.extend(named.rules());
    }
    rules
}

/// The files of the admin endpoint.
fn add_admin_files(admin: &Admin, add: &mut impl FnMut(String, &Path, FileUse)) {
    for (key, path, usage) in [
        ("socket", &admin.socket, FileUse::Replace),
        ("metrics_cert_file", &admin.metrics_cert_file, FileUse::Read),
        ("metrics_key_file", &admin.metrics_key_file, FileUse::Read),
        ("metrics_client_ca_file", &admin.metrics_client_ca_file, FileUse::Read),
    ] {
        if let Some(path) = path {
            add(format!("admin.{key}"), path, usage);
        }
    }
}

/// The files that `config` names, also by its kubeconfigs, and those of the resolver if it has DNS names.
fn named_files(config: &Config) -> Vec<NamedFile> {
    let mut files = Vec::new();
    let mut add = |key: String, path: &Path, usage| {
        files.push(NamedFile { key, path: path.to_owned(), usage });
    };
    if let Some(path) = &config.state_dir {
        add("state_dir".into(), path, FileUse::Directory);
    }
    add_admin_files(&config.admin, &mut add);
    for (i, upstream) in config.upstreams.iter().enumerate() {
        let at = format!("upstreams[{i}]");
        if upstream.endpoints.iter().any(EndpointAddress::is_name) {
            let ResolverFiles { hosts, resolv_conf, .. } = ResolverFiles::default();
            for path in [hosts, resolv_conf] {
                add(format!("{at}.endpoints"), &path, FileUse::Read);
            }
        }
        let readyz = &upstream.health.readyz;
        for (key, path) in [
            ("endpoints_file", upstream.endpoints_file.as_ref()),
            ("tls.ca_file", upstream.tls.ca_file.as_ref()),
            ("health.readyz.cert_file", readyz.cert.as_ref().map(|pair| &pair.cert_file)),
            ("health.readyz.key_file", readyz.cert.as_ref().map(|pair| &pair.key_file)),
            ("health.readyz.token_file", readyz.token_file.as_ref()),
        ] {
            if let Some(path) = path {
                add(format!("{at}.{key}"), path, FileUse::Read);
            }
        }
        if let Some(path) = &upstream.discovery.kubeconfig {
            let key = format!("{at}.discovery.kubeconfig");
            add(key.clone(), path, FileUse::Read);
            // A broken kubeconfig is reported by discovery, which reads it again when it changes.
            for file in kubeconfig::load(path).map(|user| user.files).unwrap_or_default() {
                add(key.clone(), &file, FileUse::Read);
            }
        }
    }
    for (i, listener) in config.listeners.iter().enumerate() {
        let Some(terminate) = listener.terminate() else { continue };
        let at = format!("listeners[{i}]");
        let serving = &terminate.tls.paths;
        add(format!("{at}.tls.cert_file"), &serving.cert_file, FileUse::Read);
        add(format!("{at}.tls.key_file"), &serving.key_file, FileUse::Read);
        if let Some(issuer) = &terminate.tls.issuer {
            add(format!("{at}.tls.cert_file"), &serving.cert_file, FileUse::Replace);
            add(format!("{at}.tls.issuer.cert_file"), &issuer.cert_file, FileUse::Read);
            add(format!("{at}.tls.issuer.key_file"), &issuer.key_file, FileUse::Read);
        }
        if let Some(path) = &terminate.client_ca_file {
            add(format!("{at}.client_ca_file"), path, FileUse::Read);
        }
        for (n, source) in terminate.identities.iter().enumerate() {
            for (key, path) in identity_files(source) {
                add(format!("{at}.identities[{n}].{key}"), &path, FileUse::Read);
            }
        }
    }
    files
}

/// The files of an identity with their keys, also those that its kubeconfig names.
fn identity_files(source: &IdentitySource) -> Vec<(&'static str, PathBuf)> {
    match source {
        IdentitySource::Files(CertPaths { cert_file, key_file }) => {
            vec![("cert_file", cert_file.clone()), ("key_file", key_file.clone())]
        }
        IdentitySource::Kubeconfig(user) => {
            let named = files_of_identity(source).into_iter();
            [user.kubeconfig.clone()]
                .into_iter()
                .chain(named)
                .map(|file| ("kubeconfig", file))
                .collect()
        }
    }
}
