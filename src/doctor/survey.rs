//! A short examination for `jackstay kubeconfig`: the names in the certificates of some apiservers,
//! and which other apiservers the cluster has.
//!
//! Only the apiserver of the kubeconfig gets the user's credential, after it was verified as kubectl
//! verifies it. Of the others only the certificates are read.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::{Instant, timeout};

use super::dns::Resolver;
use super::members;
use super::observations::{EndpointSource, Failure, FailureKind, Resolution, Step};
use super::probe::{ProbeConnection, StepTimer, open};
use super::target::{Target, Trust};
use crate::kubeconfig::CertificateNames;
use crate::kubeconfig::ServerUrl;
use crate::net::tls::local_ca::subject_alt_names;

/// Limit of one apiserver, from the resolution of its name to the response. A lost SYN costs 1 s of it
/// (RFC 6298 section 2).
const LIMIT: Duration = Duration::from_secs(5);

/// What to survey.
pub struct SurveyRequest<'a> {
    /// The apiserver of the kubeconfig.
    pub own: &'a ServerUrl,
    /// The name that its clients verify.
    pub verified_name: &'a str,
    /// Other apiservers of the cluster.
    pub others: &'a [ServerUrl],
    /// The CA of all apiservers, and the credential for `own`.
    pub trust: &'a Trust,
    /// Whether `own` gets the credential and is asked for the apiservers of the cluster.
    pub query_members: bool,
}

/// The result of a survey.
#[derive(Debug)]
pub struct Survey {
    /// The names in the certificates, in the order of the request.
    pub certificates: Vec<CertificateNames>,
    /// The addresses without a certificate, and why.
    pub without_certificate: Vec<(String, String)>,
    /// The apiservers that the cluster names and the request does not, or why they are unknown.
    pub members: Result<Vec<SocketAddr>, String>,
}

/// The result for one apiserver.
struct EndpointSurvey {
    /// Its host and port.
    address: String,
    addresses: Vec<SocketAddr>,
    names: Result<CertificateNames, String>,
    members: Result<Vec<SocketAddr>, String>,
}

/// Surveys all apiservers concurrently.
///
/// # Errors
/// A host is not a DNS name or IP address, or the tokio runtime cannot be created.
pub fn survey(request: &SurveyRequest<'_>, resolver: Resolver) -> Result<Survey, String> {
    let anonymous = request.trust.without_credential();
    let trust = if request.query_members { request.trust } else { &anonymous };
    let mut targets = vec![(
        Target::new(request.own, EndpointSource::Given, Some(request.verified_name), trust)?,
        request.own.path.clone(),
    )];
    for server in request.others {
        targets
            .push((Target::new(server, EndpointSource::Given, None, &anonymous)?, String::new()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    Ok(LocalSet::new().block_on(&runtime, survey_all(targets, resolver)))
}

async fn survey_all(targets: Vec<(Target, String)>, resolver: Resolver) -> Survey {
    let resolver = Rc::new(Mutex::new(resolver));
    let tasks: Vec<_> = targets
        .into_iter()
        .enumerate()
        .map(|(index, (target, prefix))| {
            let resolver = Rc::clone(&resolver);
            let query_members = index == 0;
            tokio::task::spawn_local(async move {
                survey_endpoint(&target, &prefix, query_members, &resolver).await
            })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        // The panic hook has printed a panic; the other results count.
        results.extend(task.await);
    }
    let known: Vec<SocketAddr> =
        results.iter().flat_map(|result| result.addresses.clone()).collect();
    let mut survey = Survey {
        certificates: Vec::new(),
        without_certificate: Vec::new(),
        members: Err("it was not asked".into()),
    };
    for (index, result) in results.into_iter().enumerate() {
        if index == 0 {
            survey.members = result.members.map(|mut members| {
                members.retain(|member| !known.contains(member));
                members
            });
        }
        match result.names {
            Ok(names) => survey.certificates.push(names),
            Err(why) => survey.without_certificate.push((result.address, why)),
        }
    }
    survey
}

async fn survey_endpoint(
    target: &Target,
    prefix: &str,
    query_members: bool,
    resolver: &Mutex<Resolver>,
) -> EndpointSurvey {
    let mut result = EndpointSurvey {
        address: target.address.clone(),
        addresses: Vec::new(),
        names: Err(format!("no response within {} s", LIMIT.as_secs())),
        members: Err("the apiserver could not be asked".to_owned()),
    };
    let _ = timeout(LIMIT, async {
        match resolver.lock().await.resolve(&target.host).await {
            Resolution::Addresses(ips) => {
                result.addresses =
                    ips.into_iter().map(|ip| SocketAddr::new(ip, target.port)).collect();
            }
            Resolution::NoSuchName => result.names = Err("no such name".to_owned()),
            Resolution::NoAnswer(why) => result.names = Err(why),
        }
        let Some(address) = result.addresses.first() else { return };
        let opened = open(&mut StepTimer::start(Instant::now()), *address, &target.peer).await;
        result.names = certificate_names(target, &opened);
        result.members = match opened {
            Ok(mut opened) if query_members && target.peer.authenticated => {
                members::ask(&mut opened, &target.peer, prefix).await
            }
            Ok(_) => Err("there is no credential to send".to_owned()),
            Err(failure) => Err(failure.text),
        };
    })
    .await;
    result
}

/// The names in the certificate, if its chain was verified. A wrong name does not matter: it is checked
/// after the chain.
fn certificate_names(
    target: &Target,
    opened: &Result<ProbeConnection, Failure>,
) -> Result<CertificateNames, String> {
    let is_verified = |failure: &Failure| {
        failure.step > Step::Tls
            || failure.step == Step::Tls && failure.kind == FailureKind::WrongName
    };
    match opened {
        Err(failure) if !is_verified(failure) => Err(failure.text.clone()),
        _ => {
            let der = target.verifier.last_certificate().ok_or("it showed no certificate")?;
            let (address, host) = (target.address.clone(), target.host.clone());
            Ok(CertificateNames { address, host, names: subject_alt_names(&der)? })
        }
    }
}
