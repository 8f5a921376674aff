//! A client that lists a large collection again and again: whole or in pages, and as fast as it arrives or slowly.

use std::time::{Duration, Instant};

use http::Method;

use super::{Model, Port, Reply, RequestId};
use crate::apiserver::{Resource, list_bytes};
use crate::http2::Request;
use crate::trace::Entry;

/// Time limit of a page, as client-go's informers have it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two lists.
const PAUSE: Duration = Duration::from_millis(200);
/// Objects of a page (client-go, `pager.go`, `defaultPageSize`).
const PAGE: u32 = 500;
/// What a slow client reads in [`SLOW_PAUSE`]: 4 MB a second.
const SLOW_BYTES: u32 = 200_000;
const SLOW_PAUSE: Duration = Duration::from_millis(50);

/// What a timer is for.
const BEGIN: u32 = 0;
const READ: u32 = 1;

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

/// Lists a large collection.
#[derive(Debug)]
pub struct BulkReader {
    mode: BulkMode,
    page: Option<RequestId>,
    /// The status of the page, and the first key of the next one.
    head: (u16, u32),
    began: Instant,
    bytes: u32,
    unread: u32,
}

impl BulkReader {
    /// A client that begins at `now`.
    pub fn new(mode: BulkMode, now: Instant) -> Self {
        Self { mode, page: None, head: (0, 0), began: now, bytes: 0, unread: 0 }
    }

    fn request_page(&mut self, port: &mut Port<'_>, first: u32) {
        let path = Resource::Secrets.path();
        let target = match (self.mode, first) {
            (BulkMode::Pages, 0) => format!("{path}?limit={PAGE}"),
            (BulkMode::Pages, first) => format!("{path}?limit={PAGE}&continue={first}"),
            _ => format!("{path}?resourceVersion=0"),
        };
        self.page = Some(port.submit(Request::new(Method::GET, &target, None), Some(TIMEOUT)));
    }

    fn page_ended(&mut self, port: &mut Port<'_>) {
        match self.head {
            (200, 0) => {
                let complete = list_bytes(port.store.objects(Resource::Secrets).count());
                if self.bytes != complete {
                    let (client, bytes) = (port.client, self.bytes);
                    let text = format!("client {client}: a list of {complete} bytes had {bytes}");
                    port.findings.violation(text);
                }
                self.list_ended(port, true);
            }
            (200, first) => self.request_page(port, first),
            _ => self.list_ended(port, false),
        }
    }

    fn list_ended(&mut self, port: &mut Port<'_>, ok: bool) {
        self.page = None;
        port.findings.list(ok, port.s.now - self.began);
        port.act_after(PAUSE, BEGIN);
    }
}

impl Model for BulkReader {
    fn start(&mut self, port: &mut Port<'_>) {
        if self.mode == BulkMode::Slow {
            port.transport.reads_at_once = false;
            port.act_after(SLOW_PAUSE, READ);
        }
        let first = port.s.random_part(PAUSE);
        port.act_after(first, BEGIN);
    }

    fn act(&mut self, port: &mut Port<'_>, what: u32) {
        if what == BEGIN {
            (self.began, self.bytes, self.unread) = (port.s.now, 0, 0);
            return self.request_page(port, 0);
        }
        if let Some(page) = self.page {
            let bytes = self.unread.min(SLOW_BYTES);
            self.unread -= bytes;
            port.transport.read(port.s, port.net, page, bytes);
        }
        port.act_after(SLOW_PAUSE, READ);
    }

    fn replied(&mut self, port: &mut Port<'_>, request: RequestId, reply: Reply) {
        if self.page != Some(request) {
            return;
        }
        match reply {
            Reply::Head(head) => self.head = (head.status, head.next),
            Reply::Data(data) => {
                self.bytes += data.len();
                self.unread += data.len();
            }
            Reply::End => {
                let status = self.head.0;
                port.s.record(Entry::Reply { client: port.client, request, status });
                self.page_ended(port);
            }
            Reply::Failed(failure) => {
                let reason = failure.as_str();
                port.s.record(Entry::Failed { client: port.client, request, reason });
                self.list_ended(port, false);
            }
        }
    }

    fn timed_out(&mut self, port: &mut Port<'_>, request: RequestId) {
        if self.page == Some(request) {
            port.s.record(Entry::Failed { client: port.client, request, reason: "timeout" });
            self.list_ended(port, false);
        }
    }

    fn finish(&mut self, port: &mut Port<'_>) {
        if self.page.is_some() {
            port.findings.list_open(port.s.now - self.began);
        }
    }
}
