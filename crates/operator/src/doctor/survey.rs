//! A short examination for `jackstay kubeconfig`. It reads the names in the certificates of apiservers, checks
//! that each responds as an apiserver, and requests the addresses of the other apiservers of the cluster.
//!
//! The user's credential is sent only to the apiserver of the kubeconfig, after that one was verified as
//! kubectl verifies it. The others, and servers whose certificate is not accepted, get a request for `/version`
//! without a credential.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use http::uri::Authority;
use jackstay_config::api_root::ApiRoot;
use jackstay_core::backends::MAX_ADDRESSES;
use jackstay_core::discovery::address::tls_name;
use jackstay_kubeconfig::ServerUrl;
use jackstay_net::tls::certificate::X509Error;
use jackstay_net::tls::local_ca::subject_alt_names;
use jackstay_sys::clock;
use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::timeout;

use super::backends;
use super::dns::Resolver;
use super::host_routing::compare;
use super::members::{self, MembersError};
use super::observations::{
    AddressBackends, EndpointSource, Failure, FailureKind, HostRouting, Resolution, Step,
};
use super::probe::{ProbeConnection, StepTimer, open};
use super::target::{Target, TargetError, Trust};
use super::version;
use crate::kubeconfig::verified_names::CertificateNames;

/// Limit for each apiserver, from the resolution of its name to the response. A lost SYN delays the connect
/// by 1 s (RFC 6298 section 2).
const LIMIT: Duration = Duration::from_secs(5);

/// Limit for the connections that show what is behind an address. An answer takes milliseconds.
const BACKENDS_LIMIT: Duration = Duration::from_secs(2);

/// What to survey.
pub struct SurveyRequest<'a> {
    /// The apiserver of the kubeconfig.
    pub own: &'a ServerUrl,
    /// The name that clients of `own` verify.
    pub verified_name: &'a str,
    /// Other apiservers of the cluster.
    pub others: &'a [ServerUrl],
    /// The CA of all apiservers, and the credential for `own`.
    pub trust: &'a Trust,
    /// Where the API of all apiservers begins.
    pub root: &'a ApiRoot,
    /// The authority that clients will send, if they do not send that of `root`.
    pub clients: Option<&'a Authority>,
    /// Whether `own` gets the credential and is queried for the apiservers of the cluster.
    pub query_members: bool,
}

/// The result of a survey.
#[derive(Debug)]
pub struct Survey {
    /// The names in the certificates: of `own` first, then of the others in the order of the request.
    pub certificates: Vec<CertificateNames>,
    /// The addresses of the apiservers whose certificate could not be read, and why.
    pub without_certificate: Vec<(String, NoNames)>,
    /// The addresses at which no apiserver responds.
    pub not_apiservers: Vec<NotApiserver>,
    /// The first server that does not answer as an apiserver to the authority that clients will send.
    pub host_routing: Option<(String, HostRouting)>,
    /// What is behind each address of the endpoints; empty if they were not examined.
    pub behind: Vec<AddressBackends>,
    /// The apiservers that the cluster names and that are not in the request, or why they are not known.
    pub members: Result<Vec<SocketAddr>, MembersError>,
}

/// Why no survey is possible.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// An apiserver cannot be examined.
    #[error("{0}")]
    Target(#[from] TargetError),
    /// The tokio runtime cannot be created.
    #[error("{0}")]
    Runtime(#[source] io::Error),
}

/// Why the names in the certificate of a server are not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoNames {
    /// There is no connection, for this reason.
    NoConnection(String),
    /// The certificate is refused: which one, why, and what to do.
    Refused(String),
    /// The server sent no certificate.
    NoCertificate,
    /// The certificate cannot be read.
    Unreadable(X509Error),
}

impl fmt::Display for NoNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoConnection(why) | Self::Refused(why) => f.write_str(why),
            Self::NoCertificate => f.write_str("it sent no certificate"),
            Self::Unreadable(error) => error.fmt(f),
        }
    }
}

/// An address at which no apiserver responds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotApiserver {
    /// The host and port.
    pub address: String,
    /// Why none responds.
    pub reason: NoResponse,
}

/// Why no apiserver responds at an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoResponse {
    /// The reason as text.
    pub why: String,
    /// Whether a limit passed without a response. The address may be right: a stopped apiserver, a lost
    /// packet or a silent name server has this effect.
    pub timed_out: bool,
}

impl NoResponse {
    fn wrong(why: impl Into<String>) -> Self {
        Self { why: why.into(), timed_out: false }
    }

