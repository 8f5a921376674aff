//! Finds the apiservers of a cluster and the name that their certificates share, for `jackstay
//! kubeconfig`. Only a failure of `--discover` is an error; other failures become warnings and notes.

use std::net::SocketAddr;
use std::path::Path;

use http::uri::Authority;
use jackstay_config::{self as config, Overrides};
use jackstay_core::discovery::address::{EndpointAddress, tls_name};
use jackstay_core::quantity::quantity;
use jackstay_kubeconfig::{Credential, PemSource, ResolvedContext, ServerUrl, sent_authority};

use super::args::KubeconfigArgs;
use super::listener::UserPath;
use super::output::Failure;
use crate::doctor::dns::Resolver;
use crate::doctor::members::MembersError;
use crate::doctor::observations::{AddressBackends, HostRouting};
use crate::doctor::survey::{self, NoNames, NotApiserver, Survey, SurveyError, SurveyRequest};
use crate::doctor::target::{ExecPlugins, Trust, root_of_context};
use crate::kubeconfig::setup::SetupMode;
use crate::kubeconfig::verified_names::{
    CertificateNames, NameInputs, VerifiedNames, select, select_passed_through,
};

/// The known apiservers of the cluster.
#[derive(Debug)]
pub(super) struct Apiservers {
    /// Apiservers besides the one in the kubeconfig.
    pub(super) upstreams: Vec<String>,
    /// Whether one of them leads to several.
    pub(super) is_balancer: bool,
    /// The authority of requests; `None` leaves that of the clients.
    pub(super) authority: Option<Authority>,
    /// The names to verify.
    pub(super) names: VerifiedNames,
    /// Endpoints at which no apiserver responds.
    pub(super) warnings: Vec<String>,
    /// Messages to the user.
    pub(super) notes: Vec<String>,
}

/// Finds the apiservers. `config` is the configuration to write, if there is one, and `path` how the user is served.
pub(super) fn find(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    config: Option<&Path>,
    path: &UserPath,
) -> Result<Apiservers, Failure> {
    let own = context.server.address();
    refuse_discovery_below_a_path(args, context)?;
    let (mut notes, mut left_out) = (Vec::new(), 0);
    let mut upstreams = known_upstreams(args, &own, config, &mut notes);
    let is_passed_through = matches!(path, UserPath::ByServerName { .. });
    let mut survey = if args.local_ca.is_some() && !is_passed_through {
        // Clients verify the existing listener, so the kubeconfig needs no name of the apiservers.
        without_survey("not needed with --local-ca")
    } else {
        let lists_members = config.is_some();
        survey_apiservers(args, context, (&upstreams, path), lists_members, &mut notes)
    };
    let behind = std::mem::take(&mut survey.behind);
    if args.discover {
        let members = survey.members.map_err(|why| {
            Failure::Input(format!("--discover: the cluster's apiservers are not known: {why}"))
        })?;
        let all: Vec<String> =
            upstreams.iter().cloned().chain(members.iter().map(SocketAddr::to_string)).collect();
        survey = survey_apiservers(args, context, (&all, path), false, &mut notes);
        let is_unusable = |address: &String| {
            survey.not_apiservers.iter().any(|unusable| unusable.address == *address)
                || survey.without_certificate.iter().any(|(unusable, _)| unusable == address)
        };
        let found = all.len();
        upstreams = all
            .into_iter()
            .filter(|address| upstreams.contains(address) || !is_unusable(address))
            .collect();
        left_out = found - upstreams.len();
        // The members are used or left out already, so the redundancy note must not offer them.
        survey.members = Ok(Vec::new());
    }
    let routing = survey.host_routing.take();
    notes.extend(routing.as_ref().map(|(address, routing)| host_routing_note(address, routing)));
    let is_terminated = args.mode == Some(SetupMode::Terminate);
    let authority = context.authority.clone().filter(|_| is_terminated || routing.is_some());
    if config.is_some() && args.mode == Some(SetupMode::Terminate) {
        check_own(&survey, &own)?;
    }
    let warnings = note_unusable(&mut survey, &own, &upstreams, &mut notes);
    let names = verified_names(args, context, path, 1 + upstreams.len(), &survey.certificates)?;
    if config.is_some() {
        // The address of a stopped apiserver is right.
        let wrong = survey.not_apiservers.iter().filter(|a| !a.reason.timed_out);
        let wrong: Vec<&str> = wrong.map(|a| &*a.address).collect();
        let members = survey.members.as_deref();
        let is_only = upstreams.is_empty() && behind.len() == 1;
        notes.extend(behind.iter().filter_map(|one| backends_note(one, is_terminated, is_only)));
        notes.extend(redundancy_note(&own, &upstreams, &wrong, left_out, members));
    }
    let is_balancer = behind.iter().any(|address| address.several().is_some());
    Ok(Apiservers { upstreams, is_balancer, authority, names, warnings, notes })
}

