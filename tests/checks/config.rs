//! Loads configurations with mistakes, and compares the exact error messages.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jackstay_config::{
    AccessLog, ConfigError, ConfigErrors, FlowSettings, Level, LoadedConfig, Log, LogFormat,
    Overrides, Percent, VersionPreference, draft, draft_from_flags, load,
};
use jackstay_core::discovery::address::EndpointAddress;
use proptest::prelude::*;

/// A configuration file `f` in its own directory.
struct File(tempfile::TempDir);

impl File {
    fn new(contents: impl AsRef<[u8]>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), contents).unwrap();
        Self(dir)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("f")
    }

    fn load(&self, env: &[(&str, &str)], flags: &Overrides) -> Result<LoadedConfig, ConfigErrors> {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        load(&self.path(), env, flags)
    }
}

/// The error lines of a result, without the directory of the file, and without the number of the line beside a key
/// path; empty for a valid file.
fn lines(file: &Path, result: Result<LoadedConfig, ConfigErrors>) -> Vec<String> {
    let dir = format!("{}/", file.parent().unwrap().display());
    match result {
        Ok(_) => vec![],
        Err(errors) => {
            assert!(!errors.0.is_empty());
            let text = |error: &ConfigError| {
                let line = error.line.filter(|_| error.path.is_empty());
                ConfigError { line, ..error.clone() }.to_string().replace(&dir, "")
            };
            errors.0.iter().map(text).collect()
        }
    }
}

fn errors(text: impl AsRef<[u8]>) -> Vec<String> {
    let file = File::new(text);
    lines(&file.path(), file.load(&[], &Overrides::default()))
}

fn errors_of_good_file_with(env: &[(&str, &str)], flags: &Overrides) -> Vec<String> {
    let file = File::new(GOOD);
    lines(&file.path(), file.load(env, flags))
}

const GOOD: &str = "\
admin: {bind: '127.0.0.1:9643'}
log: {level: info}
upstreams:
- name: u
  endpoints: ['10.0.0.1:6443']
  tls: {ca_file: /ca}
  connections: {min: 1}
  health:
    ping_interval: 1s
    readyz: {path: /readyz}
listeners:
- name: l
  bind: ['127.0.0.1:7443']
  upstream: u
  tls: {cert_file: /c, key_file: /k}
  client_ca_file: /ca
  identities: [{cert_file: /i, key_file: /i}]
  limits: {max_streams: 100}
";

/// [`GOOD`] with `from` replaced by `to`.
fn with(from: &str, to: &str) -> String {
    assert_eq!(GOOD.matches(from).count(), 1, "{from}");
    GOOD.replace(from, to)
}

#[test]
fn valid_file_has_no_errors_and_no_warnings() {
    // An anchor without an alias is allowed.
    assert_eq!(errors(with("- name: u", "- &a\n  name: u")), [""; 0]);
    let file = File::new(GOOD);
    let loaded = file.load(&[], &Overrides::default()).unwrap();
    assert_eq!(loaded.warnings, [""; 0]);
    assert_eq!(loaded.config.listeners[0].terminate().unwrap().limits.requests.max_streams, 100);
}

#[test]
fn source_prefix_v6_is_64_except_in_place_of_a_load_balancer() {
    let prefix = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let loaded = load(&path, [], &Overrides::default()).unwrap();
        assert_eq!(loaded.warnings, [""; 0]);
        let listeners = loaded.config.listeners.iter();
        listeners.map(|listener| listener.limits().source_prefix_v6).collect::<Vec<_>>()
    };
    assert_eq!(prefix("config/jackstay.yaml"), [64, 64]);
    assert_eq!(prefix("deploy/load-balancer/jackstay.yaml"), [128]);
    assert_eq!(errors(with("max_streams: 100", "source_prefix_v6: 32")), [""; 0]);
}

#[test]
fn yaml_tab_is_reported_on_its_own_line() {
    let tab = "not valid YAML: a tab in the indentation; indent with spaces";
    for (text, line) in [
        ("log:\n\tlevel: info\n", 2),
        ("log:\n  level: info\n\tformat: text\n", 3),
        ("log:\n  level: info\n  \tformat: text\n", 3),
        ("log:\n  level: info\n\n  # comment\n\t# comment\n\tformat: text\n", 6),
        ("log: {level: info}\n\tadmin: x\n", 2),
        ("log: {level: info\n\tformat: text}\n", 2),
        ("upstreams:\n- name: u\n\t  endpoints: []\n", 3),
    ] {
        assert_eq!(errors(text), [format!("f: line {line}: {tab}")], "{text:?}");
    }
    // Other errors keep their message, even if the next line begins with a tab.
    let other = errors("log: ]\n\tformat: text\n");
    assert!(!other[0].contains("tab"), "{other:?}");
}

