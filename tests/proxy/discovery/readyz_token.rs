//! The token for `/readyz` probes is read from a file that other programs replace.

use jackstay_apiserver::identity::User;

use crate::support::{TestCluster, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn readyz_token_is_kept_while_its_file_is_invalid_and_replaced_afterwards() {
    let cluster = TestCluster::new(1);
    let (token, audit) = (cluster.certs.path().join("probe-token"), cluster.state.audit());
    cluster.state.add_token("probe-1", User::new("prober-1", &[]));
    cluster.state.add_token("probe-2", User::new("prober-2", &[]));
    std::fs::write(&token, "probe-1\n").unwrap();
    let mut config = cluster.config();
    let readyz = &mut config.upstreams[0].health.readyz;
    (readyz.cert, readyz.token_file) = (None, Some(token.clone()));
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(1).await;
    let probes = |user: &str| audit.select(|r| r.path == "/readyz" && r.user == user).len();
    until("/readyz is probed", async || probes("prober-1") > 0).await;

    // A pipe in place of the file is reported, and the old token stays in use.
    std::fs::remove_file(&token).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&token).status().unwrap().success());
    let warning = "[-]token for /readyz of control-plane";
    let warning_line = async || {
        let page = proxy.page("/readyz").await;
        page.lines().find(|line| line.starts_with(warning)).map(str::to_owned)
    };
    let error = "probe-token: not a regular file";
    let is_reported = async || warning_line().await.is_some_and(|line| line.contains(error));
    until("the pipe is reported", is_reported).await;
    assert!(proxy.page("/readyz").await.starts_with("HTTP/1.1 200"), "jackstay stays ready");
    assert!(proxy.page("/events").await.contains("token for /readyz"));
    let before = probes("prober-1");
    until("/readyz is probed again", async || probes("prober-1") > before + 1).await;

    std::fs::remove_file(&token).unwrap();
    std::fs::write(&token, "probe-2\n").unwrap();
    until("the new token is used", async || probes("prober-2") > 0).await;
    until("the warning is gone", async || warning_line().await.is_none()).await;
    let without_token =
        audit.select(|r| r.path == "/readyz" && !r.user.starts_with("prober-")).len();
    assert_eq!(without_token, 0, "each probe has a token");
}
