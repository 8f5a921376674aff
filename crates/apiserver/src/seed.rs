//! Initial objects of a demo cluster.

use crate::cluster::Cluster;
use crate::kinds::{CONFIG_MAPS, Kind, LEASES, NODES, PODS};
use crate::status_error::StatusError;
use serde_json::{Value, json};

/// Names of the nodes; each has a Lease of the same name.
pub const NODE_NAMES: [&str; 3] = ["node-1", "node-2", "node-3"];
/// The pod that the demo changes every 2 s.
pub const POD: &str = "web-0";

/// Creates the initial objects in a new cluster.
///
/// # Errors
/// An object already exists.
pub fn fill(cluster: &Cluster) -> Result<(), StatusError> {
    let create = |kind: &'static Kind, namespace: &str, object: Value| {
        cluster.create(kind, namespace, object, false).map(drop)
    };
    for node in NODE_NAMES {
        create(
            &NODES,
            "",
            json!({
                "metadata": { "name": node, "labels": { "kubernetes.io/hostname": node } },
                "status": {
                    "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }],
                    "nodeInfo": { "kubeletVersion": "v1.34.0" },
                },
            }),
        )?;
        create(
            &LEASES,
            "kube-node-lease",
            json!({
                "metadata": { "name": node },
                "spec": { "holderIdentity": node, "leaseDurationSeconds": 40 },
            }),
        )?;
    }
    for (pod, node) in [POD, "web-1", "web-2", "db-0"].iter().zip(NODE_NAMES.iter().cycle()) {
        let app = pod.split('-').next().unwrap_or(pod);
        create(
            &PODS,
            "default",
            json!({
                "metadata": { "name": pod, "labels": { "app": app } },
                "spec": {
                    "nodeName": node,
                    "containers": [{ "name": app, "image": format!("{app}:1") }],
                },
                "status": {
                    "phase": "Running",
                    "containerStatuses": [{ "name": app, "ready": true, "restartCount": 0 }],
                },
            }),
        )?;
    }
    for name in ["busy", "quiet"] {
        create(
            &CONFIG_MAPS,
            "default",
            json!({
                "metadata": { "name": name, "labels": { "demo": name } },
                "data": { "n": "0" },
            }),
        )?;
    }
    Ok(())
}
