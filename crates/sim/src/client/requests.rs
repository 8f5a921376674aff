//! Clients that send one request after another: reads, writes, and bursts of a hostile one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use http::Method;

use super::{Model, Port, Reply, RequestId};
use crate::apiserver::Resource;
use crate::http2::{Request, Write};
use crate::trace::Entry;

/// How long a client waits for its response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Requests that wait for their responses: when each was sent, and its status.
type Pending = BTreeMap<RequestId, (Instant, u16)>;

/// Reads an object, or now and then a list, at an interval.
#[derive(Debug)]
pub struct Reader {
    interval: Duration,
    /// The resource of which a list is read in place of an object, at every eighth request.
    lists: Option<Resource>,
    sent: u32,
    pending: Pending,
}

impl Reader {
    /// A reader.
    pub fn new(interval: Duration) -> Self {
        Self { interval, lists: Some(Resource::ConfigMaps), sent: 0, pending: Pending::new() }
    }
}

impl Model for Reader {
    fn start(&mut self, port: &mut Port<'_>) {
        let first = port.s.random_part(self.interval);
        port.act_after(first, 0);
    }

    fn act(&mut self, port: &mut Port<'_>, _: u32) {
        self.sent += 1;
        let target = match self.lists {
            Some(resource) if self.sent.is_multiple_of(8) => {
                format!("{}?resourceVersion=0", resource.path())
            }
            _ => Resource::Pods.object(port.s.rng.u32(0..crate::world::PODS)),
        };
        let request = port.submit(Request::new(Method::GET, &target, None), Some(TIMEOUT));
        self.pending.insert(request, (port.s.now, 0));
        port.act_after(self.interval, 0);
    }

    fn replied(&mut self, port: &mut Port<'_>, request: RequestId, reply: Reply) {
        if let Some((status, took)) = ended(&mut self.pending, port, request, &reply) {
            port.findings.read(status == Some(200), took);
        }
    }

    fn timed_out(&mut self, port: &mut Port<'_>, request: RequestId) {
        if let Some(took) = timed_out(&mut self.pending, port, request) {
            port.findings.read(false, took);
        }
    }

    fn finish(&mut self, port: &mut Port<'_>) {
        for (sent, _) in std::mem::take(&mut self.pending).into_values() {
            port.findings.read_open(port.s.now - sent);
        }
    }
}

/// Follows the reply to a pending request. Returns the status of one that has ended, `None` if it failed, and how long it
/// took.
fn ended(
    pending: &mut Pending,
    port: &mut Port<'_>,
    request: RequestId,
    reply: &Reply,
) -> Option<(Option<u16>, Duration)> {
    let (sent, status) = pending.get_mut(&request)?;
    let took = port.s.now - *sent;
    let (client, status) = match reply {
        Reply::Head(head) => {
            *status = head.status;
            return None;
        }
        Reply::Data(_) => return None,
        Reply::End => (port.client, Ok(*status)),
        Reply::Failed(failure) => (port.client, Err(failure.as_str())),
    };
    pending.remove(&request);
    port.s.record(match status {
        Ok(status) => Entry::Reply { client, request, status },
        Err(reason) => Entry::Failed { client, request, reason },
    });
    Some((status.ok(), took))
}

/// Ends a pending request that took too long. Returns how long it took.
fn timed_out(pending: &mut Pending, port: &mut Port<'_>, request: RequestId) -> Option<Duration> {
    let (sent, _) = pending.remove(&request)?;
    port.s.record(Entry::Failed { client: port.client, request, reason: "timeout" });
    Some(port.s.now - sent)
}

/// Writes an object at an interval, whatever version it has. It never repeats a write.
#[derive(Debug)]
pub struct Writer {
    interval: Duration,
    sent: u32,
    pending: Pending,
}

impl Writer {
    /// A writer.
    pub fn new(interval: Duration) -> Self {
        Self { interval, sent: 0, pending: Pending::new() }
    }
}

impl Model for Writer {
    fn start(&mut self, port: &mut Port<'_>) {
        let first = port.s.random_part(self.interval);
        port.act_after(first, 0);
    }

    fn act(&mut self, port: &mut Port<'_>, _: u32) {
        self.sent += 1;
        let token = port.token();
        // One in eight creates or deletes an object that only this client writes.
        let own = crate::world::CONFIG_MAPS + u32::from(port.client);
        let (method, key) = match self.sent % 16 {
            0 => (Method::DELETE, own),
            8 => (Method::POST, own),
            _ => (Method::PUT, port.s.rng.u32(0..crate::world::CONFIG_MAPS)),
        };
        let target = Resource::ConfigMaps.object(key);
        let write = Some(Write { token, replaces: None });
        let request = port.submit(Request::new(method, &target, write), Some(TIMEOUT));
        self.pending.insert(request, (port.s.now, 0));
        port.act_after(self.interval, 0);
    }

    fn replied(&mut self, port: &mut Port<'_>, request: RequestId, reply: Reply) {
        if let Some((status, took)) = ended(&mut self.pending, port, request, &reply) {
            // Its own object may be missing or present, because an earlier write has failed.
            port.findings.write(matches!(status, Some(200 | 201 | 404 | 409)), took);
        }
    }

    fn timed_out(&mut self, port: &mut Port<'_>, request: RequestId) {
        if let Some(took) = timed_out(&mut self.pending, port, request) {
            port.findings.write(false, took);
        }
    }
}

/// A hostile client: it opens many requests at once and cancels a half of them.
#[derive(Debug)]
pub struct Burst {
    interval: Duration,
    size: u32,
    open: Vec<RequestId>,
}

impl Burst {
    /// A client that sends `size` requests at each `interval`.
    pub fn new(interval: Duration, size: u32) -> Self {
        Self { interval, size, open: Vec::new() }
    }
}

impl Model for Burst {
    fn start(&mut self, port: &mut Port<'_>) {
        port.act_after(self.interval, 0);
    }

    fn act(&mut self, port: &mut Port<'_>, what: u32) {
        if what == 1 {
            for request in std::mem::take(&mut self.open).into_iter().step_by(2) {
                port.transport.cancel(port.s, port.net, request);
            }
            return;
        }
        for _ in 0..self.size {
            let target = Resource::Pods.object(port.s.rng.u32(0..crate::world::PODS));
            let request = port.submit(Request::new(Method::GET, &target, None), None);
            self.open.push(request);
        }
        let soon = port.s.random_part(Duration::from_millis(5));
        port.act_after(soon, 1);
        port.act_after(self.interval, 0);
    }

    fn replied(&mut self, _: &mut Port<'_>, _: RequestId, _: Reply) {}

    fn timed_out(&mut self, _: &mut Port<'_>, _: RequestId) {}
}