    fn timed_out(why: impl Into<String>) -> Self {
        Self { why: why.into(), timed_out: true }
    }
}

impl From<&Failure> for NoResponse {
    fn from(failure: &Failure) -> Self {
        Self { why: failure.text.clone(), timed_out: failure.kind == FailureKind::Timeout }
    }
}

/// The result for one apiserver.
struct EndpointSurvey {
    /// Its host and port.
    address: String,
    addresses: Vec<SocketAddr>,
    names: Result<CertificateNames, NoNames>,
    /// Whether it responds as an apiserver.
    responds: Result<(), NoResponse>,
    host_routing: Option<HostRouting>,
    /// What is behind each of its addresses.
    behind: Vec<AddressBackends>,
    members: Result<Vec<SocketAddr>, MembersError>,
}

impl EndpointSurvey {
    /// Sets the reason why there is no connection.
    fn fail(&mut self, reason: NoResponse) {
        self.names = Err(NoNames::NoConnection(reason.why.clone()));
        self.responds = Err(reason);
    }
}

/// Surveys all apiservers concurrently.
///
/// Without a CA no credential is sent, and no certificate is returned.
///
/// # Errors
/// A host is not a DNS name or IP address, or the tokio runtime cannot be created.
pub fn survey(request: &SurveyRequest<'_>, resolver: Resolver) -> Result<Survey, SurveyError> {
    let anonymous = request.trust.without_credential();
    let trust = if request.query_members { request.trust } else { &anonymous };
    let name = Some(request.verified_name);
    let own = Target::new(request.own, EndpointSource::Given, name, trust)?;
    let own = own.with_root(request.root.clone());
    let others = request.others.iter();
    let others: Vec<Target> = others
        .map(|server| {
            let target = Target::new(server, EndpointSource::Given, None, &anonymous)?;
            Ok::<_, TargetError>(target.with_root(request.root.clone()))
        })
        .collect::<Result<_, _>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(SurveyError::Runtime)?;
    let resolver = Mutex::new(resolver);
    let (mut own, mut others) = LocalSet::new().block_on(&runtime, async {
        let survey = |target, is_own| survey_endpoint(target, is_own, request.clients, &resolver);
        let surveys = others.iter().map(|target| survey(target, false));
        let (mut own_survey, mut surveys) = tokio::join!(survey(&own, true), join_all(surveys));
        let addresses = own_survey.addresses.len()
            + surveys.iter().map(|survey| survey.addresses.len()).sum::<usize>();
        if request.query_members && addresses <= MAX_ADDRESSES {
            let own = [(&own, &mut own_survey)].into_iter();
            join_all(own.chain(others.iter().zip(&mut surveys)).map(examine_backends)).await;
        }
        (own_survey, surveys)
    });
    let behind = [&mut own].into_iter().chain(&mut others);
    let behind = behind.flat_map(|survey| std::mem::take(&mut survey.behind)).collect();
    let known: Vec<SocketAddr> =
        [&own].into_iter().chain(&others).flat_map(|result| result.addresses.clone()).collect();
    let members = own.members.clone().map(|mut members| {
        members.retain(|member| !known.contains(member));
        members
    });
    let mut survey =
        Survey { behind, members, ..Survey::without_observations(MembersError::NoResponse) };
    for result in [own].into_iter().chain(others) {
        if let Err(reason) = result.responds {
            survey.not_apiservers.push(NotApiserver { address: result.address.clone(), reason });
        }
        if let Some(routing) = result.host_routing {
            survey.host_routing.get_or_insert((result.address.clone(), routing));
        }
        match result.names {
            _ if !request.trust.verifies() => {}
            Ok(names) => survey.certificates.push(names),
            Err(why) => survey.without_certificate.push((result.address, why)),
        }
    }
    Ok(survey)
}

impl Survey {
    /// A survey without an observation; the apiservers of the cluster are not known for this reason.
    pub fn without_observations(why: MembersError) -> Self {
        let (certificates, without_certificate, not_apiservers) = Default::default();
        Self {
            certificates,
            without_certificate,
            not_apiservers,
            host_routing: None,
            behind: Vec::new(),
            members: Err(why),
        }
    }
}

/// Finds out what is behind the addresses of an endpoint that answers.
async fn examine_backends((target, survey): (&Target, &mut EndpointSurvey)) {
    if survey.responds.is_err() {
        return;
    }
    let deadline = clock::now() + BACKENDS_LIMIT;
    let examine = |address: &SocketAddr| backends::examine(target, *address, deadline);
    survey.behind = join_all(survey.addresses.iter().map(examine)).await;
}

