//! Files: the configuration, kubeconfigs, lists of endpoints, saved endpoints.

use std::path::Path;
use std::time::{Duration, SystemTime};

use jackstay::control::discovery::state_file;
use jackstay_config::endpoints_file;
use jackstay_config::{format_duration, format_size, parse_duration, parse_size, validate_text};
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_kubeconfig::model::{Kubeconfig, NamedCluster};
use jackstay_kubeconfig::{KubeconfigFile, ResolvedContext, ServerUrl, kubeconfig_yaml};
use jackstay_operator::kubeconfig::rewrite::{ClientTrust, LocalEndpoint, point_at, revert};
use jackstay_sys::files::authorization;

/// A configuration: it is valid, or there is an error.
pub(super) fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(errors) = validate_text(Path::new("/jackstay.yaml"), text) {
        assert!(!errors.0.is_empty());
    }
    let line = text.lines().next().unwrap_or_default();
    if let Ok(duration) = parse_duration(line) {
        let written = format_duration(duration);
        let again = parse_duration(&written).map(format_duration);
        assert_eq!(again.as_ref(), Ok(&written), "{line:?}");
    }
    if let Ok(size) = parse_size(line) {
        assert_eq!(parse_size(&format_size(size)), Ok(size), "{line:?}");
    }
}

/// A kubeconfig: what is written can be read again, and a revert restores the cluster.
pub(super) fn kubeconfig(bytes: &[u8]) {
    let path = Path::new("/etc/kubeconfig");
    let Ok(file) = KubeconfigFile::parse(path, bytes) else { return };
    let mut config = file.with_absolute_paths();
    let names: Vec<String> = config.contexts.iter().map(|named| named.name.clone()).collect();
    let _ = ResolvedContext::resolve(&config, None);
    let entries = |config: &Kubeconfig| {
        let text = |cluster: &NamedCluster| serde_json::to_string(cluster).expect("JSON");
        let clusters: Vec<String> = config.clusters.iter().map(text).collect();
        let others = (&config.auth_infos, &config.contexts, &config.current_context);
        (clusters, serde_json::to_string(&others).expect("JSON"))
    };
    let before = entries(&config);
    for name in &names {
        let Ok(context) = ResolvedContext::resolve(&config, Some(name)) else { continue };
        let trust = ClientTrust::Apiserver(Some("kubernetes".to_owned()));
        let (address, configuration) = ("127.0.0.1:7443".to_owned(), None);
        let endpoint = LocalEndpoint { address, trust, configuration };
        let mut named = config.clusters.iter_mut().filter_map(|named| named.cluster.as_mut());
        let Some(cluster) = named.next() else { continue };
        point_at(cluster, &context.server, &endpoint);
        assert_eq!(cluster.tls_server_name.as_deref(), Some("kubernetes"));
        let rewritten = entries(&config);
        assert_eq!(rewritten.1, before.1, "only a cluster changes");
        let pairs = rewritten.0.iter().zip(&before.0);
        assert!(pairs.filter(|(now, before)| now != before).count() <= 1);
        let mut named = config.clusters.iter_mut().filter_map(|named| named.cluster.as_mut());
        let Some(cluster) = named.next() else { continue };
        revert(cluster);
        let reverted = cluster.clone();
        point_at(cluster, &context.server, &endpoint);
        revert(cluster);
        assert_eq!(format!("{:?}", reverted.server), format!("{:?}", cluster.server));
    }
    if let Ok(written) = kubeconfig_yaml(&config)
        && let Err(error) = KubeconfigFile::parse(path, written.as_bytes())
    {
        panic!("{error}: {written}");
    }
}

/// A list of endpoints, and the texts of addresses and tokens: a parsed address parses again.
pub(super) fn endpoints_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for candidate in endpoints_file::parse(text).candidates {
        let address = candidate.address;
        assert_eq!(EndpointAddress::parse(&address.to_string()), Ok(address));
    }
    for line in text.lines() {
        let _ = ServerUrl::parse(line);
    }
    if let Ok(value) = authorization(text) {
        assert!(!value.as_bytes().iter().any(|byte| *byte < b' ' && *byte != b'\t'));
    }
}

/// Saved endpoints: at least one and at most 256, all of them addresses.
pub(super) fn state_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000);
    if let Ok(saved) = state_file::parse(text, "control-plane", now) {
        assert!((1..=256).contains(&saved.endpoints.len()));
        assert!(saved.endpoints.iter().all(|(_, candidate)| !candidate.address.is_name()));
    }
}