/// Each case is a replacement in [`GOOD`] and the expected error lines.
#[test]
fn invalid_value_is_reported_with_path_and_remedy() {
    let duration = "write it as 250ms, 2s, 1m30s or 1h";
    let bind = "write it as 127.0.0.1:7443 or \"[::1]:7443\"";
    let endpoint = "write it as 10.0.0.11:6443 or \"[fd00::13]:6443\"";
    // Cases for the address of the listener, for the endpoint, and for one replacement.
    let bind_case = |text: &str, message: &str| {
        (
            "bind: ['127.0.0.1:7443']",
            format!("bind: [{text}]"),
            vec![format!("f: listeners[0].bind[0]: {message}")],
        )
    };
    let endpoint_case = |text: &str, message: &str| {
        ("10.0.0.1:6443", text.to_owned(), vec![format!("f: upstreams[0].endpoints[0]: {message}")])
    };
    let case = |from, to: &str, line: &str| (from, to.to_owned(), vec![format!("f: {line}")]);
    let cases: Vec<(&str, String, Vec<String>)> = vec![
        // Unknown keys, at every depth.
        case("log: {", "lgo: {", "lgo: unknown key \"lgo\"; did you mean log?"),
        case("level", "lvel", "log.lvel: unknown key \"lvel\"; did you mean level?"),
        case("admin: {bind", "admin: {color", "admin.color: unknown key \"color\""),
        case(
            "max_streams",
            "max-streams",
            "listeners[0].limits.max-streams: unknown key \"max-streams\"; did you mean \
             max_streams?",
        ),
        case(
            "readyz: {path",
            "readyz: {\"a.b[0]\": 1, path",
            "upstreams[0].health.readyz.\"a.b[0]\": unknown key \"a.b[0]\"",
        ),
        case(
            "admin:",
            "\"log[99999999999]\": 1\nadmin:",
            "\"log[99999999999]\": unknown key \"log[99999999999]\"",
        ),
        case("admin:", "log.level: debug\nadmin:", "\"log.level\": unknown key \"log.level\""),
        case("admin:", "<<: {a: 1}\nadmin:", "\"<<\": unknown key \"<<\""),
        case(
            "max_streams: 100",
            "source_prefix_v6: 31",
            "listeners[0].limits.source_prefix_v6: 31 is out of range: 32 to 128",
        ),
        case(
            "max_streams: 100",
            "source_prefix_v6: 129",
            "listeners[0].limits.source_prefix_v6: 129 is out of range: 32 to 128",
        ),
        case(
            "max_streams: 100",
            "source_prefix_v6: /64",
            "listeners[0].limits.source_prefix_v6: expected a whole number: the prefix length of an IPv6 network, found the text \"/64\"",
        ),
        // Wrong types.
        case("{bind: '127.0.0.1:9643'}", "5", "admin: expected a map of keys, found the number 5"),
        case(
            "{level: info}",
            "{level: {a: 1}}",
            "log.level: expected text: one of error, warn, info, debug, trace, found a map (a: …)",
        ),
        case(
            "name: l",
            "name: 7",
            "listeners[0].name: expected text: a unique name, found the number 7 (write it in quotes)",
        ),
        case(
            "['127.0.0.1:7443']",
            "127.0.0.1:7443",
            "listeners[0].bind: expected a list, found the text \"127.0.0.1:7443\"",
        ),
        case(
            "{cert_file: /c, key_file: /k}",
            "[]",
            "listeners[0].tls: expected a map of keys, found a list",
        ),
        case(
            "min: 1",
            "min: one",
            "upstreams[0].connections.min: expected a whole number, found the text \"one\"",
        ),
        case(
            "min: 1",
            "min: '1'",
            "upstreams[0].connections.min: expected a whole number, found the text \"1\"",
        ),
        case(
            "min: 1",
            "min: 1.5",
            "upstreams[0].connections.min: expected a whole number, found the number 1.5",
        ),
        case(
            "upstream: u",
            "upstream: u\n  transparent: 1",
            "listeners[0].transparent: expected true or false, found the number 1",
        ),
        case(
            "admin:",
            "workers: many\nadmin:",
            "workers: expected a whole number or auto, found the text \"many\"",
        ),
        // Bad values.
        case("info", "loud", "log.level: \"loud\" is not one of error, warn, info, debug, trace"),
        case("admin:", "workers: 0\nadmin:", "workers: 0 is out of range: 1 to 256"),
        case("admin:", "workers: -1\nadmin:", "workers: -1 is out of range: 1 to 256"),
        case("min: 1", "min: 65", "upstreams[0].connections.min: 65 is more than max, which is 64"),
        case(
            "min: 1",
            "min: 0, max: 0",
            "upstreams[0].connections.max: 0 is out of range: 1 to 1024",
        ),
        case(
            "1s",
            "2",
            &format!(
                "upstreams[0].health.ping_interval: the duration \"2\" has no unit: {duration}"
            ),
        ),
        case(
            "1s",
            "'2'",
            &format!(
                "upstreams[0].health.ping_interval: the duration \"2\" has no unit: {duration}"
            ),
        ),
        case(
            "1s",
            "soon",
            &format!("upstreams[0].health.ping_interval: \"soon\" is not a duration: {duration}"),
        ),
        case("1s", "1us", "upstreams[0].health.ping_interval: 1us is out of range: 100ms to 1m"),
        case(
            "1s",
            "2s",
            "upstreams[0].health.ping_interval: must be shorter than dead_after, which is the age \
             of an unanswered PING",
        ),
        case(
            "1s",
            "1s\n    suspect_after: 3s",
            "upstreams[0].health.suspect_after: must be shorter than dead_after",
        ),
        case(
            "1s",
            "1s\n    tunnel_dead_after: 1500ms",
            "upstreams[0].health.tunnel_dead_after: must not be shorter than dead_after",
        ),
        case(
            "1s",
            "1s\n    tunnel_dead_after: 2m",
            "upstreams[0].health.tunnel_dead_after: 2m is out of range: 200ms to 1m",
        ),
        case(
            "1s",
            "1s\n    suspect_after: often",
            &format!("upstreams[0].health.suspect_after: \"often\" is not a duration: {duration}"),
        ),
        case(
            "path: /readyz",
            "path: readyz",
            "upstreams[0].health.readyz.path: \"readyz\" is not a path such as /readyz",
        ),
        case(
            "path: /readyz",
            "path: \"/a\\r\\nb\"",
            "upstreams[0].health.readyz.path: \"/a\\r\\nb\" is not a path such as /readyz",
        ),
        case(
            "path: /readyz",
            "timeout: 11s",
            "upstreams[0].health.readyz.timeout: must not be longer than interval",
        ),
        case(
            "path: /readyz",
            "cert_file: /c",
            "upstreams[0].health.readyz.key_file: is required beside cert_file",
        ),
        case(
            "path: /readyz",
            "cert_file: /c, key_file: /c, token_file: /t",
            "upstreams[0].health.readyz.token_file: has no effect beside cert_file: an apiserver \
             prefers the certificate",
        ),
        case(
            "max_streams: 100",
            "max_header_bytes: 64",
            "listeners[0].limits.max_header_bytes: the size \"64\" has no unit: write it as 512B, 64KiB or 1MiB",
        ),
        case(
            "max_streams: 100",
            "max_header_bytes: 1GiB",
            "listeners[0].limits.max_header_bytes: 1GiB is out of range: 4KiB to 1MiB",
        ),
        case(
            "{ca_file: /ca}",
            "{ca_file: ''}",
            "upstreams[0].tls.ca_file: is required: the path of a file",
        ),
        case(
            "{ca_file: /ca}",
            "{ca_file: \"/a\\0\"}",
            "upstreams[0].tls.ca_file: \"/a\\0\" cannot be a path",
        ),
        case(
            "{ca_file: /ca}",
            "{ca_file: /ca, server_name: 'a b'}",
            "upstreams[0].tls.server_name: \"a b\" is neither a DNS name nor an IP address",
        ),
        case(
            "name: l",
            "name: L",
            "listeners[0].name: \"L\" is not a name: up to 63 of a-z, 0-9 and -, not starting or ending with -",
        ),
        case(
            "name: l",
            "name: l-",
            "listeners[0].name: \"l-\" is not a name: up to 63 of a-z, 0-9 and -, not starting or ending with -",
        ),
        case(
            "upstream: u",
            "upstream: u\n  never_resume_groups: [example.com, example.com]",
            "listeners[0].never_resume_groups[1]: \"example.com\" appears twice",
        ),
        case(
            "upstream: u",
            "upstream: u\n  resume_groups: [example.com]",
            "listeners[0].resume_groups: was removed: watches of every API group are resumed; list \
             exceptions in never_resume_groups",
        ),
        case(
            "upstream: u",
            "upstream: u\n  heartbeats: [configmaps, Nodes/status]",
            "listeners[0].heartbeats[1]: \"Nodes/status\" is not a resource such as configmaps or \
             machines.example.com/status",
        ),
        // Missing.
        case("- name: l\n  bind", "- bind", "listeners[0].name: is required: a unique name"),
        case(
            "  client_ca_file: /ca\n",
            "",
            "listeners[0].client_ca_file: is required beside identities: without it no client \
             certificate can be verified",
        ),
        case(
            "{cert_file: /i, key_file: /i}",
            "{cert_file: /i}",
            "listeners[0].identities[0].key_file: is required: the path of a file",
        ),
        case(
            "['10.0.0.1:6443']",
            "[]",
            "upstreams[0].endpoints: is required: at least one address",
        ),
        case("['127.0.0.1:7443']", "", "listeners[0].bind: is required: at least one address"),
        case(
            "{cert_file: /i, key_file: /i}",
            "{cert_file: /i, key_file: /i}, {cert_file: /i, key_file: /j}",
            "listeners[0].identities[1].cert_file: the same certificate as listeners[0].identities[0].cert_file",
        ),
        // Addresses.
        bind_case(
            "localhost:7443",
            "\"localhost:7443\" is a name; write its addresses: 127.0.0.1:7443 and \"[::1]:7443\"",
        ),
        bind_case("'127.0.0.1'", &format!("\"127.0.0.1\" has no port: {bind}")),
        bind_case(
            "'127.0.0.1:70000'",
            &format!("\"127.0.0.1:70000\" has no valid port (0 to 65535): {bind}"),
        ),
        bind_case(
            "'127.0.0.1:+80'",
            &format!("\"127.0.0.1:+80\" has no valid port (0 to 65535): {bind}"),
        ),
        bind_case(
            "'::1'",
            &format!("\"::1\" is an IPv6 address without brackets and port: {bind}"),
        ),
        bind_case("'::1:x'", &format!("\"::1:x\" has no valid port (0 to 65535): {bind}")),
        bind_case("'[::1]'", &format!("\"[::1]\" has no port: {bind}")),
        bind_case("'[zz]:1'", &format!("\"[zz]:1\" has no IPv6 address in its brackets: {bind}")),
        bind_case("':7443'", &format!("\":7443\" has no address: {bind}")),
        bind_case("'999.0.0.1:1'", "\"999.0.0.1\" is not an IP address to listen on"),
        bind_case("[1]", "expected text: an address such as 127.0.0.1:7443, found a list"),
        bind_case("~", "is required: an address such as 127.0.0.1:7443"),
        endpoint_case(
            "https://10.0.0.1:6443",
            &format!("\"https://10.0.0.1:6443\" is a URL, not an address and a port: {endpoint}"),
        ),
        endpoint_case("10.0.0.1:0", "\"10.0.0.1:0\" has port 0, which accepts no connections"),
        endpoint_case("0.0.0.0:6443", "\"0.0.0.0:6443\" cannot be the address of an apiserver"),
        endpoint_case("10.0.0:6443", "\"10.0.0\" is neither an IP address nor a DNS name"),
        endpoint_case("a b c:6443", "\"a b c\" is neither an IP address nor a DNS name"),
        endpoint_case(
            "127.0.0.1:7443",
            "127.0.0.1:7443 is jackstay's own address (listeners[0].bind[0]): requests would loop",
        ),
        endpoint_case(
            "localhost:7443",
            "localhost:7443 is jackstay's own address (listeners[0].bind[0]): requests would loop",
        ),
        endpoint_case(
            "127.0.0.1:9643",
            "127.0.0.1:9643 is jackstay's own address (admin.bind): requests would loop",
        ),
        // Duplicates and collisions.
        case(
            "['10.0.0.1:6443']",
            "['10.0.0.1:6443', '[::ffff:10.0.0.1]:6443']",
            "upstreams[0].endpoints[1]: 10.0.0.1:6443 is already an endpoint at \
             upstreams[0].endpoints[0]",
        ),
        case(
            "['10.0.0.1:6443']",
            "['[::1]:6443', 'localhost:6443']",
            "upstreams[0].endpoints[1]: localhost:6443 is the same as [::1]:6443 at \
             upstreams[0].endpoints[0]",
        ),
        case(
            "['127.0.0.1:7443']",
            "['127.0.0.1:7443', '0.0.0.0:7443', '[::]:7443', '127.0.0.1:0', '127.0.0.1:0']",
            "listeners[0].bind[1]: 0.0.0.0:7443 collides with 127.0.0.1:7443, bound at \
             listeners[0].bind[0]",
        ),
        case(
            "['127.0.0.1:7443']",
            "['127.0.0.1:9643']",
            "listeners[0].bind[0]: 127.0.0.1:9643 is already bound at admin.bind",
        ),
        case(
            "upstream: u",
            "upstream: v",
            "listeners[0].upstream: there is no upstream \"v\"; there is u",
        ),
        // Modes and names.
        case(
            "upstream: u",
            "upstream: u\n  mode: l7\n  routes: []",
            "listeners[0].mode: \"l7\" is not one of terminate, passthrough",
        ),
        case(
            "upstream: u",
            "upstream: u\n  transparent: true",
            "listeners[0].transparent: needs mode passthrough: jackstay has no certificate for \
             the original destination",
        ),
        case(
            "['10.0.0.1:6443']",
            "['lb.example.com:6443', 'LB.Example.com.:6443']",
            "upstreams[0].endpoints[1]: lb.example.com.:6443 is the same as lb.example.com:6443 at \
             upstreams[0].endpoints[0]",
        ),
        case(
            "- name: u",
            "- name: u\n  discovery: {kubeconfg: /k}",
            "upstreams[0].discovery.kubeconfg: unknown key \"kubeconfg\"; did you mean kubeconfig?",
        ),
        // Duplicate keys.
        case("admin:", "log: {level: warn}\nadmin:", "log: the key \"log\" appears twice here"),
        case(
            "min: 1",
            "min: 1, min: 2",
            "upstreams[0].connections.min: the key \"min\" appears twice here",
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(errors(with(from, &to)), expected, "{from} -> {to}");
    }
}

#[test]
fn upstream_accepts_addresses_names_file_and_discovery() {
    let load = |text: String| File::new(text).load(&[], &Overrides::default()).unwrap().config;
    let config = load(with(
        "  endpoints: ['10.0.0.1:6443']",
        "  endpoints: ['10.0.0.1:6443', 'LB.Example.com:6443', 'LocalHost:6443']\n  \
         endpoints_file: /e\n  discovery: {kubeconfig: /k}",
    ));
    let upstream = &config.upstreams[0];
    let labels: Vec<_> = upstream.endpoints.iter().map(ToString::to_string).collect();
    assert_eq!(labels, ["10.0.0.1:6443", "lb.example.com:6443", "localhost:6443"]);
    let names: Vec<_> = upstream.endpoints.iter().map(EndpointAddress::is_name).collect();
    assert_eq!(names, [false, true, false]);
    assert_eq!(upstream.endpoints_file.as_deref(), Some(Path::new("/e")));
    assert_eq!(upstream.discovery.kubeconfig.as_deref(), Some(Path::new("/k")));

    let config = load(with("  endpoints: ['10.0.0.1:6443']", "  endpoints_file: /e"));
    assert!(config.upstreams[0].endpoints.is_empty(), "endpoints_file alone is sufficient");
}

#[test]
fn draft_from_flags_is_a_passthrough_configuration() {
    let flags = |listen: &[&str], upstream: &[&str]| {
        let owned =
            |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        draft_from_flags(&owned(listen), &owned(upstream), [], &Overrides::default()).finish()
    };
    let loaded = flags(&["127.0.0.1:7443"], &["10.0.0.1:6443", "10.0.0.2:6443"]).unwrap();
    assert_eq!(loaded.warnings, [""; 0]);
    assert_eq!(loaded.config.state_dir, None);
    assert!(loaded.config.listeners[0].passthrough().is_some());
    assert_eq!(loaded.config.upstreams[0].endpoints.len(), 2);
    let errors = flags(&["localhost"], &["10.0.0.1:6443", "10.0.0.1:6443", "x"]).unwrap_err();
    let lines: Vec<_> = errors.to_string().lines().map(str::to_owned).collect();
    assert_eq!(
        lines,
        [
            "command line: --endpoint[2]: \"x\" has no port: write it as 10.0.0.11:6443 or \
             \"[fd00::13]:6443\"",
            "command line: --listen[0]: \"localhost\" has no port: write it as 127.0.0.1:7443 or \
             \"[::1]:7443\"",
            "command line: --endpoint[1]: 10.0.0.1:6443 is already an endpoint at --endpoint[0]",
        ]
    );
}

/// [`GOOD`] with a passthrough listener that has the additional keys `more`.
fn passthrough(more: &str) -> String {
    let (head, _) = GOOD.split_once("listeners:").unwrap();
    let head = head.replace("  tls: {ca_file: /ca}\n", "");
    format!(
        "{head}listeners:\n- {{name: l, bind: ['127.0.0.1:7443'], mode: passthrough, upstream: u{more}}}\n"
    )
}

#[test]
fn passthrough_listener_needs_only_an_upstream() {
    let file = File::new(passthrough(""));
    let loaded = file.load(&[], &Overrides::default()).unwrap();
    assert_eq!(loaded.warnings, [""; 0]);
    let passthrough = loaded.config.listeners[0].passthrough().unwrap();
    assert_eq!((passthrough.flows.idle_timeout, passthrough.flows.rebalance), (None, false));
    let upstream = &loaded.config.upstreams[0];
    assert_eq!(upstream.tls.ca_file, None);
    assert!(upstream.used_by.passthrough && !upstream.used_by.terminate);
}

#[test]
fn transparent_listener_has_destinations() {
    let to = "['10.96.0.1:443', '[fd00::1]:443', 10.0.0.0/24]";
    let more =
        format!(", transparent: true, freebind: true, destinations: [{{to: {to}, upstream: u}}]");
    let loaded = File::new(passthrough(&more)).load(&[], &Overrides::default()).unwrap();
    let listener = &loaded.config.listeners[0];
    assert!(listener.transparent && listener.freebind);
    let destination = &listener.passthrough().unwrap().destinations[0];
    let shown: Vec<_> = destination.to.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["10.96.0.1:443", "[fd00::1]:443", "10.0.0.0/24"]);
    assert_eq!(loaded.config.mark, 0x306a);

    for (more, expected) in [
        (
            "destinations: [{to: [10.0.0.1], upstream: u}]",
            "destinations: needs `transparent: true`: only a redirected connection has an \
             original destination",
        ),
        (
            "transparent: true, destinations: [{to: [10.0.0.1/24], upstream: u}]",
            "destinations[0].to[0]: \"10.0.0.1/24\" has bits beyond its prefix: 10.0.0.0/24?",
        ),
        (
            "transparent: true, destinations: [{upstream: u}]",
            "destinations[0].to: is required: at least one address",
        ),
    ] {
        let file = passthrough(&format!(", {more}"));
        assert_eq!(errors(file), [format!("f: listeners[0].{expected}")], "{more}");
    }
}

