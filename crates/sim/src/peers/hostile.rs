//! Clients that load a server on purpose. Nothing that they see is checked.

use std::time::Duration;

use tokio::task::JoinSet;

use super::peer::Peer;
use super::transport::{Outgoing, Response};
use crate::checker::Collection;

/// The time between two bursts.
const INTERVAL: Duration = Duration::from_millis(500);
/// Requests of a burst.
const BURST: u32 = 200;
/// A request is cancelled within this time, which is enough to send it.
const CANCELLED_WITHIN: Duration = Duration::from_millis(5);
/// The longest time in which a hostile client holds what it has opened.
const HELD: Duration = Duration::from_secs(30);

/// What a hostile client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hostility {
    /// It sends 200 requests at once, twice a second, and cancels a half of them.
    Burst,
    /// It opens lists and watches and reads nothing of them, so that their windows close.
    NeverReads,
    /// It sends requests and resets each of them at once (CVE-2023-44487).
    RapidReset,
    /// It opens lists on a connection from whose socket it then reads no more, and does so again and again.
    StopsReading,
}

/// Loads the server until the client is stopped.
pub async fn run(peer: Peer, collection: Collection, objects: u32, how: Hostility) {
    let mut open = JoinSet::new();
    for round in 0_u32.. {
        if !peer.pause(INTERVAL).await {
            break;
        }
        while open.try_join_next().is_some() {}
        if how == Hostility::StopsReading {
            peer.client.close_connections();
        }
        for number in 0..requests(how) {
            let target = match how {
                Hostility::Burst | Hostility::RapidReset => {
                    collection.object(&format!("o{}", fastrand::u32(0..objects.max(1))))
                }
                Hostility::NeverReads if (round + number) % 2 == 0 => {
                    format!("{}?watch=true&resourceVersion=0", collection.path())
                }
                _ => format!("{}?resourceVersion=0", collection.path()),
            };
            let is_cancelled = how == Hostility::RapidReset || number % 2 == 0;
            let is_cancelled = is_cancelled && requests(how) == BURST;
            let peer = peer.clone();
            open.spawn_local(async move {
                let request = peer.client.next_request();
                let limit =
                    if is_cancelled { CANCELLED_WITHIN.mul_f64(fastrand::f64()) } else { HELD };
                let outgoing = Outgoing::get(target);
                let load = load(&peer, request, &outgoing, how);
                tokio::select! {
                    biased;
                    () = peer.stop.stopped() => {}
                    // Dropping the request resets its stream.
                    _ = tokio::time::timeout(limit, load) => {}
                }
            });
        }
    }
    while open.join_next().await.is_some() {}
    peer.ended();
}

fn requests(how: Hostility) -> u32 {
    match how {
        Hostility::Burst | Hostility::RapidReset => BURST,
        Hostility::NeverReads | Hostility::StopsReading => 8,
    }
}

async fn load(peer: &Peer, request: u64, outgoing: &Outgoing, how: Hostility) {
    let Ok(mut response) = peer.client.open(request, outgoing).await else { return };
    match how {
        Hostility::Burst | Hostility::RapidReset => {
            while let Ok(Some(_)) = response.chunk().await {}
        }
        Hostility::NeverReads => hold(response).await,
        Hostility::StopsReading => {
            response.stop_reading();
            hold(response).await;
        }
    }
}

/// Holds a response without reading it.
async fn hold(response: Response) {
    tokio::time::sleep(HELD).await;
    drop(response);
}
