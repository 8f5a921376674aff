//! The verdicts of this verifier and those of Go on the same chains.
//!
//! Go's verdicts in the table were recorded with `tests/program/cases/verdicts.go` under Go 1.19 (Debian 12) and
//! Go 1.27; `recorded_verdicts_are_those_of_go` runs it again where a `go` is installed.

mod inputs;

use std::path::Path;
use std::process::Command;

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, CustomExtension, DistinguishedName, DnType,
    DnValue, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, SanType, SigningKey,
};
use rustls::pki_types::pem::PemObject;

use self::inputs::cases;
use super::*;

/// 2027-01-01.
const NOW: u64 = 1_798_761_600;
const SERVER_AUTH: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ServerAuth;
const CLIENT_AUTH: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ClientAuth;
const ANY: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::Any;

/// What this verifier does beside Go.
#[derive(Debug, Clone, Copy)]
enum Decision {
    /// Both accept.
    Accepted,
    /// Both refuse; the sentence contains this.
    Refused(&'static str),
    /// Go accepts, this verifier refuses with a sentence that contains this.
    OnlyGo(&'static str),
    /// Some versions of Go refuse, this verifier accepts.
    NotAllGo,
}
use Decision::{Accepted, NotAllGo, OnlyGo, Refused};

struct Case {
    input: String,
    bundle: Vec<CertificateDer<'static>>,
    chain: Vec<CertificateDer<'static>>,
    /// The server to verify; a client without one.
    server: Option<&'static str>,
    decision: Decision,
}

fn named(cn: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, cn);
    params.serial_number = Some(vec![1, 2].into());
    params.not_before = rcgen::date_time_ymd(2026, 1, 1);
    params.not_after = rcgen::date_time_ymd(2028, 1, 1);
    params
}

fn key() -> KeyPair {
    KeyPair::generate().unwrap()
}

/// A CA with its key.
struct Ca {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
}

impl Ca {
    fn params(cn: &str) -> CertificateParams {
        let mut params = named(cn);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
    }

    fn root(change: impl FnOnce(&mut CertificateParams)) -> Self {
        let mut params = Self::params("root");
        change(&mut params);
        let key = key();
        let der = params.self_signed(&key).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), der }
    }

    fn plain() -> Self {
        Self::root(|_| ())
    }

    fn sub(&self, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let mut params = Self::params("sub");
        change(&mut params);
        let key = key();
        let der = params.signed_by(&key, &self.issuer).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), der }
    }

    fn leaf(&self, change: impl FnOnce(&mut CertificateParams)) -> CertificateDer<'static> {
        leaf_params(change).signed_by(&key(), &self.issuer).unwrap().der().clone()
    }
}

/// A leaf with the address 127.0.0.1.
fn leaf_params(change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = named("leaf");
    params.subject_alt_names = vec![SanType::IpAddress("127.0.0.1".parse().unwrap())];
    change(&mut params);
    params
}

fn self_signed(change: impl FnOnce(&mut CertificateParams)) -> CertificateDer<'static> {
    leaf_params(change).self_signed(&key()).unwrap().der().clone()
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

fn extension(oid: &[u64], content: &[u8], critical: bool) -> CustomExtension {
    let mut extension = CustomExtension::from_oid_content(oid, content.to_vec());
    extension.set_criticality(critical);
    extension
}

/// Replaces bytes of the signed part by as many others, and signs it again.
fn resigned(
    der: &CertificateDer<'_>,
    key: &KeyPair,
    (old, new): (&[u8], &[u8]),
) -> CertificateDer<'static> {
    assert_eq!(old.len(), new.len());
    let parsed = crate::tls::certificate::parse(der).unwrap();
    let mut signed = parsed.tbs_certificate.as_ref().to_vec();
    let at = signed.windows(old.len()).position(|window| window == old).unwrap();
    signed[at..at + new.len()].copy_from_slice(new);
    let element = |tag: u8, content: &[u8]| {
        let [high, low] = u16::try_from(content.len()).unwrap().to_be_bytes();
        let head = if content.len() < 128 { vec![tag, low] } else { vec![tag, 0x82, high, low] };
        [&head, content].concat()
    };
    let signature = [&[0][..], &key.sign(&signed).unwrap()].concat();
    let ecdsa_with_sha256 = [0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
    let content = [signed, ecdsa_with_sha256.to_vec(), element(3, &signature)].concat();
    element(0x30, &content).into()
}

/// A leaf of `ca` with replaced bytes.
fn patched(
    ca: &Ca,
    change: impl FnOnce(&mut CertificateParams),
    bytes: (&[u8], &[u8]),
) -> CertificateDer<'static> {
    resigned(&ca.leaf(change), ca.issuer.key(), bytes)
}

