//! Lists a large collection again and again: whole or in pages, and as fast as it arrives or slowly.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_ENCODING;

use super::objects::{List, parse};
use super::peer::{EndedRequest, Peer};
use super::transport::{Answer, Failure, Outgoing};
use crate::checker::{Collection, Moment, Recency, Seen};
use jackstay_sys::clock;

/// Time limit of a page, as client-go's informers have it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two lists.
const PAUSE: Duration = Duration::from_millis(500);
/// Objects of a page (client-go, `pager.go`, `defaultPageSize`).
const PAGE: u32 = 500;
/// What a slow client reads in [`SLOW_PAUSE`]: 4 MB a second.
const SLOW_BYTES: usize = 200_000;
const SLOW_PAUSE: Duration = Duration::from_millis(50);

/// How a client lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BulkMode {
    /// In pages.
    Pages,
    /// In one response.
    Whole,
    /// In one response, which is read slowly.
    Slow,
}

/// Lists until the client is stopped.
pub async fn run(peer: Peer, collection: Collection, mode: BulkMode) {
    let mut goes_on = peer.pause_part(PAUSE).await;
    while goes_on {
        let began = peer.observer.moment();
        let result = tokio::select! {
            biased;
            () = peer.stop.stopped() => None,
            result = list(&peer, collection, mode, began) => Some(result),
        };
        let took = clock::now() - began.at;
        match result {
            None => {
                peer.observer.findings().list_open(took);
                break;
            }
            Some(result) => peer.observer.findings().list(result.is_ok(), took),
        }
        goes_on = peer.pause(PAUSE).await;
    }
    peer.ended();
}

async fn list(
    peer: &Peer,
    collection: Collection,
    mode: BulkMode,
    began: Moment,
) -> Result<(), ()> {
    let (path, recency) = (collection.path(), Recency::Any);
    let (mut target, recency) = match mode {
        BulkMode::Pages => (format!("{path}?limit={PAGE}"), Recency::MostRecent),
        _ => (format!("{path}?resourceVersion=0"), recency),
    };
    let mut objects = Vec::new();
    loop {
        let request = peer.client.next_request();
        let outgoing = Outgoing::get(target);
        let read = read(peer, request, &outgoing, mode == BulkMode::Slow);
        let answer = tokio::time::timeout(TIMEOUT, read).await.unwrap_or(Err(Failure::Timeout));
        peer.log(|| match &answer {
            Ok(answer) => format!("request {request}: page: {}", answer.status),
            Err(failure) => format!("request {request}: page: {}", failure.as_str()),
        });
        if let Err(Failure::Undecodable) = answer {
            peer.violation(request, "an undecodable list");
        }
        let body = answer.ok().filter(|answer| answer.status == 200).ok_or(())?.body;
        let Some((list, version)) = whole(&body) else {
            peer.violation(request, "a list with parts of another response");
            return Err(());
        };
        let items = list.items.iter().map(|item| &item.metadata);
        objects.extend(items.filter_map(|item| Some((item.key(), item.version()?))));
        if list.metadata.r#continue.is_empty() {
            let ended =
                EndedRequest { request, began, ended: peer.observer.moment(), answer: None };
            peer.saw(collection, &ended, Seen::List { recency, version, objects });
            return Ok(());
        }
        target = format!("{path}?limit={PAGE}&continue={}", list.metadata.r#continue);
    }
}

fn whole(body: &Bytes) -> Option<(List, u64)> {
    let list: List = parse(body)?;
    let version = list.metadata.version()?;
    Some((list, version))
}

/// Reads a whole response, slowly if it says so: the window of the stream grows by what was read.
async fn read(
    peer: &Peer,
    request: u64,
    outgoing: &Outgoing,
    is_slow: bool,
) -> Result<Answer, Failure> {
    let mut response = peer.client.open(request, outgoing).await?;
    let is_compressed = response.head.headers.contains_key(CONTENT_ENCODING);
    peer.observer.findings().compressed_lists += u64::from(is_compressed);
    let mut body = BytesMut::new();
    let mut unpaid = 0;
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        unpaid += chunk.len();
        while is_slow && unpaid >= SLOW_BYTES {
            unpaid -= SLOW_BYTES;
            tokio::time::sleep(SLOW_PAUSE).await;
        }
    }
    Ok(Answer { status: response.head.status.as_u16(), body: body.freeze() })
}
