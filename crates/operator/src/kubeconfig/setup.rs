//! Plans the files of a jackstay that forwards local clients to the cluster of a kubeconfig context:
//! its configuration, and the certificates that the configuration names.
//!
//! The plan is complete before the first file is written, so an error changes no file. A second run plans
//! the same content, so it changes no file either.

mod config_file;
mod error;
mod identity;
pub mod node_name;
mod plan;
pub mod renewal;
pub mod rotated;
mod serving;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use jackstay_config::{COPIED_CERTIFICATE, COPIED_KEY, EndpointKind};
use jackstay_kubeconfig::ResolvedContext;
use jackstay_kubeconfig::to_yaml;
use jackstay_kubeconfig::{Credential, PemSource};
use jackstay_net::tls::pem_files::{ca_from_pem, cert_from_pem};
use jackstay_sys::files::PUBLIC;

use self::config_file::{
    ConfigFile, HealthSection, ListenerSection, ProbeCredential, UpstreamSection,
    UpstreamTlsSection,
};
pub use self::error::{ClientCertificateError, SetupError};
pub use self::plan::{OutputFile, SetupMode, SetupPlan, SetupRequest};

/// The file with the cluster's CA, in the directory of the configuration as the other files.
const CLUSTER_CA: &str = "cluster-ca.crt";
/// The directory in which jackstay saves endpoints.
const STATE: &str = "state";

/// The CA bundles of Linux distributions, in the order of Go (`crypto/x509/root_linux.go`). If a kubeconfig
/// names no CA, kubectl uses the first one that exists.
const SYSTEM_CAS: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The CA bundle of this system, if there is one.
pub fn system_cas() -> Option<PathBuf> {
    SYSTEM_CAS.iter().map(PathBuf::from).find(|file| file.exists())
}

/// The existing files of the plan that `config` was written by, and the state of jackstay.
pub fn files_with(config: &Path) -> Vec<PathBuf> {
    let directory = config.parent().unwrap_or(Path::new("/"));
    let serving = serving::ServingFiles::in_directory(directory);
    let beside =
        [CLUSTER_CA, COPIED_CERTIFICATE, COPIED_KEY, STATE].map(|name| directory.join(name));
    let renewal = renewal::kept_files(&serving.serving);
    let all = [config.to_owned(), serving.ca, serving.serving].into_iter();
    let all = all.chain(renewal).chain(beside);
    all.filter(|path| path.exists()).collect()
}

/// Plans the files.
///
/// # Errors
/// The context cannot be served in the requested mode.
pub fn plan(context: &ResolvedContext, request: &SetupRequest) -> Result<SetupPlan, SetupError> {
    let directory = request.config.parent().unwrap_or(Path::new("/"));
    let mut plan = SetupPlan::default();
    let bind = listening_addresses(&request.host, request.port)?;
    check_pem_data(context, request, &mut plan)?;
    let ca_file = cluster_ca(context, request, directory, &mut plan)?;

    let mut listener = ListenerSection {
        name: "apiserver",
        bind,
        upstream: "control-plane",
        mode: request.mode,
        tls: None,
        client_ca_file: None,
        identities: Vec::new(),
        passthrough_server_names: Vec::new(),
    };
    if request.mode == SetupMode::Terminate {
        listener.tls = Some(serving::plan(request, directory, &mut plan)?);
        (listener.client_ca_file, listener.identities) =
            identity::plan(context, request, directory, ca_file.as_deref(), &mut plan)?;
        if let Credential::Exec(plugin) = &context.credential {
            listener.passthrough_server_names = request.shared_name.iter().cloned().collect();
            let name = request.shared_name.as_deref();
            plan.notes.push(exec_note(&plugin.command, name, directory));
        }
    }
    let probe = probe_credential(request.mode, &context.credential, ca_file.is_some());
    if probe.is_none() && listener.identities.is_empty() && ca_file.is_some() {
        plan.notes.push(anonymous_probe_note(request.mode, &context.credential));
    }
    let serves_flows =
        request.mode == SetupMode::Passthrough || !listener.passthrough_server_names.is_empty();
    let upstream = UpstreamSection {
        name: "control-plane",
        path_prefix: context.path_prefix.to_string(),
        authority: request.authority.clone(),
        endpoints: endpoints(context, request),
        // A flow cannot see which apiserver it has reached.
        kind: (request.is_balancer && !serves_flows).then_some(EndpointKind::Balancer),
        health: probe.map(|readyz| HealthSection { readyz }),
        tls: UpstreamTlsSection { ca_file, server_name: request.server_name.clone() },
    };
    let config = ConfigFile {
        state_dir: request.state.clone().unwrap_or_else(|| directory.join(STATE)),
        upstreams: [upstream],
        listeners: [listener],
    };
    let text = format!(
        "# Written by `jackstay kubeconfig` for the context {:?}.\n{}",
        context.context,
        to_yaml(&config).map_err(SetupError::Unwritable)?
    );
    plan.files.push(OutputFile {
        path: request.config.clone(),
        bytes: text.into_bytes(),
        mode: PUBLIC,
        description: "the configuration of jackstay",
    });
    Ok(plan)
}

