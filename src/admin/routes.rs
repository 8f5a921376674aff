//! What each path of the admin endpoint answers: a pure function of the request and the facts.

use std::fmt::Write as _;
use std::net::IpAddr;

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use serde_json::Value;

use super::{Readiness, StatusProvider};

const PAGE: &str = include_str!("page.html");

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

/// The Prometheus exposition format.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The page's one script and one style sheet, by their hashes, and data from here: nothing else
/// runs, whatever an apiserver's error text may hold. Nobody may frame us. A test knows the hashes.
const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-9jo1M0FOEmq630f6gaX1PF8eNqytvUQEtKuKF8BcDAY='; \
    style-src 'sha256-E35cnjBcTtQpxgXg7Cj93l/MD/wXadtbANTmkmWaG8M='; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const ROUTES: &str = "\
there is nothing here; try one of
  /livez    no worker is stalled
  /readyz   every listener is bound and an endpoint is usable
  /metrics  Prometheus text
  /status   listeners, upstreams, endpoints and connections as JSON
  /events   the last state changes as JSON, with cause and effect
  /history  round trips and answers of each endpoint in the last minutes, as JSON
  /config   effective configuration as JSON, without secrets
  /         a page for people
";

/// The answer to `request`. hyper leaves the body out for HEAD.
pub(super) fn answer<B>(
    request: &Request<B>,
    on_loopback: bool,
    facts: &dyn StatusProvider,
) -> Response<String> {
    if on_loopback && !host_is_safe(request) {
        return respond(
            StatusCode::MISDIRECTED_REQUEST,
            TEXT,
            "on a loopback address only the hosts localhost and IP literals are answered\n".into(),
        );
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response =
            respond(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".into());
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/livez" => match facts.liveness() {
            Ok(()) => respond(StatusCode::OK, TEXT, "ok\n".into()),
            Err(why) => respond(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT,
                format!("not alive: {}\n", one_line(&why)),
            ),
        },
        "/readyz" => {
            let readiness = facts.readiness();
            let code =
                if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            respond(code, TEXT, readyz(&readiness))
        }
        "/metrics" => respond(StatusCode::OK, METRICS, facts.metrics()),
        "/status" => respond(StatusCode::OK, JSON, json(&facts.status())),
        "/events" => respond(StatusCode::OK, JSON, json(&facts.events())),
        "/history" => respond(StatusCode::OK, JSON, json(&facts.history())),
        "/config" => respond(StatusCode::OK, JSON, json(&facts.config())),
        "/" => respond(StatusCode::OK, "text/html; charset=utf-8", PAGE.into()),
        _ => respond(StatusCode::NOT_FOUND, TEXT, ROUTES.into()),
    }
}

fn respond(code: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The body of `/readyz`, in the shape that people know from the apiserver's.
fn readyz(readiness: &Readiness) -> String {
    let mut out = String::new();
    for part in &readiness.checks {
        let (sign, word) = if part.ok { ('+', " ok") } else { ('-', "") };
        let colon = if part.detail.is_empty() { "" } else { ": " };
        let name = one_line(&part.name);
        // Writing to a String cannot fail.
        let _ = writeln!(out, "[{sign}]{name}{word}{colon}{}", one_line(&part.detail));
    }
    out.push_str(if readiness.ready { "readyz check passed\n" } else { "readyz check failed\n" });
    out
}

/// A reason may quote an error from the network; a part is one line whatever it holds.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn json(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Whether the request cannot come from a page under a foreign name; see the module.
fn host_is_safe<B>(request: &Request<B>) -> bool {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        // HTTP/1.0 without a Host: no browser sends that.
        (None, _) => true,
        (Some(host), None) => host.to_str().is_ok_and(is_literal_or_localhost),
        (Some(_), Some(_)) => false,
    }
}

fn is_literal_or_localhost(host: &str) -> bool {
    let name = if let Some(rest) = host.strip_prefix('[') {
        match rest.split_once(']') {
            Some((name, "")) => name,
            Some((name, port)) if port.starts_with(':') => name,
            _ => return false,
        }
    } else {
        host.split_once(':').map_or(host, |(name, _)| name)
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_admits_the_page_and_nothing_else() {
        use base64::Engine as _;
        for (tag, directive) in [("script", "script-src"), ("style", "style-src")] {
            let (_, rest) = PAGE.split_once(&format!("<{tag}>")).expect("one inline element");
            let (inside, rest) = rest.split_once(&format!("</{tag}>")).expect("it ends");
            assert!(!rest.contains(&format!("<{tag}")), "only one <{tag}>");
            let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, inside.as_bytes());
            let hash = base64::engine::general_purpose::STANDARD.encode(digest.as_ref());
            let wanted = format!("{directive} 'sha256-{hash}';");
            assert!(POLICY.contains(&wanted), "page.html was edited; put into POLICY: {wanted}");
        }
        for foreign in ["http://", "https://", "//", "@import", "url(", " on", "style=\""] {
            // The namespace of SVG is a name, not a place; `//` begins comments in the script.
            let page = PAGE.replace("http://www.w3.org/2000/svg", "");
            let (markup, _) = page.split_once("<script>").expect("a script");
            let script_too = !["//", " on"].contains(&foreign) && page.contains(foreign);
            assert!(!markup.contains(foreign) && !script_too, "`{foreign}` in the page");
        }
    }

    #[test]
    fn hosts_that_a_foreign_page_cannot_have() {
        for host in
            ["localhost", "LOCALHOST:9643", "127.0.0.1", "127.0.0.1:9643", "[::1]", "[::1]:9643"]
        {
            assert!(is_literal_or_localhost(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:9643",
            "localhost.evil.example",
            "[::1",
            "[x]",
            "[::1]x",
        ] {
            assert!(!is_literal_or_localhost(host), "{host}");
        }
    }
}