#[test]
fn key_of_the_other_mode_is_refused_with_the_reason() {
    let tls = "has no meaning in mode passthrough: TLS is between the client and the apiserver";
    let requests = "has no meaning in mode passthrough: no request is seen here";
    for (more, expected) in [
        ("tls: {cert_file: c, key_file: k}", vec![format!("tls: {tls}")]),
        (
            "client_ca_file: c, identities: []",
            vec![format!("client_ca_file: {tls}"), format!("identities: {tls}")],
        ),
        ("never_resume_groups: [a]", vec![format!("never_resume_groups: {tls}")]),
        ("heartbeats: [a]", vec![format!("heartbeats: {tls}")]),
        ("limits: {max_streams: 1}", vec![format!("limits.max_streams: {requests}")]),
        ("limits: {stall_timeout: 1s}", vec![format!("limits.stall_timeout: {requests}")]),
        ("idle_timeout: 10ms", vec!["idle_timeout: is shorter than 1s; 0s disables it".into()]),
        (
            "routes: [{server_names: [A.b, a.B], upstream: u}]",
            vec![
                "routes[0].server_names[1]: \"a.b\" is already at \
                  listeners[0].routes[0].server_names[0]"
                    .into(),
            ],
        ),
        (
            "routes: [{upstream: u}, {server_names: [10.0.0.1, 'a.*']}]",
            vec![
                "routes[0].server_names: is required: at least one name".into(),
                "routes[1].server_names[0]: \"10.0.0.1\" is an IP address: no client sends one as \
                 server name (RFC 6066); connections without one use the listener's upstream"
                    .into(),
                "routes[1].server_names[1]: \"a.*\" is not a name such as a.example.com or \
                 *.example.com"
                    .into(),
                "routes[1].upstream: is required: the name of an upstream".into(),
            ],
        ),
        (
            "routes: [{server_names: [a.b], upstream: v}]",
            vec!["routes[0].upstream: there is no upstream \"v\"; there is u".into()],
        ),
    ] {
        let expected: Vec<_> =
            expected.into_iter().map(|line| format!("f: listeners[0].{line}")).collect();
        assert_eq!(errors(passthrough(&format!(", {more}"))), expected, "{more}");
    }
    let flows = "it forwards requests, not connections";
    for (key, without) in [
        ("routes: []", ""),
        ("destinations: []", ""),
        ("idle_timeout: 1h", " without passthrough_server_names"),
        ("leave_timeout: 1h", " without passthrough_server_names"),
        ("rebalance: true", " without passthrough_server_names"),
    ] {
        let name = key.split(':').next().unwrap();
        assert_eq!(
            errors(terminate_with(key)),
            [format!("f: listeners[0].{name}: has no meaning in mode terminate{without}: {flows}")]
        );
    }
}

