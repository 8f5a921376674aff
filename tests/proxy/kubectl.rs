//! Runs kubectl against the demo apiserver through jackstay: the common commands, and exec, attach and cp over
//! WebSocket. `KUBECTL` names the program (default: `kubectl`), which must be version 1.31 or newer.

use crate::support::TestCluster;
use jackstay_apiserver::pki;
use serde_json::json;
use std::process::Command;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs kubectl"]
async fn kubectl_commands_work_through_jackstay() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("https://{}", proxy.addr);
    let certs = &cluster.certs;
    let config = pki::kubeconfig(&url, &certs.pki.ca_pem(), Some(&certs.admin), None);
    std::fs::write(dir.path().join("config"), config).unwrap();
    let kubectl = std::env::var("KUBECTL").unwrap_or_else(|_| "kubectl".to_owned());
    // Returns stdout and stderr of a shell script in which `$k` is kubectl, and then `exit=` with the exit
    // status.
    let run_script = |script: &str| -> String {
        let output = Command::new("sh")
            .args(["-c", &format!("({script}) 2>&1; echo \"exit=$?\"")])
            .env("KUBECONFIG", dir.path().join("config"))
            .env("HOME", dir.path())
            .env("k", &kubectl)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        println!("$ {script}\n{text}");
        text
    };
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p", "labels": { "app": "p" } },
        "spec": { "containers": [{ "name": "c", "image": "i" }] },
    });
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } });
    std::fs::write(dir.path().join("pod.json"), pod.to_string()).unwrap();
    std::fs::write(dir.path().join("node.json"), node.to_string()).unwrap();
    // Later scripts depend on the objects that earlier ones have created.
    let mut failures = Vec::new();
    for (script, expected) in [
        ("$k version", "Server Version: v1.33.0-demo"),
        ("$k api-resources", "leases"),
        ("$k create cm a --from-literal=x=1", "configmap/a created"),
        ("$k create cm a --from-literal=x=1", "already exists"),
        ("$k get cm", "a      1"),
        ("$k get cm -A -o name", "configmap/a"),
        ("$k get cm a -o jsonpath='{.data.x}'", "1exit=0"),
        ("$k patch cm a -p '{\"data\":{\"y\":\"2\"}}'", "configmap/a patched"),
        ("$k patch cm a --type=json -p '[{\"op\":\"remove\",\"path\":\"/data/x\"}]'", "patched"),
        ("$k label cm a l=1", "configmap/a labeled"),
        ("$k get cm -l l=1", "a "),
        ("$k apply -f $HOME/pod.json", "pod/p created"),
        ("$k apply -f $HOME/pod.json", "pod/p unchanged"),
        ("sed -i s/p\\\"}/q\\\"}/ $HOME/pod.json; $k apply -f $HOME/pod.json", "pod/p configured"),
        ("$k apply --server-side -f $HOME/node.json", "node/n1 serverside-applied"),
        ("$k apply --dry-run=server -f $HOME/pod.json", "pod/p unchanged (server dry run)"),
        ("$k diff -f $HOME/pod.json", "exit=0"),
        ("$k get pods", "p      1/1     Running   0"),
        ("$k get pods -o wide", "p "),
        ("$k get nodes,ns", "node/n1"),
        ("$k get events", "No resources found"),
        ("$k get leases -A", "No resources found"),
        (
            "$k create sa s; $k create secret generic t --from-literal=a=b; $k get secrets,sa",
            "Opaque",
        ),
        ("$k describe pod p", "Running"),
        ("$k explain pod", "any fields"),
        ("$k auth whoami", "kubernetes-admin"),
        ("$k auth can-i get pods", "yes"),
        ("$k logs p", "line 3 of default/p\nexit=0"),
        ("timeout 6 $k logs -f p --tail=1", "line 4 of default/p"),
        ("$k exec p -- echo hello", "hello\nexit=0"),
        ("echo stdin | $k exec -i p -- cat", "stdin\nexit=0"),
        ("head -c 300000 /dev/zero | $k exec -i p -- cat | wc -c", "300000"),
        ("$k exec p -- sh -c 'exit 3'", "exit=3"),
        ("echo over | $k attach -i p", "over"),
        ("$k cp $HOME/pod.json p:/tmp/x", "exit=0"),
        (
            "timeout 3 $k get cm a -w & sleep 1; $k annotate cm a n=1; $k get -w cm --watch-only --request-timeout=1s; wait",
            "configmap/a annotated",
        ),
        ("timeout 5 $k get pods -w -o name", "pod/p"),
        ("$k wait --for=condition=Ready pod/p --timeout=3s", "condition met"),
        ("$k delete pod p --timeout=5s", "pod \"p\" deleted"),
        ("$k delete cm --all", "configmap \"a\" deleted"),
        ("$k get pod p", "(NotFound)"),
        ("$k create ns x; $k delete ns x --timeout=5s", "namespace \"x\" deleted"),
        ("$k get --raw /readyz", "okexit=0"),
    ] {
        if !run_script(script).contains(expected) {
            failures.push(format!("{script}: no {expected:?} in the output"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    // The demo apiserver implements exec and attach over WebSocket only (SPDY sessions echo their
    // input), so the output above proves that kubectl used WebSocket.
    let metrics = proxy.page("/metrics").await;
    let upgraded = metrics
        .lines()
        .filter(|line| {
            line.starts_with("jackstay_requests_total{") && line.contains("code=\"101\"")
        })
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum::<f64>();
    println!("{upgraded} upgraded connections");
    assert!(upgraded >= 6.0, "{upgraded} upgraded connections");
}
