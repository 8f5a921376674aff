//! A short look at some apiservers: what their certificates name, and which apiservers the cluster
//! has besides. For `jackstay kubeconfig`, which has to choose a name that all of them can show.
//!
//! The user's credential goes to the apiserver of the kubeconfig alone, verified as kubectl verifies
//! it; the others are only asked for their certificates.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::{Instant, timeout};

use super::dns::Resolver;
use super::members;
use super::observations::{Failure, Kind, Resolved, Source, Step};
use super::probe::{Clock, Opened, open};
use super::target::{Target, Trust};
use crate::kubeconfig::CertificateNames;
use crate::kubeconfig::ServerUrl;
use crate::net::tls::local_ca::subject_alt_names;

/// How long one apiserver may take with all of it: the name, the connection and the request. One
/// lost SYN costs a second of it (RFC 6298), a dead address all of it.
const LIMIT: Duration = Duration::from_secs(5);

/// What to look at.
pub struct SurveyRequest<'a> {
    /// The apiserver of the kubeconfig.
    pub own: &'a ServerUrl,
    /// The name that its clients verify.
    pub verified_name: &'a str,
    /// Other apiservers of the cluster.
    pub others: &'a [ServerUrl],
    /// What to verify them with, and what to show to the first.
    pub trust: &'a Trust,
    /// Whether the first is asked for the apiservers of the cluster.
    pub asks: bool,
}

/// What was seen.
#[derive(Debug)]
pub struct Survey {
    /// The certificates, in the order of the request.
    pub certificates: Vec<CertificateNames>,
    /// The addresses that were not looked at, and why.
    pub unseen: Vec<(String, String)>,
    /// The apiservers that the cluster names and the request does not, or why they are not known.
    pub members: Result<Vec<SocketAddr>, String>,
}

/// What was seen of one apiserver.
struct EndpointSurvey {
    /// Its host and port.
    address: String,
    addresses: Vec<SocketAddr>,
    shown: Result<CertificateNames, String>,
    members: Result<Vec<SocketAddr>, String>,
}

/// Looks at all of them at once.
///
/// # Errors
/// An address or a name cannot be verified, or the runtime could not be made.
pub fn look(request: &SurveyRequest<'_>, resolver: Resolver) -> Result<Survey, String> {
    let anonymous = request.trust.without_credential();
    let trust = if request.asks { request.trust } else { &anonymous };
    let mut targets = vec![(
        Target::new(request.own, Source::Given, Some(request.verified_name), trust)?,
        request.own.path.clone(),
    )];
    for server in request.others {
        targets.push((Target::new(server, Source::Given, None, &anonymous)?, String::new()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    Ok(LocalSet::new().block_on(&runtime, survey(targets, resolver)))
}

async fn survey(targets: Vec<(Target, String)>, resolver: Resolver) -> Survey {
    let resolver = Rc::new(Mutex::new(resolver));
    let tasks: Vec<_> = targets
        .into_iter()
        .enumerate()
        .map(|(index, (target, prefix))| {
            let resolver = Rc::clone(&resolver);
            let asks = index == 0;
            tokio::task::spawn_local(async move { one(&target, &prefix, asks, &resolver).await })
        })
        .collect();
    let mut looks = Vec::new();
    for task in tasks {
        // A panic has been printed; the others count.
        looks.extend(task.await);
    }
    let known: Vec<SocketAddr> = looks.iter().flat_map(|look| look.addresses.clone()).collect();
    let mut survey = Survey {
        certificates: Vec::new(),
        unseen: Vec::new(),
        members: Err("it was not asked".into()),
    };
    for (index, look) in looks.into_iter().enumerate() {
        if index == 0 {
            survey.members = look.members.map(|mut members| {
                members.retain(|member| !known.contains(member));
                members
            });
        }
        match look.shown {
            Ok(shown) => survey.certificates.push(shown),
            Err(why) => survey.unseen.push((look.address, why)),
        }
    }
    survey
}

async fn one(
    target: &Target,
    prefix: &str,
    asks: bool,
    resolver: &Mutex<Resolver>,
) -> EndpointSurvey {
    let mut look = EndpointSurvey {
        address: target.address.clone(),
        addresses: Vec::new(),
        shown: Err(format!("no answer within {} s", LIMIT.as_secs())),
        members: Err("the apiserver could not be asked".to_owned()),
    };
    let _ = timeout(LIMIT, async {
        match resolver.lock().await.resolve(&target.host).await {
            Resolved::Addresses(ips) => {
                look.addresses =
                    ips.into_iter().map(|ip| SocketAddr::new(ip, target.port)).collect();
            }
            Resolved::NoSuchName => look.shown = Err("no such name".to_owned()),
            Resolved::NoAnswer(why) => look.shown = Err(why),
        }
        let Some(address) = look.addresses.first() else { return };
        let opened = open(&mut Clock::new(Instant::now()), *address, &target.peer).await;
        look.shown = shown(target, &opened);
        look.members = match opened {
            Ok(mut opened) if asks && target.peer.authenticated => {
                members::ask(&mut opened, &target.peer, prefix).await
            }
            Ok(_) => Err("there is no credential to ask with".to_owned()),
            Err(failure) => Err(failure.text),
        };
    })
    .await;
    look
}

/// What the certificate names, if its chain was verified: the name is checked after the chain.
fn shown(target: &Target, opened: &Result<Opened, Failure>) -> Result<CertificateNames, String> {
    let is_verified = |failure: &Failure| {
        failure.step > Step::Tls || failure.step == Step::Tls && failure.kind == Kind::WrongName
    };
    match opened {
        Err(failure) if !is_verified(failure) => Err(failure.text.clone()),
        _ => {
            let der = target.verifier.shown().ok_or("it showed no certificate")?;
            let (address, host) = (target.address.clone(), target.host.clone());
            Ok(CertificateNames { address, host, names: subject_alt_names(&der)? })
        }
    }
}
