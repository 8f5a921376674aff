//! Plans the renewal of a local CA and its serving certificate in two phases, so that no client is cut off.
//!
//! ```text
//! day 0        243 publish                        344 switch        365
//!  │ first CA   │ clients learn the second CA       │ is served       │ the first CA leaves the bundle
//!  └────────────┴── the first certificate is served ┘
//! ```
//!
//! A client that runs keeps the CAs that it has read, and connections that are open hide that it lacks one. So the next
//! CA is published months before its certificate is served. [`stage`] decides; this module reads what there is and
//! writes what was decided. Each file is replaced atomically, and the next run continues from the state after any of
//! them.

mod clients;
mod pairs;
pub mod stage;
mod state;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jackstay_net::tls::certificate::cert_info;
use jackstay_net::tls::local_ca;
use jackstay_sys::files::{PRIVATE, PUBLIC};
use jackstay_sys::utc::Utc;
use rustls::pki_types::CertificateDer;

use self::clients::{Clients, of_kubeconfigs};
pub use self::clients::{Listed, Reader, RenewalRequest, Restart, UpdatedCluster};
use self::pairs::{Pair, Pairs, pem_of};
use self::stage::{Action, Alarm, Decision, Observed, Trust};
pub use self::state::{RenewalState, STATE_FILE};
use super::error::SetupError;
use super::node_name;
use super::plan::OutputFile;
use super::serving::ServingFiles;

/// A planned run.
pub struct RenewalPlan {
    /// The files of jackstay that clients need before another certificate is served, to be written first, in this
    /// order.
    pub publish: Vec<OutputFile>,
    /// The changed kubeconfigs, to be written next.
    pub kubeconfigs: Vec<OutputFile>,
    /// The files of a switch, to be written last, in this order.
    pub switch: Vec<OutputFile>,
    /// Files to remove at the end.
    pub remove: Vec<PathBuf>,
    /// The clusters that change.
    pub clusters: Vec<UpdatedCluster>,
    /// What is done about each running client.
    pub restarts: Vec<(String, Restart)>,
    /// What the next run is to remember.
    pub state: RenewalState,
    /// The file of that.
    pub state_file: PathBuf,
    /// What the run does.
    pub action: Action,
    /// What an operator must do something about.
    pub alarm: Option<String>,
    /// What an operator should know.
    pub warnings: Vec<String>,
    /// The stage of the renewal, with its date.
    pub stage: String,
}

/// The files beside a serving certificate that renewals create.
pub fn kept_files(serving: &Path) -> [PathBuf; 3] {
    let files = ServingFiles::of_serving(serving);
    [files.next(), files.previous(), serving.with_file_name(STATE_FILE)]
}

/// Plans a run.
///
/// # Errors
/// The served certificate cannot be used, or a certificate cannot be issued.
pub fn plan(request: &RenewalRequest<'_>) -> Result<RenewalPlan, SetupError> {
    let files = ServingFiles::of_serving(request.serving);
    let state_file = request.serving.with_file_name(STATE_FILE);
    let before = RenewalState::read(&state_file);
    let mut pairs = Pairs::read(&files, &of_kubeconfigs(request.kubeconfigs))?;
    let clients = Clients::read(request, &pairs, &files.ca, &before);
    let seen = observed(request, &pairs, &clients);
    let decision = stage::decide(&seen);
    let is_usable = stage::usable_next(&seen).is_some() || decision.action == Action::Switch;
    let had_next = files.next().exists();
    pairs.next = pairs.next.filter(|_| is_usable);
    let served = pairs.current.clone();
    act(decision.action, &mut pairs, request.now)?;

    let bundle = bundle(&pairs, request.now);
    let changes = clients.updates(request.kubeconfigs, &bundle, &pairs);
    let (publish, switch) = outputs(&files, &pairs, &served, &bundle);
    let switches = pairs.current.leaf != served.leaf;
    // A pair that will not be served: of other names, invalid, or served already.
    let remove =
        if had_next && (pairs.next.is_none() || switches) { vec![files.next()] } else { vec![] };
    let restarts = clients.restarts(request.readers, &pairs, request.now);
    let mut warnings = clients.warnings;
    warnings.extend(changes.warnings);
    Ok(RenewalPlan {
        publish,
        kubeconfigs: changes.files,
        switch,
        remove,
        clusters: changes.clusters,
        restarts,
        state: clients.state,
        state_file,
        action: decision.action,
        alarm: decision.alarm.map(|alarm| describe_alarm(alarm, &served, &clients.lacking)),
        warnings,
        stage: describe_stage(decision, &pairs, &seen, &clients.lacking),
    })
}

fn observed(request: &RenewalRequest<'_>, pairs: &Pairs, clients: &Clients) -> Observed {
    let window = |pair: &Option<Pair>| pair.as_ref().map(|pair| pair.window);
    Observed {
        now: request.now,
        current: pairs.current.window,
        next: window(&pairs.next),
        previous: window(&pairs.previous),
        trust: clients.trust,
        force: request.force,
    }
}

/// Changes the pairs as decided.
fn act(action: Action, pairs: &mut Pairs, now: SystemTime) -> Result<(), SetupError> {
    let replacement = match action {
        Action::Keep => return Ok(()),
        Action::Publish => {
            pairs.next = Some(create(pairs, now)?);
            return Ok(());
        }
        Action::Switch => pairs.next.take(),
        Action::Return => pairs.previous.take(),
        Action::Replace => Some(create(pairs, now)?),
    };
    if let Some(replacement) = replacement {
        pairs.previous = Some(std::mem::replace(&mut pairs.current, replacement));
    }
    Ok(())
}