/// [`GOOD`] with additional keys of its listener.
fn terminate_with(keys: &str) -> String {
    with("upstream: u", &format!("upstream: u\n  {keys}"))
}

#[test]
fn passthrough_server_names_make_flow_settings_valid() {
    let keys =
        "passthrough_server_names: [Kubernetes.default.svc, '*.example.com']\n  idle_timeout: 1h";
    let loaded = File::new(terminate_with(keys)).load(&[], &Overrides::default()).unwrap();
    let terminate = loaded.config.listeners[0].terminate().unwrap();
    let passed_through = terminate.passed_through.as_ref().unwrap();
    assert_eq!(passed_through.server_names, ["kubernetes.default.svc", "*.example.com"]);
    let flows =
        FlowSettings { idle_timeout: Some(Duration::from_secs(3600)), ..FlowSettings::default() };
    assert_eq!(passed_through.flows, flows);
    let used_by = loaded.config.upstreams[0].used_by;
    assert!(used_by.terminate && used_by.passthrough);

    let none = File::new(terminate_with("passthrough_server_names: []"));
    let loaded = none.load(&[], &Overrides::default()).unwrap();
    assert_eq!(loaded.config.listeners[0].terminate().unwrap().passed_through, None);
    assert!(!loaded.config.upstreams[0].used_by.passthrough);
}