/// The names to verify in the certificates of this number of endpoints.
fn verified_names(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    path: &UserPath,
    endpoints: usize,
    certificates: &[CertificateNames],
) -> Result<VerifiedNames, Failure> {
    if let UserPath::ByServerName { names: accepted, .. } = path {
        return passed_through(accepted, certificates);
    }
    let mut names = select(&NameInputs {
        host: tls_name(&context.server.host),
        given: args.tls_server_name.as_deref().or(context.tls_server_name.as_deref()),
        endpoints,
        certificates,
    });
    if let Some(name) = &args.tls_server_name {
        names.client.clone_from(name);
    }
    Ok(names)
}

fn refuse_discovery_below_a_path(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
) -> Result<(), Failure> {
    if !args.discover || context.path_prefix.is_empty() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "--discover: the server of cluster {:?} has the path {}, which the apiservers that the cluster names do not \
         serve; --endpoint names other servers with this path",
        context.cluster, context.path_prefix
    )))
}

/// The authority that clients send through jackstay, if jackstay does not replace it.
fn authority_of_clients(args: &KubeconfigArgs, is_passed_through: bool) -> Option<Authority> {
    let is_terminated = args.mode == Some(SetupMode::Terminate) || args.local_ca.is_some();
    sent_authority(&args.listen).filter(|_| !is_terminated || is_passed_through)
}

/// What follows for clients whose connections are passed through.
fn host_routing_note(address: &str, routing: &HostRouting) -> String {
    let HostRouting { served, refused, status } = routing;
    format!(
        "{address} routes by the host of a request: it answers {status} to {refused}, which clients send in mode \
         passthrough, and as an apiserver to {served}: use --mode terminate, in which jackstay sends {served} \
         (upstreams[].authority)"
    )
}

/// Fails, before a file is written, if the certificate of the apiserver of the kubeconfig is refused with the CA that
/// the configuration names: jackstay would not connect to it.
fn check_own(survey: &Survey, own: &str) -> Result<(), Failure> {
    let refused = survey.without_certificate.iter().find_map(|(address, why)| match why {
        NoNames::Refused(sentence) if address == own => Some(sentence),
        _ => None,
    });
    refused.map_or(Ok(()), |sentence| {
        Err(Failure::Input(format!(
            "{own} is not accepted: {sentence}; nothing was changed, and --offline writes the files nevertheless"
        )))
    })
}

/// Notes and warnings about the apiservers that do not answer or have no certificate that is verified. Removes the
/// certificates of apiservers that are no endpoints.
fn note_unusable(
    survey: &mut Survey,
    own: &str,
    upstreams: &[String],
    notes: &mut Vec<String>,
) -> Vec<String> {
    let is_endpoint = |address: &String| *address == own || upstreams.contains(address);
    let mut warnings = Vec::new();
    for NotApiserver { address, reason } in &survey.not_apiservers {
        let why = &reason.why;
        if is_endpoint(address) {
            let check = if reason.timed_out {
                "check that it runs, and the address"
            } else {
                "check the address"
            };
            warnings.push(format!(
                "{address} does not answer as an apiserver: {why}; it is an endpoint nevertheless: {check}"
            ));
        } else {
            notes.push(left_out_note(address, why));
        }
    }
    survey.certificates.retain(|certificate| is_endpoint(&certificate.address));
    for (address, refused) in &survey.without_certificate {
        let why = &refused.to_string();
        // A failed connection is reported once. A certificate that is not accepted is a reason of its own.
        let is_reported = |reported: &NotApiserver| {
            reported.address == *address && (reported.reason.why == *why || !is_endpoint(address))
        };
        if survey.not_apiservers.iter().any(is_reported) {
            continue;
        }
        let answers = !survey.not_apiservers.iter().any(|reported| reported.address == *address);
        if answers && matches!(refused, NoNames::Refused(_)) && is_endpoint(address) {
            warnings.push(format!("{address} is not accepted: {why}"));
            continue;
        }
        notes.push(if is_endpoint(address) {
            format!(
                "no name is taken from the certificate of {address}, which is not verified: {why}; \
                 --ca-file names another CA, --tls-server-name the name"
            )
        } else {
            left_out_note(address, why)
        });
    }
    warnings
}

