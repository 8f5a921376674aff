//! The holder of a lease: kubelet's heartbeat, and leader election.
//!
//! kubelet renews its lease every 10 s with a timeout of 10 s. A failed update is repeated at once, up to five times,
//! and at the second failure in a row kubelet closes its connections (component-helpers, `apimachinery/lease`,
//! `controller.go`). Leader election tries every 2 s, and gives up 10 s after the last success (client-go,
//! `leaderelection`).

use std::time::{Duration, Instant};

use http::Method;

use super::{Model, Port, Reply, RequestId};
use crate::apiserver::Resource;
use crate::http2::{Request, Write};
use crate::trace::Entry;

/// Attempts at one renewal (`maxUpdateRetries`).
const ATTEMPTS: u32 = 5;

/// Renews a lease.
#[derive(Debug)]
pub struct LeaseHolder {
    interval: Duration,
    timeout: Duration,
    /// Whether a failed update is repeated at once.
    repeats: bool,
    key: u32,
    version: Option<u64>,
    pending: Option<(RequestId, Method, u16, u64)>,
    failures: u32,
    renewed: Option<Instant>,
}

impl LeaseHolder {
    /// kubelet.
    pub fn kubelet(key: u32) -> Self {
        Self::new(key, Duration::from_secs(10), true)
    }

    /// A leader.
    pub fn leader(key: u32) -> Self {
        Self::new(key, Duration::from_secs(2), false)
    }

    fn new(key: u32, interval: Duration, repeats: bool) -> Self {
        let timeout = Duration::from_secs(10);
        Self {
            interval,
            timeout,
            repeats,
            key,
            version: None,
            pending: None,
            failures: 0,
            renewed: None,
        }
    }

    fn send(&mut self, port: &mut Port<'_>, method: Method) {
        let target = Resource::Leases.object(self.key);
        let is_read = method == Method::GET;
        let write = Write { token: port.token(), replaces: self.version };
        let request = Request::new(method.clone(), &target, (!is_read).then_some(write));
        let id = port.submit(request, Some(self.timeout));
        self.pending = Some((id, method, 0, 0));
    }

    fn ended(&mut self, port: &mut Port<'_>, method: &Method, status: u16, version: u64) {
        match (method.as_str(), status) {
            ("GET", 200) => {
                self.version = Some(version);
                self.send(port, Method::PUT);
            }
            ("GET", 404) => self.send(port, Method::POST),
            ("PUT" | "POST", 200 | 201) => {
                self.version = Some(version);
                self.failures = 0;
                let before = self.renewed.replace(port.s.now);
                if let Some(before) = before {
                    port.findings.lease_renewed(port.s.now - before);
                }
            }
            ("PUT" | "POST", 409) => self.send(port, Method::GET),
            _ => self.failed(port),
        }
    }

    fn failed(&mut self, port: &mut Port<'_>) {
        self.failures += 1;
        port.findings.lease_failed();
        if !self.repeats {
            return;
        }
        if self.failures >= 2 {
            port.close_connections();
        }
        if self.failures < ATTEMPTS {
            let method = if self.version.is_some() { Method::PUT } else { Method::GET };
            self.send(port, method);
        } else {
            self.failures = 0;
        }
    }
}

impl Model for LeaseHolder {
    fn start(&mut self, port: &mut Port<'_>) {
        let first = port.s.random_part(self.interval.min(Duration::from_secs(1)));
        port.act_after(first, 0);
    }

    fn act(&mut self, port: &mut Port<'_>, _: u32) {
        if self.pending.is_none() {
            let method = if self.version.is_some() { Method::PUT } else { Method::GET };
            self.send(port, method);
        }
        let jitter = port.s.random_part(self.interval.mul_f64(0.04));
        port.act_after(self.interval + jitter, 0);
    }

    fn replied(&mut self, port: &mut Port<'_>, request: RequestId, reply: Reply) {
        let Some((id, method, status, version)) = &mut self.pending else { return };
        if *id != request {
            return;
        }
        match reply {
            Reply::Head(head) => (*status, *version) = (head.status, head.version),
            Reply::Data(_) => {}
            Reply::End => {
                let (method, status, version) = (method.clone(), *status, *version);
                self.pending = None;
                port.s.record(Entry::Reply { client: port.client, request, status });
                self.ended(port, &method, status, version);
            }
            Reply::Failed(failure) => {
                self.pending = None;
                port.s.record(Entry::Failed {
                    client: port.client,
                    request,
                    reason: failure.as_str(),
                });
                self.failed(port);
            }
        }
    }

    fn timed_out(&mut self, port: &mut Port<'_>, request: RequestId) {
        if self.pending.as_ref().is_some_and(|pending| pending.0 == request) {
            self.pending = None;
            port.s.record(Entry::Failed { client: port.client, request, reason: "timeout" });
            self.failed(port);
        }
    }

    fn finish(&mut self, port: &mut Port<'_>) {
        if let Some(renewed) = self.renewed {
            port.findings.lease_open(port.s.now - renewed);
        }
    }
}