#[test]
fn invalid_passthrough_server_names_are_refused() {
    let name = "listeners[0].passthrough_server_names";
    for (names, expected) in [
        ("[a.b, A.B]", format!("{name}[1]: \"a.b\" is already at {name}[0]")),
        (
            "[a!b.c]",
            format!("{name}[0]: \"a!b.c\" is not a name such as a.example.com or *.example.com"),
        ),
        ("['*']", format!("{name}[0]: \"*\" is not a name such as a.example.com or *.example.com")),
        (
            "[10.0.0.1]",
            format!(
                "{name}[0]: \"10.0.0.1\" is an IP address: no client sends one as server name (RFC 6066); write a \
                 DNS name in the apiservers' certificates"
            ),
        ),
        ("a.b", format!("{name}: expected a list, found the text \"a.b\"")),
    ] {
        let found = errors(terminate_with(&format!("passthrough_server_names: {names}")));
        assert_eq!(found, [format!("f: {expected}")], "{names}");
    }
    assert_eq!(
        errors(passthrough(", passthrough_server_names: [a.b]")),
        [format!(
            "f: {name}: has no meaning in mode passthrough: every connection is passed through, and routes select \
             its upstream by name"
        )]
    );
}

#[test]
fn ca_file_missing_with_requests_or_credentials_is_refused() {
    let missing = "f: upstreams[0].tls.ca_file: is required";
    assert_eq!(
        errors(with("  tls: {ca_file: /ca}\n", "")),
        [format!("{missing}: the path of a file")]
    );
    assert_eq!(
        errors(passthrough("").replace("{path: /readyz}", "{token_file: /t}")),
        [format!(
            "{missing} with a credential for readyz or discovery: an unverified server must not \
             receive it"
        )]
    );
}

#[test]
fn duplicate_names_and_addresses_are_refused() {
    let text = format!(
        "{}- {{name: l, bind: ['[::]:1', '[::1]:1'], upstream: u, tls: {{cert_file: c, key_file: k}}}}\n",
        with("- name: u", "- {name: u, endpoints: ['10.0.0.2:1'], tls: {ca_file: c}}\n- name: u")
    );
    assert_eq!(
        errors(text),
        [
            "f: upstreams[1].name: the upstream name \"u\" is already used at upstreams[0].name",
            "f: listeners[1].name: the listener name \"l\" is already used at listeners[0].name",
            "f: listeners[1].bind[1]: [::1]:1 collides with [::]:1, bound at listeners[1].bind[0]",
        ]
    );
}

