//! The response for each path of the admin endpoint: a pure function of the request and the status.

use std::fmt::Write as _;
use std::net::IpAddr;

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use serde_json::Value;

use super::status_provider::{Readiness, ReadinessCheck, StatusProvider};

const PAGE: &str = include_str!("page.html");

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

/// The Prometheus exposition format.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Allows only the script and the style sheet of the page, by their hashes, and requests to this origin. Text
/// from an apiserver can therefore not run as a script. Forbids frames. A test compares the hashes.
const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-5/lwBMN8djk6MBrB5cOkRBm7htrekeyJ+gD8eDw3SvQ='; \
    style-src 'sha256-spJEDkgT6Z4hFdkbRWBgIdGo6MCgoseVXoVev2dGnU4='; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const ROUTES: &str = "\
not found; the paths are:
  /livez    200 while every worker's event loop runs
  /readyz   200 while every listener is bound and every upstream has a usable endpoint
  /metrics  metrics in the Prometheus text format
  /status   listeners, upstreams, endpoints and connections as JSON
  /events   latest state changes with reason and effect, as JSON
  /history  round trips and responses of each endpoint in the last 10 minutes, as JSON
  /config   effective configuration as JSON, without secrets
  /         status page
";

/// The response with the metrics.
pub(super) fn metrics(provider: &dyn StatusProvider) -> Response<String> {
    reply(StatusCode::OK, METRICS, provider.metrics())
}

/// A response with one line of text.
pub(super) fn line(code: StatusCode, text: &str) -> Response<String> {
    reply(code, TEXT, format!("{}\n", one_line(text)))
}

/// The response to `request`. hyper omits the body for HEAD.
pub(super) fn respond<B>(
    request: &Request<B>,
    on_loopback: bool,
    provider: &dyn StatusProvider,
) -> Response<String> {
    if on_loopback && !excludes_dns_rebinding(request) {
        return reply(
            StatusCode::MISDIRECTED_REQUEST,
            TEXT,
            "on a loopback address only the hosts localhost and IP literals are answered\n".into(),
        );
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response =
            reply(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".into());
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/livez" => match provider.liveness() {
            Ok(()) => reply(StatusCode::OK, TEXT, "ok\n".into()),
            Err(why) => reply(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT,
                format!("not alive: {}\n", one_line(&why)),
            ),
        },
        "/readyz" => {
            let readiness = provider.readiness();
            let code =
                if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            reply(code, TEXT, readyz(&readiness))
        }
        "/metrics" => metrics(provider),
        "/status" => reply(StatusCode::OK, JSON, json(&provider.status())),
        "/events" => reply(StatusCode::OK, JSON, json(&provider.events())),
        "/history" => reply(StatusCode::OK, JSON, json(&provider.history())),
        "/config" => reply(StatusCode::OK, JSON, json(&provider.config())),
        "/" => reply(StatusCode::OK, "text/html; charset=utf-8", PAGE.into()),
        _ => reply(StatusCode::NOT_FOUND, TEXT, ROUTES.into()),
    }
}

fn reply(code: StatusCode, content_type: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, content_type),
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

/// The body of `/readyz`, in the format of the apiserver's `/readyz?verbose`. A failed check that the process can
/// be ready without is `excluded`, the apiserver's word for a check that does not count.
fn readyz(readiness: &Readiness) -> String {
    let mut out = String::new();
    for check in &readiness.checks {
        let (sign, outcome) = match check {
            ReadinessCheck { ok: true, .. } => ('+', "ok"),
            ReadinessCheck { required: true, .. } => ('-', "failed"),
            ReadinessCheck { required: false, .. } => ('-', "excluded"),
        };
        let colon = if check.detail.is_empty() { "" } else { ": " };
        let name = one_line(&check.name);
        // Writing to a String cannot fail.
        let _ = writeln!(out, "[{sign}]{name} {outcome}{colon}{}", one_line(&check.detail));
    }
    out.push_str(match readiness.ready {
        true if readiness.checks.iter().any(|check| !check.ok && !check.required) => {
            "readyz check passed; excluded checks do not count\n"
        }
        true => "readyz check passed\n",
        false => "readyz check failed\n",
    });
    out
}

/// Replaces control characters by spaces: each check is one line, and its detail may quote an error from the
/// network.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn json(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Whether the `Host` of a request excludes DNS rebinding; see [`super`].
fn excludes_dns_rebinding<B>(request: &Request<B>) -> bool {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        // HTTP/1.0 without a Host. Browsers always send one.
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
    fn policy_hashes_match_script_and_style_of_page() {
        use base64::Engine as _;
        for (tag, directive) in [("script", "script-src"), ("style", "style-src")] {
            let (_, rest) = PAGE.split_once(&format!("<{tag}>")).expect("one inline element");
            let (inside, rest) = rest.split_once(&format!("</{tag}>")).expect("its end");
            assert!(!rest.contains(&format!("<{tag}")), "only one <{tag}>");
            let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, inside.as_bytes());
            let hash = base64::engine::general_purpose::STANDARD.encode(digest.as_ref());
            let wanted = format!("{directive} 'sha256-{hash}';");
            assert!(POLICY.contains(&wanted), "page.html has changed; set in POLICY: {wanted}");
        }
        // The policy blocks inline handlers and styles, and the page loads nothing from other hosts.
        for forbidden in ["http://", "https://", "//", "@import", "url(", " on", "style=\""] {
            // The SVG namespace is only a name; `//` starts comments in the script.
            let page = PAGE.replace("http://www.w3.org/2000/svg", "");
            let (markup, _) = page.split_once("<script>").expect("a script");
            let script_too = !["//", " on"].contains(&forbidden) && page.contains(forbidden);
            assert!(!markup.contains(forbidden) && !script_too, "`{forbidden}` in the page");
        }
    }

    #[test]
    fn is_literal_or_localhost_refuses_other_names_and_malformed_hosts() {
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
