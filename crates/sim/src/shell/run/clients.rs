//! The clients of a node: what they have, what they prove, and whether each request reached the apiservers as that.

use std::collections::HashMap;
use std::time::{Instant, UNIX_EPOCH};

use jackstay_apiserver::cluster::Cluster;

use crate::checker::{Observation, Seen};
use crate::credential::Credential;
use crate::invariants::Findings;
use crate::peers::Observer;
use crate::peers::objects::token_text;
use crate::peers::transport::Client;
use crate::shell::kernel::START;
use crate::shell::traffic;

/// The user of the certificate of a node ([`jackstay_apiserver::pki::Subject::node`]).
const NODE_USER: &str = "system:node:node";

/// A client and its credential.
pub(super) struct Holder {
    number: u16,
    node: usize,
    cluster: usize,
    credential: Credential,
    /// `None` when the client has ended.
    client: Option<Client>,
    /// How often its token was renewed.
    generation: u8,
}

impl Holder {
    /// A client of a cluster with this number on a node. The apiservers accept its token from now on, if it has one.
    pub fn new(
        (store, cluster): (&Cluster, usize),
        (node, number): (usize, u16),
        credential: Credential,
        client: Client,
    ) -> Self {
        accept(store, credential, (number, 0));
        Self { number, node, cluster, credential, client: Some(client), generation: 0 }
    }

    /// The number of its group.
    pub fn group(&self) -> u32 {
        self.credential.group(self.node)
    }

    /// The number of its cluster.
    pub fn cluster(&self) -> usize {
        self.cluster
    }

    /// The node on which it runs.
    pub fn node(&self) -> usize {
        self.node
    }

    /// The apiservers do not accept its token any more, if it is one of a service account.
    pub fn revoke(&self, cluster: &Cluster) {
        if let Some(token) = self.renewable_token() {
            cluster.remove_token(&token);
            self.client.iter().for_each(Client::token_revoked);
        }
    }

    /// When its requests were sent, by `Audit-ID`.
    pub fn sent(&self) -> Vec<(String, Instant)> {
        self.client.as_ref().map(Client::sent).unwrap_or_default()
    }

    /// The client ends, and with it its connections.
    pub fn let_go(&mut self) {
        self.client = None;
    }

    /// It has a new token of the same service account.
    pub fn renew(&mut self, cluster: &Cluster) {
        if self.renewable_token().is_some() {
            self.generation += 1;
            accept(cluster, self.credential, (self.number, self.generation));
            if let Some(token) = self.renewable_token() {
                self.client.iter().for_each(|client| client.set_token(&token));
            }
        }
    }

    fn renewable_token(&self) -> Option<String> {
        let is_renewed = matches!(self.credential, Credential::ServiceAccount(_));
        self.credential.token(self.number, self.generation).filter(|_| is_renewed)
    }

    fn user(&self) -> String {
        self.credential.user().map_or(NODE_USER.to_owned(), |user| user.name)
    }
}

/// The apiservers accept a token from now on.
fn accept(cluster: &Cluster, credential: Credential, (number, generation): (u16, u8)) {
    if let (Some(token), Some(user)) = (credential.token(number, generation), credential.user()) {
        cluster.add_token(&token, user);
    }
}

/// Adds the requests that jackstay has made for itself to the log, in which they follow everything else.
pub(super) fn log_own_requests(cluster: &Cluster, observer: &Observer) {
    for record in cluster.audit().records().into_iter().filter(|one| one.audit_id.is_none()) {
        let since = record.time.duration_since(UNIX_EPOCH + START).unwrap_or_default();
        observer.log(|| {
            let (server, path, status) = (&record.server, &record.path, record.status);
            format!("jackstay asked {server} at {since:.3?}: {path} {status:?}")
        });
    }
}

/// The client of each write, by its `Audit-ID`.
pub(super) fn writers(observations: &[Observation]) -> impl Iterator<Item = (String, u16)> {
    observations.iter().filter_map(|observation| match observation.seen {
        Seen::Write { token, .. } => Some((token_text(token), observation.client.number)),
        _ => None,
    })
}

/// Every request that has reached the apiservers of a cluster, which has this number, is one of its clients and has
/// arrived as that of its user, or was refused by 401. `writers`: those of all clusters ([`writers`]).
pub(super) fn check_users(
    (cluster, number): (&Cluster, usize),
    holders: &[Holder],
    writers: &HashMap<String, u16>,
    findings: &mut Findings,
) {
    let by_number: HashMap<u16, &Holder> = holders.iter().map(|one| (one.number, one)).collect();
    let mut known = 0;
    for record in cluster.audit().records() {
        let Some(id) = record.audit_id.as_deref() else { continue };
        let client = traffic::client_number(id).or_else(|| writers.get(id).copied());
        // A write that was open at the end is no observation of a write.
        let Some(holder) = client.and_then(|client| by_number.get(&client)) else { continue };
        if holder.cluster() != number {
            let (server, path, client) = (&record.server, &record.path, holder.number);
            findings
                .violation(format!("client {client}: {path} reached {server} of another cluster"));
            continue;
        }
        known += 1;
        let user = holder.user();
        // Without a user, it was refused (429: before it was authenticated), or its connection was lost before.
        let is_refused = record.user.is_empty() && matches!(record.status, Some(401 | 429) | None);
        if record.user != user && !is_refused {
            let (server, path, as_user) = (&record.server, &record.path, &record.user);
            let client = holder.number;
            let text = format!(
                "client {client}: {path} reached {server} as {as_user:?}, and the client is {user}"
            );
            findings.violation(text);
        }
    }
    if known == 0 && holders.iter().any(|holder| holder.cluster() == number) {
        findings.violation("no request of a client has reached an apiserver".to_owned());
    }
}
