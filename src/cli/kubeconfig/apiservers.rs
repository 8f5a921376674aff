//! What `jackstay kubeconfig` finds out before it decides: which apiservers there are, and which name
//! their certificates share. Whatever cannot be found out becomes a note.

use std::net::SocketAddr;
use std::path::Path;

use super::{Failure, KubeconfigArgs};
use crate::doctor::dns::Resolver;
use crate::doctor::survey::{self, Survey, SurveyRequest};
use crate::doctor::target::{ExecPlugins, Trust};
use crate::kubeconfig::names::{self, NameInputs, VerifiedNames};
use crate::kubeconfig::tree::{Node, parse};
use crate::kubeconfig::{Credential, PemSource, ResolvedContext, ServerUrl};
use crate::observe::counted;

/// The apiservers of the cluster as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Apiservers {
    /// Apiservers besides the one in the kubeconfig.
    pub(super) upstreams: Vec<String>,
    /// The names to verify.
    pub(super) names: VerifiedNames,
    /// What the user should know.
    pub(super) notes: Vec<String>,
}

/// Finds the apiservers; `config` is where a configuration goes, if one is asked for.
pub(super) fn find(
    args: &KubeconfigArgs,
    access: &ResolvedContext,
    config: Option<&Path>,
) -> Result<Apiservers, Failure> {
    let own = access.server.address();
    let mut found = Apiservers::default();
    let before = config.map(|file| endpoints_in(file, &own)).unwrap_or_default();
    if args.upstreams.is_empty() {
        found.upstreams = before;
    } else {
        for upstream in args.upstreams.iter().filter(|upstream| **upstream != own) {
            if !found.upstreams.contains(upstream) {
                found.upstreams.push(upstream.clone());
            }
        }
        let dropped: Vec<String> =
            before.into_iter().filter(|known| !found.upstreams.contains(known)).collect();
        if !dropped.is_empty() {
            found.notes.push(format!(
                "no longer an endpoint: {}; --upstream names all besides the kubeconfig's",
                dropped.join(", ")
            ));
        }
    }
    let mut seen = survey_apiservers(args, access, &found.upstreams, config.is_some());
    if args.discover {
        let members = seen.members.map_err(|why| {
            Failure::Input(format!("--discover: the cluster's apiservers are not known: {why}"))
        })?;
        let all = members.iter().map(SocketAddr::to_string);
        let all: Vec<String> = found.upstreams.iter().cloned().chain(all).collect();
        seen = survey_apiservers(args, access, &all, false);
        let is_dead = |address: &String| seen.unseen.iter().any(|(unseen, _)| unseen == address);
        found.upstreams =
            all.into_iter().filter(|a| found.upstreams.contains(a) || !is_dead(a)).collect();
        // Nothing else is to be offered.
        seen.members = Ok(Vec::new());
    }
    for (address, why) in &seen.unseen {
        found.notes.push(if *address == own || found.upstreams.contains(address) {
            format!("the certificate of {address} was not looked at: {why}")
        } else {
            format!("{address} is an apiserver of the cluster and was left out: {why}")
        });
    }
    found.names = names::choose(&NameInputs {
        host: &access.server.host,
        given: args.tls_server_name.as_deref().or(access.tls_server_name.as_deref()),
        endpoints: 1 + found.upstreams.len(),
        certificates: &seen.certificates,
    });
    if let Some(name) = &args.tls_server_name {
        found.names.client.clone_from(name);
    }
    if config.is_some() {
        let offer = redundancy(&own, &found.upstreams, seen.members.as_deref());
        found.notes.extend(offer);
    }
    Ok(found)
}

