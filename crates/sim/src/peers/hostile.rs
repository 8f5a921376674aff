//! A client that loads a server on purpose: 200 requests at once, twice a second, of which half are cancelled. Nothing
//! that it sees is checked.

use std::time::Duration;

use tokio::task::JoinSet;

use super::peer::Peer;
use super::transport::Outgoing;
use crate::checker::Collection;

/// The time between two bursts.
const INTERVAL: Duration = Duration::from_millis(500);
/// Requests of a burst.
const BURST: u32 = 200;
/// A request is cancelled within this time, which is enough to send it.
const CANCELLED_WITHIN: Duration = Duration::from_millis(5);
/// The time limit of requests that are not cancelled.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Loads the server until the client is stopped.
pub async fn run(peer: Peer, collection: Collection, objects: u32) {
    let mut open = JoinSet::new();
    while peer.pause(INTERVAL).await {
        while open.try_join_next().is_some() {}
        for number in 0..BURST {
            let object = format!("o{}", fastrand::u32(0..objects.max(1)));
            let outgoing = Outgoing::get(collection.object(&object));
            let is_cancelled = number % 2 == 0;
            let limit =
                if is_cancelled { CANCELLED_WITHIN.mul_f64(fastrand::f64()) } else { TIMEOUT };
            let peer = peer.clone();
            open.spawn_local(async move {
                tokio::select! {
                    biased;
                    () = peer.stop.stopped() => {}
                    // Dropping the request resets its stream.
                    _ = tokio::time::timeout(limit, load(&peer, &outgoing)) => {}
                }
            });
        }
    }
    while open.join_next().await.is_some() {}
    peer.ended();
}

async fn load(peer: &Peer, outgoing: &Outgoing) {
    let request = peer.client.next_request();
    let Ok(mut response) = peer.client.open(request, outgoing).await else { return };
    while let Ok(Some(_)) = response.chunk().await {}
}