#[test]
fn errors_and_warnings_have_the_line_of_their_key() {
    let text = with("admin: {bind: '127.0.0.1:9643'}", "admin: {bind: '0.0.0.0:9643'}")
        .replace(
            "bind: ['127.0.0.1:7443']",
            "bind: ['0.0.0.0:7443']\n  colour: red\n  colour: blue",
        )
        .replace("  tls: {cert_file: /c, key_file: /k}\n", "");
    let file = File::new(&text);
    let line_of = |part: &str| text.lines().position(|line| line.contains(part)).unwrap() + 1;
    let flags = Overrides { workers: Some("x".into()), ..Overrides::default() };
    let draft = draft(&file.path(), [("JACKSTAY__LOG__LEVEL".into(), "loud".into())], &flags);
    let found: Vec<_> = draft.errors.iter().map(|e| (e.path.as_str(), e.line)).collect();
    let line = |part| Some(line_of(part) as u64);
    assert_eq!(
        found,
        [
            ("listeners[0].colour", line("colour: blue")),
            ("workers", None),
            ("JACKSTAY__LOG__LEVEL", None),
            ("listeners[0].tls.cert_file", line("- name: l")),
            ("listeners[0].tls.key_file", line("- name: l")),
            ("listeners[0].colour", line("colour: red")),
        ]
    );
    let shown = draft.errors[0].to_string();
    let name = file.path().display().to_string();
    assert!(shown.starts_with(&format!("{name}: line 15: listeners[0].colour: ")), "{shown}");
    assert!(draft.warnings[0].starts_with(&format!("{name}: line 1: admin.bind: ")), "{draft:?}");
    // An identity on every address is a probable mistake; without one, everybody has credentials of its own.
    assert!(draft.warnings[1].contains(": line 13: listeners[0].bind[0]: 0.0.0.0:7443 accepts "));
    assert_eq!(draft.warnings.len(), 2);
    let text = text.replace("  identities: [{cert_file: /i, key_file: /i}]\n", "");
    let file = File::new(&text);
    let draft = jackstay_config::draft(&file.path(), [], &Overrides::default());
    assert_eq!(draft.warnings.len(), 1, "{draft:?}");
}

#[test]
fn file_that_is_not_a_configuration_is_refused() {
    let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n";
    let deep = "- ".repeat(200_000);
    let brackets = format!("a: {}", "[".repeat(100_000));
    for (text, expected) in [
        ("", "f: the file is empty"),
        ("# a comment\n", "f: the file is empty"),
        ("---\n", "f: the file must be a map of keys (listeners: …, upstreams: …)"),
        ("- a\n", "f: the file must be a map of keys (listeners: …, upstreams: …)"),
        ("hello", "f: the file must be a map of keys (listeners: …, upstreams: …)"),
        ("a: 1\n---\nb: 2\n", "f: line 3: a second YAML document; one is expected"),
        (bomb, "f: line 2: YAML aliases (*name) are not supported"),
        ("a: !size 5\n", "f: line 1: YAML tags (!name) are not supported"),
        ("? [a]\n: b\n", "f: line 1: a key must be a word, not a list or a map"),
        (&deep, "f: line 1: nested more than 32 deep"),
        (&brackets, "f: line 1: not valid YAML: recursion limit exceeded"),
        ("&a {b: c}: 1", "f: line 1: a key must be a word, not a list or a map"),
        ("a\0b: 1", "f: not a text file in UTF-8"),
    ] {
        assert_eq!(errors(text), [expected], "{}", &text[..text.len().min(40)]);
    }
    assert_eq!(errors([0x7f, b'E', b'L', b'F', 0xff]), ["f: not a text file in UTF-8"]);
    assert_eq!(
        errors(vec![b'#'; (1 << 20) + 1]),
        ["f: larger than 1 MiB: this is not a configuration file"]
    );
    for text in ["log:\n\tlevel: info\n", "a: [1, 2\n", "a: 'x\n", "a: b: c\n", "%x\n"] {
        let lines = errors(text);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("f: line "), "{lines:?}");
        assert!(lines[0].contains(": not valid YAML: "), "{lines:?}");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x");
    let read = |path: &Path| lines(path, load(path, [], &Overrides::default()));
    assert_eq!(read(&path), ["x: cannot read the configuration: No such file or directory"]);
    std::fs::create_dir(&path).unwrap();
    assert_eq!(read(&path), ["x: cannot read the configuration: Is a directory"]);
}

#[test]
fn empty_section_has_the_defaults() {
    let text = with("{level: info}", "").replace("admin: {bind: '127.0.0.1:9643'}", "admin: {}");
    let file = File::new(text.replace("  connections: {min: 1}", "  connections:"));
    let loaded = file.load(&[], &Overrides::default()).unwrap();
    let good = File::new(GOOD).load(&[], &Overrides::default()).unwrap();
    assert_eq!(loaded.config, good.config);
}

