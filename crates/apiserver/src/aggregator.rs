//! Forwards requests to the aggregated server, or fails as kube-aggregator does ([`crate::aggregated`]).

use crate::aggregated::{AggregatedPath, LOST, LOST_AFTER, REFUSED, UNAVAILABLE};
use crate::state::{ScriptedResponse, ServerState};
use tokio::time::timeout;

impl ServerState {
    /// Forwards a request to the aggregated server. Returns the response of the apiserver if that fails.
    pub async fn forward_to_aggregated(&self) -> Option<ScriptedResponse> {
        if self.faults.borrow().aggregated_unavailable {
            return Some(failure(UNAVAILABLE));
        }
        let mut faults = self.faults.subscribe();
        let opened = faults.wait_for(|faults| faults.aggregated_path != AggregatedPath::Dark);
        let path = match timeout(LOST_AFTER, opened).await {
            Ok(faults) => faults.ok()?.aggregated_path,
            Err(_) => return Some(failure(LOST)),
        };
        (path == AggregatedPath::Refused).then(|| failure(REFUSED))
    }
}

fn failure(text: &'static str) -> ScriptedResponse {
    ScriptedResponse::text(503, text)
}
