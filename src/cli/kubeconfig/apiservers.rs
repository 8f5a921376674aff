//! Finds the apiservers of a cluster and the name that their certificates share, for `jackstay
//! kubeconfig`. Each failure becomes a note.

use std::net::SocketAddr;
use std::path::Path;

use super::args::KubeconfigArgs;
use crate::config::{self, Overrides};
use crate::doctor::dns::Resolver;
use crate::doctor::survey::{self, Survey, SurveyRequest};
use crate::doctor::target::{ExecPlugins, Trust};
use crate::kubeconfig::verified_names::{NameInputs, VerifiedNames, select};
use crate::kubeconfig::{Credential, PemSource, ResolvedContext, ServerUrl};
use crate::observe::counted;

/// The known apiservers of the cluster.
#[derive(Debug, Default)]
pub(super) struct Apiservers {
    /// Apiservers besides the one in the kubeconfig.
    pub(super) upstreams: Vec<String>,
    /// The names to verify.
    pub(super) names: VerifiedNames,
    /// Messages to the user.
    pub(super) notes: Vec<String>,
}

/// Finds the apiservers. `config` is the configuration to write, if there is one.
pub(super) fn find(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    config: Option<&Path>,
) -> Result<Apiservers, String> {
    let own = context.server.address();
    let mut found = Apiservers::default();
    let previous = config.map(|file| endpoints_in(file, &own)).unwrap_or_default();
    if args.upstreams.is_empty() {
        found.upstreams = previous;
    } else {
        for upstream in args.upstreams.iter().filter(|upstream| **upstream != own) {
            if !found.upstreams.contains(upstream) {
                found.upstreams.push(upstream.clone());
            }
        }
        let dropped: Vec<String> =
            previous.into_iter().filter(|known| !found.upstreams.contains(known)).collect();
        if !dropped.is_empty() {
            found.notes.push(format!(
                "no longer an endpoint: {}; --upstream names all besides the kubeconfig's",
                dropped.join(", ")
            ));
        }
    }
    let mut survey = survey_apiservers(args, context, &found.upstreams, config.is_some());
    if args.discover {
        let members = survey
            .members
            .map_err(|why| format!("--discover: the cluster's apiservers are not known: {why}"))?;
        let all = members.iter().map(SocketAddr::to_string);
        let all: Vec<String> = found.upstreams.iter().cloned().chain(all).collect();
        survey = survey_apiservers(args, context, &all, false);
        let is_dead = |address: &String| {
            survey.without_certificate.iter().any(|(missing, _)| missing == address)
        };
        found.upstreams =
            all.into_iter().filter(|a| found.upstreams.contains(a) || !is_dead(a)).collect();
        // All members are used, so the note offers none.
        survey.members = Ok(Vec::new());
    }
    for (address, why) in &survey.without_certificate {
        found.notes.push(if *address == own || found.upstreams.contains(address) {
            format!("the certificate of {address} cannot be read: {why}")
        } else {
            format!("{address} is an apiserver of the cluster and was left out: {why}")
        });
    }
    found.names = select(&NameInputs {
        host: &context.server.host,
        given: args.tls_server_name.as_deref().or(context.tls_server_name.as_deref()),
        endpoints: 1 + found.upstreams.len(),
        certificates: &survey.certificates,
    });
    if let Some(name) = &args.tls_server_name {
        found.names.client.clone_from(name);
    }
    if config.is_some() {
        let note = redundancy_note(&own, &found.upstreams, survey.members.as_deref());
        found.notes.extend(note);
    }
    Ok(found)
}