/// The endpoint of the kubeconfig and the others.
fn endpoints(context: &ResolvedContext, request: &SetupRequest) -> Vec<String> {
    let mut endpoints = vec![context.server.address()];
    for upstream in &request.upstreams {
        if !endpoints.contains(upstream) {
            endpoints.push(upstream.clone());
        }
    }
    endpoints
}

/// Checks the certificates and keys that the kubeconfig holds as data, so that errors name their entry and not a file
/// that is not written. Warns of certificates in its CA that are not read.
fn check_pem_data(
    context: &ResolvedContext,
    request: &SetupRequest,
    plan: &mut SetupPlan,
) -> Result<(), SetupError> {
    if let Some(ca) = context.ca.as_ref().filter(|_| request.ca_file.is_none()) {
        let entry = format!("cluster {:?}: certificate-authority-data", context.cluster);
        let loaded = ca_from_pem(&ca.origin(entry), &ca.read().map_err(SetupError::Pem)?);
        let bundle = loaded.map_err(SetupError::TlsFile)?.bundle;
        plan.warnings.extend_from_slice(&bundle.skipped);
        plan.notes.extend_from_slice(&bundle.notes);
    }
    if let Credential::Certificate(certificate, key) = &context.credential
        && request.mode == SetupMode::Terminate
        && matches!((certificate, key), (PemSource::Inline(_), _) | (_, PemSource::Inline(_)))
    {
        let entry = |key| format!("user {:?}: {key}-data", context.user);
        let origins =
            (certificate.origin(entry("client-certificate")), key.origin(entry("client-key")));
        let certificate = certificate.read().map_err(SetupError::Pem)?;
        let key = key.read().map_err(SetupError::Pem)?;
        let loaded = cert_from_pem((&origins.0, &certificate), (&origins.1, &key));
        let loaded = loaded.map_err(SetupError::TlsFile)?;
        plan.warnings.extend(loaded.skipped);
        plan.notes.extend(loaded.notes);
    }
    Ok(())
}

/// The addresses on which jackstay listens for clients that connect to `host`: an IP address or
/// `localhost`.
fn listening_addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>, SetupError> {
    match host.parse::<IpAddr>() {
        Ok(ip) => Ok(vec![SocketAddr::new(ip, port)]),
        Err(_) if host == "localhost" => {
            let both = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            Ok(both.map(|ip| SocketAddr::new(ip, port)).to_vec())
        }
        Err(_) => Err(SetupError::Host { host: host.to_owned(), port }),
    }
}