fn left_out_note(address: &str, why: &str) -> String {
    format!(
        "{address} is an apiserver of the cluster and was left out: {why}; --endpoint {address} uses it \
         nevertheless"
    )
}

/// The name by which the user is passed through.
fn passed_through(
    accepted: &[String],
    certificates: &[CertificateNames],
) -> Result<VerifiedNames, Failure> {
    select_passed_through(accepted, certificates).ok_or_else(|| {
        let listed = certificates.iter().map(|certificate| {
            format!("{} names {}", certificate.address, certificate.names.join(", "))
        });
        Failure::Input(format!(
            "no certificate of the apiservers has a name of passthrough_server_names ({}), which clients that are \
             passed through verify: {}; add such a name to passthrough_server_names of the listener",
            accepted.join(", "),
            listed.collect::<Vec<_>>().join("; ")
        ))
    })
}

/// The apiservers besides `own` that the flags name, else those in the existing configuration.
fn known_upstreams(
    args: &KubeconfigArgs,
    own: &str,
    config: Option<&Path>,
    notes: &mut Vec<String>,
) -> Vec<String> {
    let previous = config.map(|file| endpoints_in(file, own)).unwrap_or_default();
    if args.endpoints.is_empty() {
        return previous;
    }
    let mut given: Vec<String> = Vec::new();
    for upstream in args.endpoints.iter().map(|upstream| normal_address(upstream)) {
        if !is_same(&upstream, own) && !given.iter().any(|known| is_same(known, &upstream)) {
            given.push(upstream);
        }
    }
    let is_given = |known: &String| given.iter().any(|given| is_same(given, known));
    let removed: Vec<String> = previous.into_iter().filter(|known| !is_given(known)).collect();
    if !removed.is_empty() {
        notes.push(format!(
            "no longer an endpoint: {}; --endpoint names all besides the kubeconfig's",
            removed.join(", ")
        ));
    }
    given
}

/// An address in its normal form, in which the survey reports it. The validation of the configuration reports what is
/// not an address.
fn normal_address(text: &str) -> String {
    EndpointAddress::parse(text).map_or_else(|_| text.to_owned(), |address| address.to_string())
}

fn is_same(a: &str, b: &str) -> bool {
    match (EndpointAddress::parse(a), EndpointAddress::parse(b)) {
        (Ok(a), Ok(b)) => a.is_same(&b),
        _ => a == b,
    }
}

/// A survey without an observation, and why.
fn without_survey(why: &str) -> Survey {
    Survey::without_observations(MembersError::NotRequested(why.to_owned()))
}

/// Notes once that no certificate is verified.
fn note_without_names(notes: &mut Vec<String>, why: &str) {
    let note = format!(
        "no name is taken from the certificates of the apiservers: {why}; --ca-file names the \
         cluster's CA, --tls-server-name the name"
    );
    if !notes.contains(&note) {
        notes.push(note);
    }
}

/// Connects to the apiservers and reads their certificates, and with `lists_members` the `EndpointSlices` of
/// the cluster. A note says why no certificate could be verified.
fn survey_apiservers(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    (upstreams, path): (&[String], &UserPath),
    lists_members: bool,
    notes: &mut Vec<String>,
) -> Survey {
    if args.offline {
        return without_survey("--offline");
    }
    let mut context = context.clone();
    if let Some(file) = &args.ca_file {
        (context.ca, context.insecure) = (Some(PemSource::File(file.clone())), false);
    }
    let mut without_names = |why: &str| note_without_names(notes, why);
    // Reading certificates needs no credential, so the plugin runs only to list the members.
    let plugins = if args.discover && lists_members { ExecPlugins::Run } else { ExecPlugins::Skip };
    // The validation of the configuration reports upstreams that are not addresses.
    let others: Vec<ServerUrl> =
        upstreams.iter().filter_map(|u| ServerUrl::parse(u).ok()).collect();
    let mut trust_notes = Vec::new();
    let is_passed_through = matches!(path, UserPath::ByServerName { .. });
    let clients = authority_of_clients(args, is_passed_through);
    let root = root_of_context(&context);
    let survey = Trust::of_context(&context, plugins, &mut trust_notes)
        .map_err(SurveyError::Target)
        .and_then(|trust| {
            let request = SurveyRequest {
                own: &context.server,
                verified_name: context.verified_name(),
                others: &others,
                trust: &trust,
                root: &root,
                clients: clients.as_ref(),
                query_members: lists_members,
            };
            Ok((survey::survey(&request, Resolver::of_system())?, trust.verifies()))
        });
    let mut survey = match survey {
        Ok((survey, true)) => survey,
        Ok((survey, false)) => {
            let why = if context.insecure {
                "insecure-skip-tls-verify is set, so they are not verified and no credential is sent"
            } else {
                "there is no CA that verifies them: the cluster names none and this system has no \
                 bundle"
            };
            without_names(why);
            return Survey { members: Err(MembersError::NotRequested(why.to_owned())), ..survey };
        }
        Err(error) => {
            let why = error.to_string();
            without_names(&why);
            return without_survey(&why);
        }
    };
    match &context.credential {
        _ if !root.prefix.is_empty() => {}
        Credential::Exec(plugin) if !args.discover => {
            let command = &plugin.command;
            let why = format!("the exec plugin {command:?} is run by --discover only");
            survey.members = Err(MembersError::NotRequested(why));
        }
        // The notes say why the plugin returned nothing.
        Credential::Exec(_) if !trust_notes.is_empty() => {
            survey.members = Err(MembersError::NotRequested(trust_notes.join("; ")));
        }
        _ => {}
    }
    survey
}

