//! A reflector of client-go: it lists, watches from there, and compares what it sees with the store.
//!
//! After a clean end it watches again from its version; after a reset, an ERROR or a response of 410 it lists again
//! (client-go, `reflector.go`). The pause between two attempts is 800 ms and doubles up to 30 s.

use std::time::Duration;

use http::Method;

use super::{Failure, Model, Port, Reply, RequestId};
use crate::apiserver::Resource;
use crate::http2::{Data, Request};
use crate::trace::Entry;

const FIRST_PAUSE: Duration = Duration::from_millis(800);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Time limit of a list.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Listing(RequestId),
    Watching(RequestId),
}

/// An informer.
#[derive(Debug)]
pub struct Informer {
    resource: Resource,
    state: State,
    status: u16,
    /// The version of the list or of the last event.
    version: u64,
    listed: bool,
    must_list: bool,
    failures: u32,
}

impl Informer {
    /// An informer of a resource.
    pub fn new(resource: Resource) -> Self {
        Self {
            resource,
            state: State::Idle,
            status: 0,
            version: 0,
            listed: false,
            must_list: true,
            failures: 0,
        }
    }

    fn begin(&mut self, port: &mut Port<'_>) {
        self.status = 0;
        if self.must_list {
            if self.listed {
                port.s.record(Entry::Relist { client: port.client });
                port.findings.relists += 1;
            }
            let target = format!("{}?resourceVersion={}", self.resource.path(), self.version);
            let request = port.submit(Request::new(Method::GET, &target, None), Some(LIST_TIMEOUT));
            self.state = State::Listing(request);
        } else {
            let seconds = 300 + port.s.rng.u32(0..300);
            let target = format!(
                "{}?watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={seconds}",
                self.resource.path(),
                self.version
            );
            let request = port.submit(Request::new(Method::GET, &target, None), None);
            self.state = State::Watching(request);
        }
    }

    fn pause(&mut self, port: &mut Port<'_>) {
        self.state = State::Idle;
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(MAX_PAUSE);
        self.failures += 1;
        let jitter = port.s.random_part(pause);
        port.act_after(pause + jitter, 0);
    }

    fn list_again(&mut self, port: &mut Port<'_>) {
        self.must_list = true;
        self.pause(port);
    }

    /// An event or a bookmark.
    fn line(&mut self, port: &mut Port<'_>, line: &[u8]) {
        let Some((kind, version)) = parse(line) else {
            return port.findings.violation(format!("client {}: unreadable event", port.client));
        };
        let next = port.store.next_revision(self.resource, self.version);
        match kind {
            b'E' => self.list_again(port),
            b'B' => {
                if next.is_some_and(|next| next <= version) {
                    port.findings.violation(format!(
                        "client {}: bookmark {version} came before event {next:?}",
                        port.client
                    ));
                }
                self.version = self.version.max(version);
            }
            _ => {
                if next != Some(version) {
                    port.findings.violation(format!(
                        "client {}: event {version} came after {}, and the store has {next:?}",
                        port.client, self.version
                    ));
                }
                self.version = version;
                self.failures = 0;
                port.s.record(Entry::Delivered { client: port.client, revision: version });
                if let Some(change) = port.store.change(version) {
                    port.findings.event(port.s.now - change.at);
                }
            }
        }
    }
}

/// The first letter of an event's type, and its version.
fn parse(line: &[u8]) -> Option<(u8, u64)> {
    const TYPE: &[u8] = b"{\"type\":\"";
    const VERSION: &[u8] = b"\"resourceVersion\":\"";
    let kind = *line.strip_prefix(TYPE)?.first()?;
    if kind == b'E' {
        return Some((kind, 0));
    }
    let at = line.windows(VERSION.len()).rposition(|window| window == VERSION)? + VERSION.len();
    let digits = line[at..].iter().take_while(|byte| byte.is_ascii_digit());
    let version = digits.fold(0, |version, digit| version * 10 + u64::from(digit - b'0'));
    line.ends_with(b"}\n").then_some((kind, version))
}

impl Model for Informer {
    fn start(&mut self, port: &mut Port<'_>) {
        let first = port.s.random_part(Duration::from_millis(500));
        port.act_after(first, 0);
    }

    fn act(&mut self, port: &mut Port<'_>, _: u32) {
        if self.state == State::Idle {
            self.begin(port);
        }
    }

    fn replied(&mut self, port: &mut Port<'_>, request: RequestId, reply: Reply) {
        let is_watch = self.state == State::Watching(request);
        if !is_watch && self.state != State::Listing(request) {
            return;
        }
        match reply {
            Reply::Head(head) => {
                self.status = head.status;
                if head.status == 200 && !is_watch {
                    self.version = head.version;
                }
            }
            Reply::Data(Data::Frames(bytes)) if is_watch && self.status == 200 => {
                for line in bytes.split_inclusive(|&byte| byte == b'\n') {
                    if self.state == State::Watching(request) {
                        self.line(port, line);
                    }
                }
            }
            Reply::Data(_) => {}
            Reply::End => {
                port.s.record(Entry::Reply { client: port.client, request, status: self.status });
                match (is_watch, self.status) {
                    (false, 200) => {
                        (self.listed, self.must_list, self.failures) = (true, false, 0);
                        self.begin(port);
                    }
                    (true, 200) => {
                        port.findings.watches_ended += 1;
                        self.state = State::Idle;
                        let pause = port.s.random_part(Duration::from_millis(10));
                        port.act_after(pause, 0);
                    }
                    (true, 429) => self.pause(port),
                    _ => self.list_again(port),
                }
            }
            Reply::Failed(failure) => {
                port.s.record(Entry::Failed {
                    client: port.client,
                    request,
                    reason: failure.as_str(),
                });
                if is_watch {
                    port.findings.watches_broken += 1;
                }
                if failure == Failure::Reset {
                    self.list_again(port);
                } else {
                    self.pause(port);
                }
            }
        }
    }

    fn timed_out(&mut self, port: &mut Port<'_>, request: RequestId) {
        if self.state == State::Listing(request) {
            self.list_again(port);
        }
    }

    fn finish(&mut self, port: &mut Port<'_>) {
        if let Some(next) = port.store.next_revision(self.resource, self.version)
            && let Some(change) = port.store.change(next)
        {
            port.findings.event_open(port.s.now - change.at);
        }
    }
}