/// The file with the CA of the cluster, which is a planned file if the kubeconfig holds the CA as data.
/// `None` if clients do not verify the cluster.
fn cluster_ca(
    context: &ResolvedContext,
    request: &SetupRequest,
    directory: &Path,
    plan: &mut SetupPlan,
) -> Result<Option<PathBuf>, SetupError> {
    if let Some(file) = &request.ca_file {
        return Ok(Some(file.clone()));
    }
    if let Some(ca) = &context.ca {
        let file = directory.join(CLUSTER_CA);
        return Ok(Some(plan.file_of(ca, file, PUBLIC, "the cluster's CA")));
    }
    if context.insecure {
        if request.mode == SetupMode::Terminate {
            return Err(SetupError::Insecure(context.cluster.clone()));
        }
        plan.notes.push(
            "the cluster names no CA: health checks of jackstay do not verify the apiservers and send \
             no credential; --ca-file names a CA"
                .to_owned(),
        );
        return Ok(None);
    }
    system_cas().map(Some).ok_or_else(|| SetupError::NoCa(context.cluster.clone()))
}

/// The credential for `/readyz` probes, if the kubeconfig names files that hold it. In mode `terminate` the
/// probes use the certificate of the identity by default, so the certificate is not repeated.
fn probe_credential(
    mode: SetupMode,
    credential: &Credential,
    has_ca: bool,
) -> Option<ProbeCredential> {
    match credential {
        Credential::Certificate(PemSource::File(certificate), PemSource::File(key))
            if mode == SetupMode::Passthrough && has_ca =>
        {
            let (cert_file, key_file) = (certificate.clone(), key.clone());
            Some(ProbeCredential::Certificate { cert_file, key_file })
        }
        Credential::TokenFile(file) if mode == SetupMode::Terminate || has_ca => {
            Some(ProbeCredential::Token { token_file: file.clone() })
        }
        _ => None,
    }
}

/// What follows from `/readyz` probes without a credential (`control::readyz`).
fn anonymous_probe_note(mode: SetupMode, credential: &Credential) -> String {
    let reason = match credential {
        Credential::Certificate(..) => "the user's certificate is embedded in the kubeconfig",
        Credential::Token(_) => "the user's token is embedded in the kubeconfig",
        Credential::TokenFile(_) => "the user's token is not sent",
        Credential::Exec(_) => "the user's credential comes from an exec plugin",
        Credential::Other(_) => "the user has a password or an auth-provider",
        Credential::Anonymous => "the user has none",
    };
    let effect = match mode {
        SetupMode::Passthrough => {
            "it does not request /readyz, and an apiserver counts as ready while it accepts connections \
             and answers PINGs, even without its etcd"
        }
        SetupMode::Terminate => {
            "it requests /readyz without one, and an apiserver that refuses such requests (401, 403) \
             counts as ready while it accepts connections and answers PINGs, even without its etcd"
        }
    };
    format!(
        "jackstay has no credential for /readyz, because {reason}: {effect}; \
         upstreams[0].health.readyz.token_file, or cert_file and key_file, names one"
    )
}

/// What an exec plugin needs in mode `terminate`, if it returns certificates. `name` is the server name by which
/// connections are passed through.
fn exec_note(command: &str, name: Option<&str>, directory: &Path) -> String {
    let ca = serving::ServingFiles::in_directory(directory).ca;
    let remedy = match name {
        Some(name) => format!(
            "run `jackstay kubeconfig --force --local-ca {} --tls-server-name {name}` while jackstay runs: \
             connections with this name are passed through (listeners[0].passthrough_server_names), and the \
             apiservers see the certificates",
            ca.display()
        ),
        None => "use --mode passthrough, or set listeners[0].passthrough_server_names to a name in the \
                 apiservers' certificates: jackstay cannot present certificates that it does not have \
                 (listeners[0].identities)"
            .to_owned(),
    };
    format!(
        "the exec plugin {command:?} runs in the client as before, and jackstay forwards its tokens; if it \
         returns client certificates, {remedy}"
    )
}