/// A note if `own` is the only endpoint, or if the cluster has apiservers that are not endpoints yet. It does not
/// repeat upstreams that are `wrong`, at which no apiserver responds, as if they were usable.
fn redundancy_note(
    own: &str,
    upstreams: &[String],
    wrong: &[&str],
    left_out: usize,
    members: Result<&[SocketAddr], &MembersError>,
) -> Option<String> {
    let only = upstreams.is_empty();
    match members {
        Ok([]) if only && left_out > 0 => Some(format!(
            "only one endpoint is used, {own}: nothing takes over when it fails; the cluster names {} \
             more, which {} left out",
            quantity(left_out, "apiserver"),
            if left_out == 1 { "was" } else { "were" }
        )),
        Ok([]) if only => Some(format!(
            "only one endpoint is known, {own}, and the cluster names no other: nothing takes over \
             when it fails"
        )),
        Ok([]) => None,
        Ok(members) => {
            let prefix =
                if only { format!("only one endpoint is known, {own}; ") } else { String::new() };
            // --endpoint replaces the known endpoints, so the note names them too.
            let (wrong, known): (Vec<&str>, Vec<&str>) =
                upstreams.iter().map(String::as_str).partition(|address| wrong.contains(address));
            let known = known.into_iter().map(str::to_owned);
            let all = known.chain(members.iter().map(SocketAddr::to_string));
            let mut options: Vec<String> = all.map(|known| format!("--endpoint {known}")).collect();
            options.extend(wrong.iter().map(|_| "--endpoint ADDR".to_owned()));
            let suffix = if wrong.is_empty() {
                String::new()
            } else {
                format!(", where ADDR is the right address instead of {}", wrong.join(" and "))
            };
            Some(format!(
                "{prefix}the cluster names {} more: to use {} run it again with --discover --force, \
                 or with {} --force{suffix}",
                quantity(members.len(), "apiserver"),
                if members.len() == 1 { "it" } else { "them" },
                options.join(" ")
            ))
        }
        Err(why) if only => Some(format!(
            "only one endpoint is known, {own}: nothing takes over when it fails; --endpoint names \
             others (the cluster's apiservers are not known: {why})"
        )),
        Err(_) => None,
    }
}

/// What is behind an address, and what jackstay promises there. That it always leads to one apiserver is noted of the
/// only address.
fn backends_note(behind: &AddressBackends, is_terminated: bool, is_only: bool) -> Option<String> {
    let AddressBackends { address, connections, .. } = behind;
    if let Some(apiservers) = behind.several() {
        let promise = if is_terminated {
            "jackstay judges each of them by itself and uses two at a time"
        } else {
            "in mode passthrough jackstay cannot see which one a flow has reached, so a sick one must be left out by the \
             load balancer"
        };
        return Some(format!(
            "{address} leads to several apiservers: {connections} connections have reached {apiservers}; {promise}"
        ));
    }
    (is_only && behind.is_always_one()).then(|| {
        format!(
            "{connections} connections to {address} have reached one apiserver: it is one, or a load balancer of several \
             that cannot be told apart (set kind: balancer in the upstream, if it is), or one that sends all connections of \
             this machine to the same one (client IP affinity)"
        )
    })
}