#[test]
fn all_errors_of_a_file_are_reported_together() {
    let text = "
admin: {bind: nowhere, colour: red}
log: 7
log: {level: loud}
workers: many
upstrems: []
upstreams:
- endpoints: ['10.0.0.1', '10.0.0.1:1', '10.0.0.1:1']
  tls: {}
  connections: {min: 9, max: 3}
  health: {ping_interval: 5, readyz: {rise: 0}}
- 5
listeners:
- name: l
  bind: ['127.0.0.1:1', '127.0.0.1:1']
  upstream: unknown
  tls: {cert_file: c}
  identities: [{cert: x}]
";
    let file = File::new(text);
    let env = [("JACKSTAY__LOG__FORMAT", "xml"), ("JACKSTAY__LISTENERS__0__NAME", "x")];
    let flags = Overrides { log_access: Some("some".into()), ..Overrides::default() };
    assert_eq!(
        lines(&file.path(), file.load(&env, &flags)),
        [
            "f: log: the key \"log\" appears twice here",
            "f: admin.colour: unknown key \"colour\"",
            "f: log: expected a map of keys, found the number 7",
            "f: upstrems: unknown key \"upstrems\"; did you mean upstreams?",
            "environment: JACKSTAY__LISTENERS__0__NAME: listeners is a list: a variable can only \
             set a value outside lists",
            "f: admin.bind: \"nowhere\" has no port: write it as 127.0.0.1:7443 or \"[::1]:7443\"",
            "f: workers: expected a whole number or auto, found the text \"many\"",
            "environment: JACKSTAY__LOG__FORMAT: \"xml\" is not one of text, json",
            "command line: log.access: \"some\" is not one of off, errors, all",
            "f: upstreams[0].name: is required: a unique name",
            "f: upstreams[0].endpoints[0]: \"10.0.0.1\" has no port: write it as 10.0.0.11:6443 or \
             \"[fd00::13]:6443\"",
            "f: upstreams[0].connections.min: 9 is more than max, which is 3",
            "f: upstreams[0].health.ping_interval: the duration \"5\" has no unit: write it as \
             250ms, 2s, 1m30s or 1h",
            "f: upstreams[0].health.readyz.rise: 0 is out of range: 1 to 100",
            "f: upstreams[1]: expected a map of keys, found the number 5",
            "f: listeners[0].tls.key_file: is required: the path of a file",
            "f: listeners[0].identities[0].cert_file: is required: the path of a file",
            "f: listeners[0].identities[0].key_file: is required: the path of a file",
            "f: listeners[0].identities[0].cert: unknown key \"cert\"",
            "f: listeners[0].client_ca_file: is required beside identities: without it no client \
             certificate can be verified",
            "f: listeners[0].bind[1]: 127.0.0.1:1 is already bound at listeners[0].bind[0]",
            "f: upstreams[0].endpoints[2]: 10.0.0.1:1 is already an endpoint at \
             upstreams[0].endpoints[1]",
            "f: listeners[0].upstream: there is no upstream \"unknown\"",
            "f: upstreams[0].tls.ca_file: is required: the path of a file",
        ]
    );
}

#[test]
fn flags_override_environment_override_file_override_defaults() {
    let file = File::new(with("{level: info}", "{level: warn, format: json, access: all}"));
    let env = [
        ("JACKSTAY__LOG__LEVEL", "debug"),
        ("JACKSTAY__LOG__FORMAT", "text"),
        ("JACKSTAY__WORKERS", "4"),
        ("JACKSTAY__STATE_DIR", ""),
        ("JACKSTAY_SERVICE_HOST", "10.0.0.1"),
        ("PATH", "/bin"),
    ];
    let flags = Overrides { log_level: Some("trace".into()), ..Overrides::default() };
    let config = file.load(&env, &flags).unwrap().config;
    let log = Log { level: Level::Trace, format: LogFormat::Text, access: AccessLog::All };
    assert_eq!(config.log, log);
    assert_eq!(config.workers, 4);
    assert_eq!(config.state_dir, None);
    assert_eq!(config.shutdown.drain_timeout.as_secs(), 20);
    let auto = file.load(&[("JACKSTAY__WORKERS", "auto")], &Overrides::default()).unwrap();
    assert!(auto.config.workers >= 1);
}