/// Surveys one apiserver. From that of the kubeconfig it also requests the addresses of the cluster's apiservers. A
/// step that does not end within [`LIMIT`] leaves the result that stands for it.
async fn survey_endpoint(
    target: &Target,
    is_own: bool,
    clients: Option<&Authority>,
    resolver: &Mutex<Resolver>,
) -> EndpointSurvey {
    let mut result = EndpointSurvey {
        address: target.address.clone(),
        addresses: Vec::new(),
        names: Err(NoNames::NoCertificate),
        responds: Ok(()),
        host_routing: None,
        behind: Vec::new(),
        members: Err(MembersError::NoResponse),
    };
    result.fail(NoResponse::timed_out(format!("no response within {} s", LIMIT.as_secs())));
    let _ = timeout(LIMIT, async {
        match resolver.lock().await.resolve(&target.host).await {
            Resolution::Addresses(ips) => {
                result.addresses = ips.into_iter().map(|ip| target.socket_address(ip)).collect();
            }
            Resolution::NoSuchName => result.fail(NoResponse::wrong("no such name")),
            Resolution::NoAnswer(why) => result.fail(NoResponse::timed_out(why)),
        }
        let Some(address) = result.addresses.first() else { return };
        let mut opened = open(&mut StepTimer::start(clock::now()), *address, &target.peer).await;
        result.names = certificate_names(target, &opened);
        result.responds = Err(NoResponse::timed_out("/version: no response"));
        result.responds = match &mut opened {
            Ok(opened) => {
                let response = version::request(opened, &target.peer).await.map(drop);
                response.map_err(|error| NoResponse::wrong(error.to_string()))
            }
            Err(failure) if failure.kind.is_of_certificate() => {
                request_unverified(target, *address).await
            }
            Err(failure) => Err(NoResponse::from(&*failure)),
        };
        if let (Ok(_), Some(clients), Ok(())) = (&opened, clients, &result.responds) {
            let clients = std::slice::from_ref(clients);
            result.host_routing = compare(*address, &target.peer, clients, &[]).await;
        }
        let prefix = &target.peer.root.prefix;
        result.members = match (opened, is_own) {
            (Ok(_), true) if !prefix.is_empty() => Err(MembersError::BelowPath(prefix.to_string())),
            (Ok(mut opened), true) if target.peer.authenticated => {
                members::request(&mut opened, &target.peer).await
            }
            (Ok(_), _) => Err(MembersError::NoCredential),
            (Err(failure), _) => Err(MembersError::NoConnection(failure.text)),
        };
    })
    .await;
    result
}

/// Requests `/version` without a credential from a server whose certificate is not accepted: an apiserver with
/// another CA, or another server.
async fn request_unverified(target: &Target, address: SocketAddr) -> Result<(), NoResponse> {
    let target = target.unverified().map_err(|error| NoResponse::wrong(error.to_string()))?;
    let opened = open(&mut StepTimer::start(clock::now()), address, &target.peer).await;
    let mut opened = opened.map_err(|failure| NoResponse::from(&failure))?;
    let response = version::request(&mut opened, &target.peer).await.map(drop);
    response.map_err(|error| NoResponse::wrong(error.to_string()))
}

/// The names in the certificate, if its chain was verified. A failure because of a wrong name comes after
/// the verification of the chain, but before the proof that the server has the key.
fn certificate_names(
    target: &Target,
    opened: &Result<ProbeConnection, Failure>,
) -> Result<CertificateNames, NoNames> {
    let is_verified = match opened {
        Ok(_) => true,
        Err(failure) if failure.step > Step::Tls => true,
        Err(Failure { step: Step::Tls, kind: FailureKind::WrongName, .. }) => false,
        Err(failure) if failure.kind.is_of_certificate() => {
            let sentence = failure.text.strip_prefix("TLS: ").unwrap_or(&failure.text);
            return Err(NoNames::Refused(sentence.to_owned()));
        }
        Err(failure) => return Err(NoNames::NoConnection(failure.text.clone())),
    };
    let der = target.verifier.last_certificate().ok_or(NoNames::NoCertificate)?;
    let (address, host) = (target.address.clone(), tls_name(&target.host).to_owned());
    let names = subject_alt_names(&der).map_err(NoNames::Unreadable)?;
    Ok(CertificateNames { address, host, names, is_verified })
}
