//! Bytes through a passthrough listener: both ways, half-closed, broken, refused.

use crate::support::{MAPS, World, passing};

#[tokio::test]
async fn a_client_verifies_the_apiserver_itself_and_is_who_it_was() {
    let world = World::new(2);
    let proxy = world.certs.start(passing(world.config()));
    proxy.usable(2).await;
    let client = proxy.client(&world.certs.credentials()).await;
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);
    let status = proxy.status().await;
    assert_eq!(status["listeners"][0]["mode"], "passthrough");
    assert_eq!(status["listeners"][0]["flows"], 1);
    let nobody = proxy.client(&world.certs.nobody()).await;
    assert_eq!(nobody.get(MAPS).await.unwrap().status, 403);
    assert!(proxy.metric("jackstay_passthrough_bytes_total").await > 1000.0);
}