/// Looks at the certificates, and asks the cluster for its apiservers where `asks`.
fn survey_apiservers(
    args: &KubeconfigArgs,
    access: &ResolvedContext,
    upstreams: &[String],
    asks: bool,
) -> Survey {
    let nothing = |why: &str| Survey {
        certificates: Vec::new(),
        unseen: Vec::new(),
        members: Err(why.to_owned()),
    };
    if args.offline {
        return nothing("--offline");
    }
    // TLS ends at a listener that exists: nothing of the apiservers is written down.
    if args.local_ca.is_some() {
        return nothing("the listener knows them");
    }
    let mut access = access.clone();
    if let Some(file) = &args.ca_file {
        (access.ca, access.insecure) = (Some(PemSource::File(file.clone())), false);
    }
    if access.insecure {
        return nothing("the cluster's server is not verified, no credential is sent to it");
    }
    // Once: the certificates alone need no credential.
    let runs = args.discover && asks;
    let plugins = if runs { ExecPlugins::Run } else { ExecPlugins::Leave };
    // An upstream that is no address is reported with the configuration.
    let others: Vec<ServerUrl> =
        upstreams.iter().filter_map(|u| ServerUrl::parse(u).ok()).collect();
    let mut notes = Vec::new();
    let survey = Trust::of_access(&access, plugins, &mut notes).and_then(|trust| {
        let request = SurveyRequest {
            own: &access.server,
            verified_name: access.verified_name(),
            others: &others,
            trust: &trust,
            asks,
        };
        survey::look(&request, Resolver::of_system())
    });
    let mut survey = match survey {
        Ok(survey) => survey,
        Err(why) => return nothing(&why),
    };
    match &access.credential {
        Credential::Exec(plugin) if !args.discover => {
            let command = &plugin.command;
            survey.members = Err(format!("the exec plugin {command:?} is run by --discover only"));
        }
        // Why it yielded nothing.
        Credential::Exec(_) if !notes.is_empty() => survey.members = Err(notes.join("; ")),
        _ => {}
    }
    survey
}

/// What there is to go to when an apiserver fails, and what there could be.
fn redundancy(
    own: &str,
    upstreams: &[String],
    members: Result<&[SocketAddr], &String>,
) -> Option<String> {
    let only = upstreams.is_empty();
    match members {
        Ok([]) if only => Some(format!(
            "only one endpoint is known, {own}, and the cluster names no other: nothing takes over \
             when it fails"
        )),
        Ok([]) => None,
        Ok(members) => {
            let beside =
                if only { format!("only one endpoint is known, {own}; ") } else { String::new() };
            // With --upstream those that are known have to be named as well.
            let all = upstreams.iter().cloned().chain(members.iter().map(SocketAddr::to_string));
            let options: Vec<String> = all.map(|address| format!("--upstream {address}")).collect();
            Some(format!(
                "{beside}the cluster names {} more: to use {} run it again with --discover --force, \
                 or with {} --force",
                counted(members.len(), "apiserver"),
                if members.len() == 1 { "it" } else { "them" },
                options.join(" ")
            ))
        }
        Err(why) if only => Some(format!(
            "only one endpoint is known, {own}: nothing takes over when it fails; --upstream names \
             others (the cluster was not asked for them: {why})"
        )),
        Err(_) => None,
    }
}

/// The endpoints besides `own` in a configuration that was written for it before; none if there is
/// no such file.
fn endpoints_in(file: &Path, own: &str) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let Ok(Some(config)) = parse(&text) else { return Vec::new() };
    let upstreams = config.items("upstreams").iter();
    let endpoints = upstreams.map(|upstream| {
        let all = upstream.items("endpoints").iter().filter_map(Node::as_str);
        all.map(ToOwned::to_owned).collect::<Vec<String>>()
    });
    let mut of_cluster =
        endpoints.into_iter().find(|all| all.iter().any(|e| e == own)).unwrap_or_default();
    of_cluster.retain(|endpoint| endpoint != own);
    of_cluster
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redundancy_offers_what_the_cluster_names() {
        let members: Vec<SocketAddr> =
            ["10.0.0.2:6443", "[fd00::3]:6443"].map(|a| a.parse().unwrap()).to_vec();
        let own = "10.0.0.1:6443";
        let offer = redundancy(own, &[], Ok(&members)).unwrap();
        assert!(
            offer.starts_with("only one endpoint is known, 10.0.0.1:6443; the cluster names 2")
        );
        assert!(offer.contains("with --upstream 10.0.0.2:6443 --upstream [fd00::3]:6443 --force"));
        // Without those that are known they would be dropped.
        let known = ["10.0.0.9:6443".to_owned()];
        let offer = redundancy(own, &known, Ok(&members[..1])).unwrap();
        assert!(offer.starts_with("the cluster names 1 apiserver more"), "{offer}");
        assert!(offer.contains("with --upstream 10.0.0.9:6443 --upstream 10.0.0.2:6443 --force"));
        assert!(redundancy(own, &[], Ok(&[])).unwrap().contains("names no other"));
        let refused = "403".to_owned();
        let note = redundancy(own, &[], Err(&refused)).unwrap();
        assert!(note.contains("not asked for them: 403"), "{note}");
        assert_eq!(redundancy(own, &known, Ok(&[])), None);
        assert_eq!(redundancy(own, &known, Err(&refused)), None);
    }
}
