//! What an operator gives to the program: PEM files, names, server URLs, arguments, environment variables.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use jackstay::cli::check_arguments;
use jackstay_config::{Overrides, draft_from_flags};
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_kubeconfig::ServerUrl;
use jackstay_net::tls::local_ca::{self, LocalCa};
use jackstay_net::tls::pem_files::{ca_from_pem, cert_from_pem, valid_certificates};
use jackstay_operator::kubeconfig::setup::node_name;

const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";

/// PEM: each BEGIN line of a certificate gives a trust anchor or a sentence, and no sentence has a control character.
pub(super) fn pem(bytes: &[u8]) {
    let path = Path::new("/x.pem");
    let lines = bytes.split(|byte| matches!(byte, b'\n' | b'\r'));
    let begins = lines.filter(|line| line.trim_ascii() == BEGIN).count();
    let assert_text = |text: &str| assert!(!text.chars().any(char::is_control), "{text:?}");
    match ca_from_pem(path, bytes) {
        Ok(ca) => {
            let (used, skipped) = (ca.roots.len(), ca.bundle.skipped.len());
            assert!(
                used > 0 && used + skipped >= begins,
                "{begins} begin, {used} used, {skipped} skipped"
            );
            ca.bundle.skipped.iter().chain(&ca.bundle.notes).for_each(|text| assert_text(text));
            assert!(used <= valid_certificates(bytes).len());
        }
        Err(error) => assert_text(&error.to_string()),
    }
    match cert_from_pem((path, bytes), (path, bytes)) {
        Ok(pair) => {
            assert!(!pair.chain.is_empty() && pair.chain.len() + pair.skipped.len() >= begins);
            pair.skipped.iter().chain(&pair.notes).for_each(|text| assert_text(text));
        }
        Err(error) => assert_text(&error.to_string()),
    }
}

/// Names of machines: an accepted one stands in a certificate and its CA, and is accepted again.
pub(super) fn node_name(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000);
    // Each certificate needs two keys, which takes long.
    for line in text.lines().take(2) {
        let Ok(name) = node_name::parse(line) else {
            let _ = LocalCa::create(line, &[line.to_owned()], now);
            continue;
        };
        assert_eq!(node_name::parse(&name).as_ref(), Ok(&name));
        let created = local_ca::create_serving_cert(line, std::slice::from_ref(&name), now);
        let created = created.unwrap_or_else(|error| panic!("{name:?}: {error}"));
        let serving = &valid_certificates(created.pair.as_bytes())[0];
        assert_eq!(local_ca::subject_alt_names(serving), Ok(vec![name]));
        let ca = ca_from_pem(Path::new("/ca"), created.ca.as_bytes()).expect("a CA");
        assert!(ca.bundle.skipped.is_empty());
    }
}

/// Server URLs and addresses of endpoints: what is accepted is accepted again, with the same result.
pub(super) fn server_url(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for line in text.lines() {
        if let Ok(url) = ServerUrl::parse(line) {
            assert_eq!(ServerUrl::parse(&url.to_string()).as_ref(), Ok(&url), "{line:?}");
            let _ = EndpointAddress::parse(&url.address());
        }
        if let Ok(address) = EndpointAddress::parse(line) {
            assert_eq!(EndpointAddress::parse(&address.to_string()), Ok(address));
        }
    }
}

/// The arguments of the program, each of which a zero byte ends: valid, or an error with a text.
pub(super) fn arguments(bytes: &[u8]) {
    let arguments = bytes.split(|byte| *byte == 0).take(64);
    let arguments = arguments.map(|argument| OsString::from_vec(argument.to_vec()));
    let arguments: Vec<OsString> = std::iter::once("jackstay".into()).chain(arguments).collect();
    if let Err(error) = check_arguments(&arguments) {
        assert!(!error.trim().is_empty());
    }
}

/// Environment variables and lists of flags: a configuration, or an error.
pub(super) fn environment(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let variables = text.lines().take(8).filter_map(|line| line.split_once('='));
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let list: Vec<String> = text.lines().take(3).map(ToOwned::to_owned).collect();
    let first = list.first().cloned();
    let overrides = Overrides {
        admin_bind: first.clone(),
        workers: first.clone(),
        log_level: first,
        ..Overrides::default()
    };
    for overrides in [Overrides::default(), overrides] {
        let listen =
            if overrides.workers.is_some() { &list[..] } else { &["127.0.0.1:0".to_owned()] };
        let draft = draft_from_flags(listen, listen, variables.clone(), &overrides);
        assert!(draft.config.is_some() || !draft.errors.is_empty());
    }
}
