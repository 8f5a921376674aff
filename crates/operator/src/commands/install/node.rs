//! The node on which jackstay is installed, and the requests for its state.

use jackstay_kubeconfig::{Credential, ResolvedContext, ServerUrl};
use jackstay_net::tls::certificate::Subject;
use jackstay_net::tls::pem_files::valid_certificates;

use crate::commands::kubeconfig::{Draft, Failure, host_name};
use crate::doctor::node::{NodeState, node_state};
use crate::doctor::observations::EndpointSource;
use crate::doctor::target::{ApiRoot, ExecPlugins, Target, TargetError, Trust, root_of_context};

/// The prefix of a node's user name (Node authorizer).
const USER_PREFIX: &str = "system:node:";

/// The node, and the apiservers that know it.
pub(super) struct Node {
    /// The name of its object.
    pub(super) name: String,
    servers: Vec<ServerUrl>,
    verified_name: Option<String>,
    root: ApiRoot,
    trust: Trust,
}

impl Node {
    /// The node with this name, with the apiservers and the credential of kubelet's kubeconfig.
    ///
    /// # Errors
    /// A certificate or key cannot be used.
    pub(super) fn new(name: String, draft: &Draft) -> Result<Self, Failure> {
        let context = &draft.context;
        let trust = Trust::of_context(context, ExecPlugins::Run, &mut Vec::new())?;
        let others = draft.upstreams.iter().filter_map(|address| ServerUrl::parse(address).ok());
        let root = root_of_context(context);
        let servers = [context.server.clone()].into_iter().chain(others).collect();
        let verified_name = context.tls_server_name.clone();
        Ok(Self { name, servers, verified_name, root, trust })
    }

    /// The apiservers, as targets of requests with kubelet's credential.
    ///
    /// # Errors
    /// A name cannot be verified.
    pub(super) fn targets(&self) -> Result<Vec<Target>, Failure> {
        let target = |server: &ServerUrl| {
            let name = self.verified_name.as_deref();
            let target = Target::new(server, EndpointSource::Given, name, &self.trust)?;
            Ok::<_, TargetError>(target.with_root(self.root.clone()))
        };
        Ok(self.servers.iter().map(target).collect::<Result<_, _>>()?)
    }

    /// The addresses of the apiservers, for messages.
    pub(super) fn addresses(&self) -> String {
        let addresses: Vec<String> = self.servers.iter().map(ServerUrl::address).collect();
        addresses.join(", ")
    }

    /// The state of the node, directly from the apiservers.
    ///
    /// # Errors
    /// No apiserver answers.
    pub(super) fn state(&self) -> Result<NodeState, String> {
        let targets = self.targets().map_err(|failure| match failure {
            Failure::Input(why) | Failure::Write(why) => why,
        })?;
        node_state(&targets, &self.name)
    }
}

/// The name of the node: that in kubelet's certificate, else `--hostname-override`, else the host name in lower case
/// (kubelet, `GetNodeName`).
pub(super) fn node_name(context: &ResolvedContext, hostname_override: Option<&str>) -> String {
    let of_certificate = || {
        let Credential::Certificate(certificate, _) = &context.credential else { return None };
        let chain = valid_certificates(&certificate.read().ok()?);
        let subject = Subject::from_der(chain.first()?).ok()?;
        subject.common_name()?.strip_prefix(USER_PREFIX).map(ToOwned::to_owned)
    };
    of_certificate().or_else(|| hostname_override.map(str::to_lowercase)).unwrap_or_else(host_name)
}