/// Reads the certificates, and with `lists_members` the `EndpointSlices` of the cluster.
fn survey_apiservers(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    upstreams: &[String],
    lists_members: bool,
) -> Survey {
    let without_survey = |why: &str| Survey {
        certificates: Vec::new(),
        without_certificate: Vec::new(),
        members: Err(why.to_owned()),
    };
    if args.offline {
        return without_survey("--offline");
    }
    // An existing listener terminates TLS, so the kubeconfig needs nothing about the apiservers.
    if args.local_ca.is_some() {
        return without_survey("the listener knows them");
    }
    let mut context = context.clone();
    if let Some(file) = &args.ca_file {
        (context.ca, context.insecure) = (Some(PemSource::File(file.clone())), false);
    }
    if context.insecure {
        return without_survey("the cluster's server is not verified, no credential is sent to it");
    }
    // Certificates need no credential, so the plugin runs once.
    let runs = args.discover && lists_members;
    let plugins = if runs { ExecPlugins::Run } else { ExecPlugins::Skip };
    // The validation of the configuration reports an upstream that is not an address.
    let others: Vec<ServerUrl> =
        upstreams.iter().filter_map(|u| ServerUrl::parse(u).ok()).collect();
    let mut notes = Vec::new();
    let survey = Trust::of_context(&context, plugins, &mut notes).and_then(|trust| {
        let request = SurveyRequest {
            own: &context.server,
            verified_name: context.verified_name(),
            others: &others,
            trust: &trust,
            query_members: lists_members,
        };
        survey::survey(&request, Resolver::of_system())
    });
    let mut survey = match survey {
        Ok(survey) => survey,
        Err(why) => return without_survey(&why),
    };
    match &context.credential {
        Credential::Exec(plugin) if !args.discover => {
            let command = &plugin.command;
            survey.members = Err(format!("the exec plugin {command:?} is run by --discover only"));
        }
        // The notes say why the plugin returned nothing.
        Credential::Exec(_) if !notes.is_empty() => survey.members = Err(notes.join("; ")),
        _ => {}
    }
    survey
}

/// A note about the other apiservers to use when one fails.
fn redundancy_note(
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
            // --upstream replaces the known endpoints, so the note names them too.
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

/// The other endpoints of the upstream with `own` in an existing configuration; empty if there is
/// none.
fn endpoints_in(file: &Path, own: &str) -> Vec<String> {
    let draft = config::draft(file, [], &Overrides::default());
    let upstreams = draft.config.map(|config| config.upstreams).unwrap_or_default();
    let mut endpoints = upstreams.into_iter().map(|upstream| {
        upstream.endpoints.iter().map(ToString::to_string).collect::<Vec<String>>()
    });
    let mut of_cluster =
        endpoints.find(|all| all.iter().any(|endpoint| endpoint == own)).unwrap_or_default();
    of_cluster.retain(|endpoint| endpoint != own);
    of_cluster
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redundancy_note_offers_the_other_apiservers_of_the_cluster() {
        let members: Vec<SocketAddr> =
            ["10.0.0.2:6443", "[fd00::3]:6443"].map(|a| a.parse().unwrap()).to_vec();
        let own = "10.0.0.1:6443";
        let offer = redundancy_note(own, &[], Ok(&members)).unwrap();
        assert!(
            offer.starts_with("only one endpoint is known, 10.0.0.1:6443; the cluster names 2")
        );
        assert!(offer.contains("with --upstream 10.0.0.2:6443 --upstream [fd00::3]:6443 --force"));
        // The offer includes the known endpoints, which --upstream would drop.
        let known = ["10.0.0.9:6443".to_owned()];
        let offer = redundancy_note(own, &known, Ok(&members[..1])).unwrap();
        assert!(offer.starts_with("the cluster names 1 apiserver more"), "{offer}");
        assert!(offer.contains("with --upstream 10.0.0.9:6443 --upstream 10.0.0.2:6443 --force"));
        assert!(redundancy_note(own, &[], Ok(&[])).unwrap().contains("names no other"));
        let refused = "403".to_owned();
        let note = redundancy_note(own, &[], Err(&refused)).unwrap();
        assert!(note.contains("not asked for them: 403"), "{note}");
        assert_eq!(redundancy_note(own, &known, Ok(&[])), None);
        assert_eq!(redundancy_note(own, &known, Err(&refused)), None);
    }
}
