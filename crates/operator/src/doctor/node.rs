//! Requests the state of a node: whether it is Ready, and when its kubelet renewed the lease.

use std::fmt;
use std::time::{Duration, SystemTime};

use jackstay_sys::clock;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::timeout;

use super::dns::Resolver;
use super::observations::Resolution;
use super::probe::{StepTimer, get, open};
use super::target::Target;

/// Limit for each apiserver.
const LIMIT: Duration = Duration::from_secs(5);

/// The state of a node as the apiserver has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// Whether the condition `Ready` is true.
    pub ready: bool,
    /// The message of that condition.
    pub message: String,
    /// `renewTime` of its lease; kubelet sets it by the clock of the node.
    pub lease_renewed: Option<SystemTime>,
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ready = if self.ready { "Ready" } else { "not Ready" };
        write!(f, "{ready} ({})", self.message)
    }
}

/// Requests the state of a node from the first of the endpoints that answers.
///
/// # Errors
/// The reason of the last endpoint.
pub fn node_state(targets: &[Target], node: &str) -> Result<NodeState, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    LocalSet::new().block_on(&runtime, async {
        let resolver = Mutex::new(Resolver::of_system());
        let mut reason = "there is no endpoint".to_owned();
        for target in targets {
            let request = request(target, node, &resolver);
            match timeout(LIMIT, request).await {
                Ok(Ok(state)) => return Ok(state),
                Ok(Err(why)) => reason = format!("{}: {why}", target.address),
                Err(_) => reason = format!("{}: no answer within {LIMIT:?}", target.address),
            }
        }
        Err(reason)
    })
}

async fn request(
    target: &Target,
    node: &str,
    resolver: &Mutex<Resolver>,
) -> Result<NodeState, String> {
    let ips = match resolver.lock().await.resolve(&target.host).await {
        Resolution::Addresses(ips) => ips,
        Resolution::NoSuchName => return Err("no such name".to_owned()),
        Resolution::NoAnswer(why) => return Err(why),
    };
    let mut opened = Err("the name has no address".to_owned());
    for ip in ips {
        let address = target.socket_address(ip);
        let attempt = open(&mut StepTimer::start(clock::now()), address, &target.peer).await;
        opened = attempt.map_err(|failure| failure.text);
        if opened.is_ok() {
            break;
        }
    }
    let mut opened = opened?;
    let mut read = async |path: String| {
        let response = get(&mut opened.send, &path, &target.peer).await;
        let (status, body, _) = response.map_err(|error| error.to_string())?;
        if !status.is_success() {
            return Err(format!("{path} is answered with {status}"));
        }
        serde_json::from_str::<Value>(&body).map_err(|error| format!("{path}: {error}"))
    };
    let object = read(format!("/api/v1/nodes/{node}")).await?;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    let lease = read(format!("{leases}/{node}")).await.ok();
    Ok(state_of(&object, lease.as_ref()))
}

/// Reads a Node and its Lease.
fn state_of(node: &Value, lease: Option<&Value>) -> NodeState {
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready");
    let renewed = lease.and_then(|lease| lease["spec"]["renewTime"].as_str());
    let renewed = renewed.and_then(|text| text.parse::<Timestamp>().ok());
    NodeState {
        ready: ready.is_some_and(|condition| condition["status"] == "True"),
        message: ready
            .and_then(|condition| condition["message"].as_str())
            .unwrap_or("it has no condition Ready")
            .to_owned(),
        lease_renewed: renewed.map(SystemTime::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn state_of_reads_condition_and_lease() {
        let node = |status: &str| {
            json!({"status": {"conditions": [
                {"type": "DiskPressure", "status": "True", "message": "m"},
                {"type": "Ready", "status": status, "message": "kubelet is posting ready status"}]}})
        };
        let lease = json!({"spec": {"renewTime": "1970-01-01T00:00:10.500000Z"}});
        let state = state_of(&node("True"), Some(&lease));
        assert!(state.ready);
        let since_epoch = state.lease_renewed.unwrap().duration_since(SystemTime::UNIX_EPOCH);
        assert_eq!(since_epoch.unwrap(), Duration::from_millis(10_500));
        for status in ["False", "Unknown"] {
            assert!(!state_of(&node(status), None).ready);
        }
        let empty = state_of(&json!({}), Some(&json!({"spec": {"renewTime": "?"}})));
        assert_eq!(empty.to_string(), "not Ready (it has no condition Ready)");
        assert_eq!(empty.lease_renewed, None);
    }
}
