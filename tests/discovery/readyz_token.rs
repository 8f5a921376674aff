//! The token with which every endpoint is asked for its `/readyz`, from a file that others write.

use crate::support::{TestCluster, until};
use jackstay::demo::apiserver::identity::User;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_token_is_lost_and_comes_back_as_another_one() {
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
    let asked = |by: &str| audit.select(|r| r.path == "/readyz" && r.user == by).len();
    until("it is asked", async || asked("prober-1") > 0).await;

    // A pipe in its place is told, and what was good is still shown.
    std::fs::remove_file(&token).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&token).status().unwrap().success());
    let complaint = "[-]token for /readyz of control-plane";
    let page = async || {
        let page = proxy.page("/readyz").await;
        page.lines().find(|line| line.starts_with(complaint)).map(str::to_owned)
    };
    let words = "probe-token: not a regular file";
    until("it is told", async || page().await.is_some_and(|line| line.contains(words))).await;
    assert!(proxy.page("/readyz").await.starts_with("HTTP/1.1 200"), "a complaint, and no more");
    assert!(proxy.page("/events").await.contains("token for /readyz"));
    let before = asked("prober-1");
    until("it is asked again", async || asked("prober-1") > before + 1).await;

    std::fs::remove_file(&token).unwrap();
    std::fs::write(&token, "probe-2\n").unwrap();
    until("the other one is shown", async || asked("prober-2") > 0).await;
    until("all is well", async || page().await.is_none()).await;
    let anybody = |r: &jackstay::demo::apiserver::audit::Record| !r.user.starts_with("prober-");
    let without = audit.select(|r| r.path == "/readyz" && anybody(r)).len();
    assert_eq!(without, 0, "nobody asked without one");
}