#[test]
fn memory_limit_is_a_size_or_auto() {
    let file = File::new(GOOD);
    let limit = |value| {
        let loaded = file.load(&[("JACKSTAY__MEMORY_LIMIT", value)], &Overrides::default());
        loaded.map(|loaded| loaded.config.memory_limit.to_string()).map_err(|e| e.to_string())
    };
    assert_eq!(
        file.load(&[], &Overrides::default()).unwrap().config.memory_limit.to_string(),
        "auto"
    );
    assert_eq!(limit("auto").unwrap(), "auto");
    assert_eq!(limit("8GiB").unwrap(), "8GiB");
    for (value, expected) in
        [("1MiB", "16MiB"), ("many", "\"many\" is not a size"), ("100", "has no unit")]
    {
        let error = limit(value).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn invalid_environment_variable_is_refused() {
    let list = "is a list: a variable can only set a value outside lists";
    for (name, value, expected) in [
        ("JACKSTAY__UPSTREAMS", "x", format!("upstreams {list}")),
        ("JACKSTAY__UPSTREAMS__0__NAME", "x", format!("upstreams {list}")),
        ("JACKSTAY__UPSTREAMS[0]", "x", format!("upstreams {list}")),
        (
            "JACKSTAY__LOG",
            "x",
            "log is a section; set one of its keys: level, format, access".to_owned(),
        ),
        (
            "JACKSTAY__LOG__LEVL",
            "x",
            "there is no configuration key \"log.levl\"; did you mean JACKSTAY__LOG__LEVEL?"
                .to_owned(),
        ),
        ("JACKSTAY__COLOR", "x", "there is no configuration key color".to_owned()),
        ("JACKSTAY__", "x", "there is no configuration key \"\"".to_owned()),
        ("JACKSTAY__WORKERS", "few", "\"few\" is not a whole number or auto".to_owned()),
        ("JACKSTAY__WORKERS", "0", "0 is out of range: 1 to 256".to_owned()),
        (
            "JACKSTAY__SHUTDOWN__DRAIN_TIMEOUT",
            "5",
            "the duration \"5\" has no unit: write it as 250ms, 2s, 1m30s or 1h".to_owned(),
        ),
    ] {
        let found = errors_of_good_file_with(&[(name, value)], &Overrides::default());
        assert_eq!(found, [format!("environment: {name}: {expected}")]);
    }
}

#[test]
fn metrics_bind_needs_tls_and_clients_that_may_read() {
    let at = |keys: &str| with("{bind: '127.0.0.1:9643'}", &format!("{{{keys}}}"));
    let pair = "metrics_cert_file: /c, metrics_key_file: /k";
    let reviews = "metrics_review_upstream: u";
    let tls_only = "is required with admin.metrics_bind: the metrics are served over TLS only";
    for keys in [
        format!("metrics_bind: '0.0.0.0:9646', {pair}, {reviews}"),
        format!(
            "metrics_bind: '[::]:9646', {pair}, metrics_client_ca_file: /ca, metrics_client_name: p"
        ),
        format!("metrics_bind: '10.0.0.5:9646', {pair}, {reviews}, metrics_client_ca_file: /ca"),
    ] {
        assert_eq!(errors(at(&keys)), [""; 0], "{keys}");
    }
    for (keys, expected) in [
        (
            format!("metrics_bind: '0.0.0.0:9646', {reviews}"),
            vec![
                format!("f: admin.metrics_cert_file: {tls_only}"),
                format!("f: admin.metrics_key_file: {tls_only}"),
            ],
        ),
        (
            format!("metrics_bind: '0.0.0.0:9646', {pair}, metrics_client_ca_file: /ca"),
            vec!["f: admin.metrics_bind: needs admin.metrics_review_upstream (reviews of tokens) or \
                  admin.metrics_client_ca_file with admin.metrics_client_name (a client certificate): nobody \
                  could read the metrics".to_owned()],
        ),
        (
            format!("metrics_bind: '0.0.0.0:9646', {pair}, metrics_client_name: p"),
            vec!["f: admin.metrics_client_ca_file: is required with admin.metrics_client_name: the CA of these \
                  client certificates".to_owned()],
        ),
        (
            format!("metrics_bind: '0.0.0.0:9646', {pair}, metrics_review_upstream: v"),
            vec!["f: admin.metrics_review_upstream: there is no upstream \"v\"; there is u".to_owned()],
        ),
        (
            format!("bind: '0.0.0.0:9646', metrics_bind: '10.0.0.5:9646', {pair}, {reviews}"),
            vec!["f: admin.metrics_bind: 10.0.0.5:9646 collides with 0.0.0.0:9646, bound at admin.bind".to_owned()],
        ),
        (
            reviews.to_owned(),
            vec!["f: admin.metrics_review_upstream: has no effect without admin.metrics_bind".to_owned()],
        ),
    ] {
        assert_eq!(errors(at(&keys)), expected, "{keys}");
    }
    // The tokens of clients go only to servers that are verified.
    let text = at(&format!("metrics_bind: '0.0.0.0:9646', {pair}, metrics_review_upstream: v"))
        .replace("upstreams:\n", "upstreams:\n- {name: v, endpoints: ['10.0.0.2:1']}\n");
    assert_eq!(errors(text), ["f: upstreams[0].tls.ca_file: is required: the path of a file"]);
}

#[test]
fn exposed_admin_endpoint_and_unused_upstream_are_warnings() {
    let text = with("'127.0.0.1:9643'", "'0.0.0.0:9643'").replace(
        "upstreams:\n",
        "upstreams:\n- {name: v, endpoints: ['10.0.0.2:1'], tls: {ca_file: c}}\n",
    );
    let file = File::new(text);
    let warnings = file.load(&[], &Overrides::default()).unwrap().warnings;
    let path = file.path();
    let path = path.display();
    assert_eq!(
        warnings,
        [
            format!(
                "{path}: line 1: admin.bind: not a loopback address: every host that can connect to it can \
                 read status and metrics; admin.metrics_bind serves the metrics alone, to authorised clients"
            ),
            format!("{path}: line 4: upstreams[0].name: no listener uses the upstream \"v\""),
        ]
    );
}

/// Random sequences of the tokens of [`GOOD`] and of special YAML tokens.
fn pieces() -> impl Strategy<Value = String> {
    let words: Vec<&str> = GOOD.split_inclusive([' ', '\n', ':', '{', '}', '[', ']']).collect();
    let special = [
        "- ",
        "? ",
        ": ",
        "&a ",
        "*a",
        "|\n",
        ">\n",
        "\t",
        "\"",
        "'",
        "!!int ",
        "---\n",
        "...\n",
        "~",
        "1e999",
        "-",
        ".",
        "%",
        "@",
        "\u{feff}",
        "\u{0}",
        "\u{2028}",
        "99999999999999999999",
        "{{",
        "<<: ",
        "#",
        "\\x",
        "\r\n",
        "\r",
    ];
    let tokens: Vec<String> = words.into_iter().chain(special).map(str::to_owned).collect();
    proptest::collection::vec(proptest::sample::select(tokens), 0..60)
        .prop_map(|chosen| chosen.concat())
}

/// Each error is one line that begins with the file name.
fn assert_lines(found: &[String]) {
    for line in found {
        assert!(line.starts_with("f: "), "{line:?}");
        assert!(!line.contains(['\r', '\0', '\u{1b}']), "{line:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn load_arbitrary_bytes_does_not_panic(bytes: Vec<u8>) {
        assert_lines(&errors(bytes));
    }

    #[test]
    fn load_arbitrary_text_does_not_panic(text in "\\PC{0,80}") {
        assert_lines(&errors(text));
    }

    #[test]
    fn load_similar_yaml_does_not_panic(text in pieces()) {
        assert_lines(&errors(text));
    }

    #[test]
    fn load_mutated_file_does_not_panic(at in 0..GOOD.len(), until in 0..GOOD.len(), piece in pieces()) {
        let (from, to) = (at.min(until), at.max(until).min(at + 8).max(at.min(until)));
        assert_lines(&errors(format!("{}{piece}{}", &GOOD[..from], &GOOD[to..])));
    }

    #[test]
    fn load_arbitrary_variables_does_not_panic(name in "JACKSTAY__[A-Z_.\\[\\]0-9é]{0,20}", value: String) {
        let _ = errors_of_good_file_with(&[(&name, &value)], &Overrides::default());
    }
}

#[test]
fn version_preference_and_canary_are_read_and_checked() {
    let with = |more: &str| {
        let text = GOOD.replacen(
            "  tls: {ca_file: /ca}\n",
            &format!("  tls: {{ca_file: /ca}}\n{more}"),
            1,
        );
        File::new(text).load(&[], &Overrides::default())
    };
    let upstream = |more| with(more).unwrap().config.upstreams.remove(0);
    let default = upstream("");
    assert_eq!(default.version_preference, VersionPreference::None);
    assert_eq!(default.canary, Percent::ZERO);
    let set = upstream("  version_preference: newest\n  canary: 10%\n");
    assert_eq!(set.version_preference, VersionPreference::Newest);
    assert_eq!(set.canary.to_string(), "10%");
    let printed = serde_json::to_value(&set).unwrap();
    assert_eq!(
        (&printed["version_preference"], &printed["canary"]),
        (&"newest".into(), &"10%".into())
    );
    for (more, error) in [
        ("  canary: 10\n", "canary: the share \"10\" has no unit: write it as 10%"),
        ("  canary: 101%\n", "canary: 101% is out of range: 0% to 100%"),
        ("  canary: ten\n", "canary: \"ten\" is not a share: write it as 10%"),
        (
            "  version_preference: oldest\n",
            "version_preference: \"oldest\" is not one of newest, none",
        ),
    ] {
        let errors = with(more).unwrap_err().to_string();
        assert!(errors.contains(error), "{errors}");
    }
}