/// Creates a pair with the names of the served one.
fn create(pairs: &Pairs, now: SystemTime) -> Result<Pair, SetupError> {
    let ca = pairs.current.ca.as_ref().map(cert_info).transpose();
    let ca = ca.map_err(SetupError::LocalCaCertificate)?;
    let name = ca.as_ref().and_then(|ca| ca.subject.common_name()).unwrap_or("jackstay");
    // An earlier version accepted names that kubectl refuses in a CA.
    let names = pairs.current.names.iter().filter_map(|name| node_name::parse(name).ok());
    let names: Vec<String> = names.collect();
    let created = local_ca::create_serving_cert(name, &names, now).map_err(SetupError::Issue)?;
    Pair::new(&created)
}

/// The CAs that clients are to trust, that of the served certificate first. A CA whose validity has ended verifies
/// nothing and is left out; [`Pairs::previous`] still has it if the clock turns out to be wrong.
fn bundle(pairs: &Pairs, now: SystemTime) -> Vec<CertificateDer<'static>> {
    let is_of_pair = |ca: &CertificateDer<'static>| pairs.cas().any(|of_pair| of_pair == ca);
    // A version before this one kept the CA of the previous pair, and not the pair.
    let earlier = pairs.published.iter().filter(|_| pairs.previous.is_none());
    let earlier = earlier.filter(|ca| !is_of_pair(ca)).take(1);
    let mut bundle: Vec<CertificateDer<'static>> = Vec::new();
    for ca in pairs.cas().chain(earlier) {
        let is_served = pairs.current.ca.as_ref() == Some(ca);
        let has_ended = cert_info(ca).is_ok_and(|info| now > info.not_after);
        if !bundle.contains(ca) && (is_served || !has_ended) {
            bundle.push(ca.clone());
        }
    }
    bundle
}

/// The files to write before the kubeconfigs, and those after them.
fn outputs(
    files: &ServingFiles,
    pairs: &Pairs,
    served: &Pair,
    bundle: &[CertificateDer<'static>],
) -> (Vec<OutputFile>, Vec<OutputFile>) {
    let file = |path: PathBuf, bytes: Vec<u8>, mode: u32, description: &'static str| OutputFile {
        path,
        bytes,
        mode,
        description,
    };
    let next = pairs.next.as_ref().map(|next| {
        let text = "the next serving certificate, which is not served yet, its key and its CA";
        file(files.next(), next.kept(), PRIVATE, text)
    });
    let mut publish: Vec<OutputFile> = next.into_iter().collect();
    if bundle != pairs.published {
        let pem: String = bundle.iter().map(pem_of).collect();
        let text =
            "the certificates of the local CA, which clients trust; no key of a CA is stored";
        publish.push(file(files.ca.clone(), pem.into_bytes(), PUBLIC, text));
    }
    let mut switch = Vec::new();
    if pairs.current.leaf != served.leaf {
        let text = "the serving certificate until now, its key and its CA";
        switch.push(file(files.previous(), served.kept(), PRIVATE, text));
        let text = "the serving certificate and its key, valid for one year";
        let serving = pairs.current.serving.to_vec();
        switch.push(file(files.serving.clone(), serving, PRIVATE, text));
    }
    (publish, switch)
}

fn describe_alarm(alarm: Alarm, served: &Pair, lacking: &[String]) -> String {
    let until = Utc(served.window.until).seconds();
    let lacking = lacking.join(", ");
    match alarm {
        Alarm::NoKubeconfig => format!(
            "no listed kubeconfig trusts the local CA, whose certificate is served until {until}: list the kubeconfigs \
             of the clients with --kubeconfig or KUBECONFIG"
        ),
        Alarm::NotTrusted => format!(
            "the serving certificate expires on {until}, and the next one is not served yet, because {lacking} does not \
             trust its CA"
        ),
        Alarm::SwitchedUntrusted => format!(
            "the new serving certificate is served although clients may not trust its CA: {}",
            if lacking.is_empty() { "no listed kubeconfig trusts the local CA" } else { &lacking }
        ),
        Alarm::Expired => format!(
            "the serving certificate expired on {until} and was replaced: clients that run must be restarted"
        ),
        Alarm::NotYetValid => format!(
            "the serving certificate is not valid before {}: is this machine's clock right? If it is, --force replaces \
             the certificate",
            Utc(served.window.from).seconds()
        ),
    }
}

fn describe_stage(
    decision: Decision,
    pairs: &Pairs,
    seen: &Observed,
    lacking: &[String],
) -> String {
    // The run that publishes puts the CA into all kubeconfigs that it knows.
    let trust = match (decision.action, seen.trust) {
        (Action::Publish, Trust::Incomplete) => Trust::Since(seen.now),
        (_, trust) => trust,
    };
    let switch = Utc(stage::expected_switch(seen.current, trust)).seconds();
    let current = pairs.current.window;
    let until = Utc(current.until).seconds();
    match decision.action {
        Action::Keep if pairs.next.is_none() => format!(
            "the next local CA is published after {}; --force publishes it now",
            Utc(current.renewal_time()).seconds()
        ),
        Action::Keep if lacking.is_empty() => format!(
            "the next local CA is published; its certificate is served after {switch}; --force serves it now"
        ),
        Action::Keep => format!(
            "the next local CA is published; its certificate is served after {switch}, or as soon as this has its CA, \
             too: {}",
            lacking.join(", ")
        ),
        Action::Publish => format!(
            "published the next local CA; its certificate is served after {switch}, and clients that run since before \
             now must be restarted until then; --force serves it now"
        ),
        Action::Switch => format!("the next certificate is served, until {until}"),
        Action::Return => format!("the previous certificate is served again, until {until}"),
        Action::Replace => format!("a new certificate is served, until {until}"),
    }
}
