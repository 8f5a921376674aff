//! Scripts: clients that make certain requests while apiservers and paths have certain faults, and assert what jackstay
//! answers, and when. Each one runs with any seed, which decides what it leaves open.
//!
//! * [`script`]: a script, and its run.
//! * [`testbed`], [`objects`], [`requests`], [`http1`]: what a script acts on, and what it sends.
//! * The others have the scripts by subject.

pub mod http1;
pub mod objects;
pub mod requests;
pub mod script;
pub mod testbed;

mod degraded;
mod followed_logs;
mod groups;
mod heartbeats;
mod held_watches;
mod limits;
mod outage;
mod stopped;

use self::script::Script;

/// Every script.
pub const ALL: &[Script] = &[
    Script {
        name: "outage-answers",
        about: "requests get 503 in time from a jackstay that has never reached an apiserver",
        servers: 3,
        steps: |testbed| Box::pin(outage::answers(testbed)),
    },
    Script {
        name: "outage-returns",
        about: "reads succeed within a second after one of two apiservers has returned",
        servers: 2,
        steps: |testbed| Box::pin(outage::returns(testbed)),
    },
    Script {
        name: "silent-flows",
        about: "a read and a write in flight end when the path of the only apiserver is lost",
        servers: 1,
        steps: |testbed| Box::pin(outage::silent_flows(testbed)),
    },
    Script {
        name: "silent-write",
        about: "a write is not sent on a connection that does not respond",
        servers: 1,
        steps: |testbed| Box::pin(outage::silent_write(testbed)),
    },
    Script {
        name: "closed-handshake",
        about: "an endpoint that closes connections in the TLS handshake is ejected with a sentence",
        servers: 1,
        steps: |testbed| Box::pin(outage::closed_handshake(testbed)),
    },
    Script {
        name: "held-watches",
        about: "200 watches are held in an outage, and continue after it",
        servers: 2,
        steps: |testbed| Box::pin(held_watches::resume(testbed)),
    },
    Script {
        name: "held-timeouts",
        about: "a held watch ends at its timeoutSeconds, and a new one gets 429 then",
        servers: 2,
        steps: |testbed| Box::pin(held_watches::timeouts(testbed)),
    },
    Script {
        name: "held-new",
        about: "a new watch is held until an apiserver returns",
        servers: 2,
        steps: |testbed| Box::pin(held_watches::new(testbed)),
    },
    Script {
        name: "held-disconnect",
        about: "held watches are dropped when their client disconnects",
        servers: 1,
        steps: |testbed| Box::pin(held_watches::disconnect(testbed)),
    },
    Script {
        name: "held-drain",
        about: "held watches end when their listener drains",
        servers: 2,
        steps: |testbed| Box::pin(held_watches::drain(testbed)),
    },
    Script {
        name: "stopped-server",
        about: "requests get 503 in time when the only apiserver is stopped, and watches continue",
        servers: 1,
        steps: |testbed| Box::pin(stopped::only_server(testbed)),
    },
    Script {
        name: "stopped-large-write",
        about: "a write of 700 KB survives an apiserver that is stopped for 3 s",
        servers: 1,
        steps: |testbed| Box::pin(stopped::large_write(testbed)),
    },
    Script {
        name: "stopped-write",
        about: "a write in flight on an apiserver that is stopped gets 502",
        servers: 2,
        steps: |testbed| Box::pin(stopped::write(testbed)),
    },
    Script {
        name: "stopped-upgrade",
        about: "an upgrade in flight on an apiserver that is stopped gets 502",
        servers: 2,
        steps: |testbed| Box::pin(stopped::upgrade(testbed)),
    },
    Script {
        name: "stopped-suspect",
        about: "a stopped apiserver is suspect before its connections drain",
        servers: 2,
        steps: |testbed| Box::pin(stopped::suspect(testbed)),
    },
    Script {
        name: "log-waits",
        about: "a followed log waits on a lost path, and other requests leave",
        servers: 1,
        steps: |testbed| Box::pin(followed_logs::waits(testbed)),
    },
    Script {
        name: "log-and-write",
        about: "a write in flight on a lost path ends while a log waits",
        servers: 1,
        steps: |testbed| Box::pin(followed_logs::write_ends(testbed)),
    },
    Script {
        name: "log-reset",
        about: "a log is reset when its path is lost for tunnel_dead_after",
        servers: 1,
        steps: |testbed| Box::pin(followed_logs::reset(testbed)),
    },
    Script {
        name: "idle-close",
        about: "an idle connection that its apiserver closes is no event",
        servers: 1,
        steps: |testbed| Box::pin(followed_logs::idle_close(testbed)),
    },
    Script {
        name: "degraded-unready",
        about: "watches leave an endpoint whose /readyz fails, and no request is sent there",
        servers: 3,
        steps: |testbed| Box::pin(degraded::unready(testbed)),
    },
    Script {
        name: "degraded-goaway",
        about: "requests wait for the next connection to a ready endpoint, and none is sent to a degraded one",
        servers: 3,
        steps: |testbed| Box::pin(degraded::goaway(testbed)),
    },
    Script {
        name: "degraded-livez",
        about: "watches that fall silent make the prober ask /livez",
        servers: 3,
        steps: |testbed| Box::pin(degraded::dead(testbed)),
    },
    Script {
        name: "degraded-lag",
        about: "an endpoint whose watch cache stands still is degraded until it has caught up",
        servers: 3,
        steps: |testbed| Box::pin(degraded::lagging(testbed)),
    },
    Script {
        name: "degraded-unreadable",
        about: "an endpoint whose lag the prober may not read keeps its watches",
        servers: 3,
        steps: |testbed| Box::pin(degraded::unreadable(testbed)),
    },
    Script {
        name: "degraded-quiet",
        about: "an endpoint without events whose cache has reached their version stays ready",
        servers: 3,
        steps: |testbed| Box::pin(degraded::quiet(testbed)),
    },
    Script {
        name: "degraded-everywhere",
        about: "watches stay when every apiserver has lost etcd",
        servers: 3,
        steps: |testbed| Box::pin(degraded::everywhere(testbed)),
    },
    Script {
        name: "degraded-responses",
        about: "failing or missing responses make the prober probe at once",
        servers: 2,
        steps: |testbed| Box::pin(degraded::failing_responses(testbed)),
    },
    Script {
        name: "heartbeat-hanging",
        about: "a heartbeat on an apiserver that hangs ends after 4 s, and another write does not",
        servers: 1,
        steps: |testbed| Box::pin(heartbeats::hanging(testbed)),
    },
    Script {
        name: "heartbeat-later",
        about: "a heartbeat ends when its apiserver becomes unhealthy",
        servers: 1,
        steps: |testbed| Box::pin(heartbeats::later(testbed)),
    },
    Script {
        name: "group-one-refuses",
        about: "the aggregated group is served while one apiserver cannot connect to its server",
        servers: 3,
        steps: |testbed| Box::pin(groups::one_refuses(testbed)),
    },
    Script {
        name: "group-one-dark",
        about: "the aggregated group is served while the path of one apiserver to its server is dark",
        servers: 3,
        steps: |testbed| Box::pin(groups::one_dark(testbed)),
    },
    Script {
        name: "group-all-fail",
        about: "an aggregated group that fails everywhere costs hardly more requests",
        servers: 3,
        steps: |testbed| Box::pin(groups::all_fail(testbed)),
    },
    Script {
        name: "limit-connections",
        about: "a user that opens too many connections is refused, and others connect",
        servers: 2,
        steps: |testbed| Box::pin(limits::connections(testbed)),
    },
    Script {
        name: "limit-memory",
        about: "a user whose uploads fill the memory is refused, and others are served",
        servers: 2,
        steps: |testbed| Box::pin(limits::memory(testbed)),
    },
    Script {
        name: "limit-never-reads",
        about: "a user that opens lists and watches and reads nothing has its share, and others are served",
        servers: 2,
        steps: |testbed| Box::pin(limits::never_reads(testbed)),
    },
    Script {
        name: "limit-revoked-token",
        about: "a flood of requests with a revoked token delays no valid token",
        servers: 2,
        steps: |testbed| Box::pin(limits::revoked_token(testbed)),
    },
];

/// The script with this name.
pub fn by_name(name: &str) -> Option<&'static Script> {
    ALL.iter().find(|script| script.name == name)
}