/// The other endpoints of the upstream that contains `own` in an existing configuration; empty if
/// there is none.
fn endpoints_in(file: &Path, own: &str) -> Vec<String> {
    let draft = config::draft(file, [], &Overrides::default());
    let upstreams = draft.config.map(|config| config.upstreams).unwrap_or_default();
    let mut upstreams = upstreams.iter().map(|upstream| {
        upstream.endpoints.iter().map(ToString::to_string).collect::<Vec<String>>()
    });
    let mut endpoints = upstreams
        .find(|endpoints| endpoints.iter().any(|endpoint| is_same(endpoint, own)))
        .unwrap_or_default();
    endpoints.retain(|endpoint| !is_same(endpoint, own));
    endpoints
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_core::backends::Kind;

    #[test]
    fn backends_note_says_what_jackstay_promises() {
        let behind = |kind, backends: &[&str]| AddressBackends {
            address: "10.0.0.5:443".parse().unwrap(),
            kind,
            backends: backends.iter().map(ToString::to_string).collect(),
            connections: 6,
        };
        let balancer = behind(Kind::Several(2), &["10.0.0.11:6443", "10.0.0.12:6443"]);
        let terminated = backends_note(&balancer, true, true).unwrap();
        assert_eq!(
            terminated,
            "10.0.0.5:443 leads to several apiservers: 6 connections have reached 2 apiservers (10.0.0.11:6443, \
             10.0.0.12:6443); jackstay judges each of them by itself and uses two at a time"
        );
        let passed_through = backends_note(&balancer, false, false).unwrap();
        assert!(passed_through.contains("cannot see which one a flow has reached"));
        let one = behind(Kind::One, &["10.0.0.11:6443"]);
        assert!(backends_note(&one, true, true).unwrap().contains("client IP affinity"));
        assert_eq!(backends_note(&one, true, false), None);
        assert_eq!(backends_note(&behind(Kind::Unknown, &[]), true, true), None);
    }

    #[test]
    fn redundancy_note_offers_the_other_apiservers_of_the_cluster() {
        let members: Vec<SocketAddr> =
            ["10.0.0.2:6443", "[fd00::3]:6443"].map(|a| a.parse().unwrap()).to_vec();
        let own = "10.0.0.1:6443";
        let note = |known: &[String], left_out, members| {
            redundancy_note(own, known, &["10.0.0.8:2379"], left_out, members)
        };
        let offer = note(&[], 0, Ok(&members)).unwrap();
        assert!(
            offer.starts_with("only one endpoint is known, 10.0.0.1:6443; the cluster names 2")
        );
        assert!(offer.contains("with --endpoint 10.0.0.2:6443 --endpoint [fd00::3]:6443 --force"));
        // The offer includes the known endpoints, which --endpoint would drop.
        let known = ["10.0.0.9:6443".to_owned()];
        let offer = note(&known, 0, Ok(&members[..1])).unwrap();
        assert!(offer.starts_with("the cluster names 1 apiserver more"), "{offer}");
        assert!(offer.contains("with --endpoint 10.0.0.9:6443 --endpoint 10.0.0.2:6443 --force"));
        assert!(offer.ends_with("--force"), "{offer}");
        // An address at which no apiserver responds is no part of the command.
        let with_wrong = ["10.0.0.8:2379".to_owned(), "10.0.0.9:6443".to_owned()];
        let offer = note(&with_wrong, 0, Ok(&members[..1])).unwrap();
        let command = "with --endpoint 10.0.0.9:6443 --endpoint 10.0.0.2:6443 --endpoint ADDR --force, \
                       where ADDR is the right address instead of 10.0.0.8:2379";
        assert!(offer.ends_with(command), "{offer}");
        assert!(note(&[], 0, Ok(&[])).unwrap().contains("names no other"));
        let left_out = note(&[], 3, Ok(&[])).unwrap();
        assert!(left_out.contains("names 3 apiservers more, which were left out"), "{left_out}");
        assert!(!left_out.contains("names no other"), "{left_out}");
        let refused = MembersError::NotRequested("403".to_owned());
        let unknown = note(&[], 0, Err(&refused)).unwrap();
        assert!(unknown.contains("are not known: 403"), "{unknown}");
        assert_eq!(note(&known, 0, Ok(&[])), None);
        assert_eq!(note(&known, 0, Err(&refused)), None);
    }
}