/// A server with the address 127.0.0.1.
fn server(
    input: &str,
    bundle: &[&CertificateDer<'static>],
    chain: &[&CertificateDer<'static>],
    decision: Decision,
) -> Case {
    let owned = |list: &[&CertificateDer<'static>]| list.iter().map(|der| (*der).clone()).collect();
    let (bundle, chain) = (owned(bundle), owned(chain));
    Case { input: input.to_owned(), bundle, chain, server: Some("127.0.0.1"), decision }
}

fn client(
    input: &str,
    bundle: &[&CertificateDer<'static>],
    chain: &[&CertificateDer<'static>],
    decision: Decision,
) -> Case {
    Case { server: None, ..server(input, bundle, chain, decision) }
}

/// A server whose leaf has these names.
fn names(input: &str, names: Vec<SanType>, wanted: &'static str, decision: Decision) -> Case {
    let ca = Ca::plain();
    let leaf = ca.leaf(|params| params.subject_alt_names = names);
    Case { server: Some(wanted), ..server(input, &[&ca.der], &[&leaf], decision) }
}

/// A leaf with the name `a.example` and an e-mail address and URI in `sans`, below a root with constraints.
fn constrained(
    input: &str,
    (permitted, excluded): (Vec<GeneralSubtree>, Vec<GeneralSubtree>),
    sans: Vec<SanType>,
    decision: Decision,
) -> Case {
    let constraints =
        NameConstraints { permitted_subtrees: permitted, excluded_subtrees: excluded };
    let ca = Ca::root(|params| params.name_constraints = Some(constraints));
    let leaf = ca.leaf(|params| params.subject_alt_names = [vec![dns("a.example")], sans].concat());
    Case { server: Some("a.example"), ..server(input, &[&ca.der], &[&leaf], decision) }
}

fn verdict(case: &Case) -> Result<(), CertificateRefusal> {
    let mut trusted = TrustedCas::new(Path::new("ca.crt"));
    for certificate in &case.bundle {
        trusted.add(certificate.clone()).unwrap();
    }
    let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
    let (leaf, rest) = case.chain.split_first().unwrap();
    match case.server {
        Some(name) => trusted.verify_server(leaf, rest, &ServerName::try_from(name).unwrap(), now),
        None => trusted.verify_client(leaf, rest, now),
    }
}

#[test]
fn certificates_are_accepted_as_go_accepts_them() {
    let mut wrong = Vec::new();
    for case in cases() {
        let verdict = verdict(&case).map_err(|refusal| refusal.to_string());
        let is_right = match (case.decision, &verdict) {
            (Accepted | NotAllGo, Ok(())) => true,
            (Refused(text) | OnlyGo(text), Err(sentence)) => sentence.contains(text),
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{}: {:?}, but {verdict:?}", case.input, case.decision));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn pem(certificates: &[CertificateDer<'_>]) -> String {
    certificates.iter().map(|der| rustls_pem(der)).collect()
}

fn rustls_pem(der: &CertificateDer<'_>) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

/// Runs `tests/program/cases/verdicts.go` on the cases. `GO` names the program, else `go`.
#[test]
#[ignore = "needs Go"]
fn recorded_verdicts_are_those_of_go() {
    let dir = tempfile::tempdir().unwrap();
    let cases = cases();
    for (number, case) in cases.iter().enumerate() {
        let write = |kind: &str, text: String| {
            std::fs::write(dir.path().join(format!("{number}.{kind}")), text).unwrap();
        };
        write("bundle", pem(&case.bundle));
        write("chain", pem(&case.chain));
        write("server", case.server.unwrap_or_default().to_owned());
    }
    let go = std::env::var("GO").unwrap_or_else(|_| "go".to_owned());
    let program =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/program/cases/verdicts.go");
    let run = Command::new(go)
        .args(["run".as_ref(), program.as_os_str(), dir.path().as_os_str()])
        .args([NOW.to_string(), cases.len().to_string()])
        .output()
        .unwrap();
    let verdicts = String::from_utf8(run.stdout).unwrap();
    let verdicts: Vec<&str> = verdicts.lines().collect();
    assert_eq!(verdicts.len(), cases.len(), "{}", String::from_utf8_lossy(&run.stderr));
    let differs = |(case, go): &(&Case, &&str)| match case.decision {
        Accepted | OnlyGo(_) => **go != "ok",
        Refused(_) => **go == "ok",
        NotAllGo => false,
    };
    let wrong: Vec<String> = cases
        .iter()
        .zip(&verdicts)
        .filter(differs)
        .map(|(case, go)| format!("{}: {:?}, but Go says {go}", case.input, case.decision))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
