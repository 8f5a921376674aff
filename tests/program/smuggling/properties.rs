//! What holds for every entry, whatever it contains.

use std::net::Ipv4Addr;

use jackstay_testkit::recorder::Recorded;

use crate::smuggling::Observation;
use crate::smuggling::rig::LoggedRequest;

/// Header fields of one hop, and those that only a front proxy may set.
fn must_not_arrive(name: &str, value: &str, upgrades: bool) -> bool {
    match name {
        "te" => value != "trailers",
        "connection" => !(upgrades && value == "Upgrade"),
        "upgrade" => !upgrades,
        "transfer-encoding" => !(upgrades && value == "chunked"),
        "keep-alive" | "proxy-connection" | "proxy-authorization" | "http2-settings" | "expect" => {
            true
        }
        _ => name.starts_with("x-remote-"),
    }
}

/// The parts of method and path that the access log always has: it shortens both, and redacts the query.
fn key<'a>(method: &'a str, path: &'a str) -> (&'a str, &'a str) {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    (method.get(..20).unwrap_or(method), path.get(..40).unwrap_or(path))
}

/// Whether a response is an error or a reset.
fn is_failure(result: &str) -> bool {
    let status = result.trim_start_matches("sentinel:");
    status.starts_with(['4', '5']) || status.starts_with("RST") || status.starts_with("GOAWAY")
}

/// The properties that an observation breaks. `said` has the lines of the access log for its client.
pub fn broken(observation: &Observation, client: Ipv4Addr, said: &[&LoggedRequest]) -> Vec<String> {
    let mut broken = Vec::new();
    let upstream = &observation.upstream;
    let mut logged: Vec<_> = said.iter().map(|line| key(&line.method, &line.path)).collect();
    for request in upstream {
        let arrived = key(&request.method, &request.target);
        match logged.iter().position(|line| *line == arrived) {
            Some(at) => drop(logged.swap_remove(at)),
            None => broken.push(format!("the access log has no request {arrived:?}")),
        }
    }
    // A request whose body turns out to be malformed is reset upstream, possibly before its head has been sent.
    let failed = observation.client.split(' ').filter(|result| is_failure(result)).count();
    if logged.len() > failed {
        broken.push(format!("the upstream has no requests {logged:?}"));
    }
    broken.extend(upstream.iter().filter_map(|request| broken_by(request, client)));
    let answered = observation.client.split(' ');
    let answered = answered.filter(|status| matches!(*status, "200" | "101" | "sentinel:200"));
    let answered = answered.count();
    if answered > upstream.len() {
        broken.push(format!("{answered} responses for {} requests", upstream.len()));
    }
    broken
}

fn broken_by(request: &Recorded, client: Ipv4Addr) -> Option<String> {
    if let Some(anomaly) = &request.anomaly {
        return Some(format!("jackstay has sent a request with {anomaly}"));
    }
    let upgrades = request.fields.iter().any(|(name, _)| name == "upgrade");
    let all = request.fields.iter().chain(&request.trailers);
    for (name, value) in all {
        if must_not_arrive(name, value, upgrades) {
            return Some(format!("the field {name}: {value} reached the upstream"));
        }
    }
    for (name, _) in &request.trailers {
        if matches!(&**name, "authorization" | "host" | "content-length" | "cookie")
            || name.starts_with("impersonate-")
        {
            return Some(format!("the trailer {name} reached the upstream"));
        }
    }
    let length = request.content_length.as_ref().and_then(|length| length.parse().ok());
    if request.complete && length.is_some_and(|length: usize| length != request.body.len()) {
        return Some("Content-Length and body differ".to_owned());
    }
    let last = request.forwarded_for.last().and_then(|list| list.rsplit(", ").next());
    if request.forwarded_for.len() != 1 || last != Some(&*client.to_string()) {
        return Some(format!("X-Forwarded-For is {:?}", request.forwarded_for));
    }
    None
}
