//! Certificate, key and CA files: their content, and the errors of invalid ones.

use super::*;
use crate::tls::certificate::{Subject, Validity, X509Error};
use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair};
use rustls::pki_types::pem::PemObject;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

const CN: &[u64] = &[2, 5, 4, 3];
const O: &[u64] = &[2, 5, 4, 10];
const UID: &[u64] = &[1, 3, 6, 1, 4, 1, 57683, 2];
const RFC4519_UID: &[u64] = &[0, 9, 2342, 19_200_300, 100, 1, 1];

fn certificate(names: &[(&[u64], DnValue)]) -> (String, KeyPair) {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    for (oid, value) in names {
        params.distinguished_name.push(DnType::from_oid(oid), value.clone());
    }
    params.not_before = rcgen::date_time_ymd(2020, 1, 2);
    params.not_after = rcgen::date_time_ymd(2030, 3, 4);
    params.serial_number = Some(vec![0x0a, 0xff].into());
    let key = KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key)
}

fn node() -> (String, KeyPair) {
    certificate(&[(O, "system:nodes".into()), (CN, "system:node:n1".into())])
}

fn subject(names: &[(&[u64], DnValue)]) -> Result<Subject, X509Error> {
    let (pem, _) = certificate(names);
    Subject::from_der(&CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
}

/// A directory of test files.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, contents).unwrap();
        path
    }

    fn load(&self, cert: &str, key: &str) -> Result<LoadedCert, String> {
        let (cert_file, key_file) = (self.0.path().join(cert), self.0.path().join(key));
        load_cert(&CertPaths { cert_file, key_file }).map_err(|e| self.message(&e))
    }

    /// The message of an error, with paths relative to the directory.
    fn message(&self, error: &TlsFileError) -> String {
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }
}

#[test]
fn subjects_are_equal_if_kubernetes_treats_them_as_the_same_user() {
    let node = subject(&[(O, "system:nodes".into()), (CN, "system:node:n1".into())]).unwrap();
    assert_eq!(node.to_string(), "CN=system:node:n1, O=system:nodes");
    assert_eq!(node.common_name(), Some("system:node:n1"));
    let printable = DnValue::PrintableString("system:nodes".try_into().unwrap());
    let same = subject(&[(CN, "system:node:n1".into()), (O, printable)]).unwrap();
    assert_eq!(node, same, "the order of attributes and their string types do not matter");

    let name: (&[u64], DnValue) = (CN, "system:node:n1".into());
    for other in [
        subject(&[(O, "system:nodes".into()), (CN, "system:node:n2".into())]),
        subject(&[(O, "system:masters".into()), name.clone()]),
        subject(std::slice::from_ref(&name)),
        subject(&[(O, "system:nodes".into()), name, (UID, "1".into())]),
        subject(&[]),
    ] {
        assert_ne!(other, Ok(node.clone()));
    }
    let empty = subject(&[]).unwrap();
    assert_eq!((empty.common_name(), empty.to_string()), (None, "(empty subject)".into()));
    assert_eq!(subject(&[(CN, "".into())]).unwrap().common_name(), None);
    let with_separators = subject(&[(CN, "a\nb, O=x".into())]).unwrap();
    assert_eq!(with_separators.to_string(), "CN=a\\nb\\, O=x");
    let teletex = DnValue::TeletexString("n1".try_into().unwrap());
    assert_eq!(subject(&[(CN, teletex)]), subject(&[(CN, "n1".into())]));
    let bmp = DnValue::BmpString("n1".try_into().unwrap());
    assert_eq!(subject(&[(CN, bmp)]), subject(&[(CN, "n1".into())]));
    let universal = DnValue::UniversalString("n1".try_into().unwrap());
    assert!(matches!(subject(&[(CN, universal)]), Err(X509Error::NameType(_))));
}

/// kube-apiserver reads the UID of a user only from its own attribute, not from `uid` of RFC 4519. For it, the
/// first of these subjects is a user with a UID and the second is the same user without one.
#[test]
fn subject_with_kubernetes_uid_differs_from_subject_with_rfc4519_uid() {
    let name: (&[u64], DnValue) = (CN, "alice".into());
    let kubernetes = subject(&[name.clone(), (UID, "1000".into())]).unwrap();
    let rfc4519 = subject(&[name.clone(), (RFC4519_UID, "1000".into())]).unwrap();
    assert_ne!(kubernetes, rfc4519);
    assert_ne!(rfc4519, subject(std::slice::from_ref(&name)).unwrap());
    assert_ne!(rfc4519, subject(&[name, (RFC4519_UID, "1001".into())]).unwrap());
    assert_eq!(kubernetes.to_string(), "CN=alice, UID=1000");
    assert_eq!(rfc4519.to_string(), "CN=alice, uid=1000");
}

#[test]
fn cert_info_has_serial_and_validity() {
    let (pem, _) = node();
    let info = cert_info(&CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
    assert_eq!(info.serial, "0AFF");
    assert_eq!(info.not_before, UNIX_EPOCH + Duration::from_secs(1_577_923_200), "2020-01-02");
    let second = Duration::from_secs(1);
    let path = Path::new("/x.crt");
    assert_eq!(info.check_time(path, info.not_before), Ok(()));
    assert_eq!(info.check_time(path, info.not_after), Ok(()));
    assert_eq!(info.validity(info.not_before - second), Validity::NotYet);
    assert_eq!(
        info.check_time(path, info.not_after + second).unwrap_err().to_string(),
        "/x.crt: the certificate of CN=system:node:n1, O=system:nodes expired on 2030-03-04"
    );
}

#[test]
fn load_cert_reads_a_pair_from_two_files_or_one() {
    let files = Files::new();
    let (pem, key) = node();
    files.write("c", &pem);
    files.write("k", key.serialize_pem());
    files.write("both", format!("{}# a comment\n{pem}", key.serialize_pem()));
    let separate = files.load("c", "k").unwrap();
    let combined = files.load("both", "both").unwrap();
    assert_eq!(separate.info, combined.info);
    assert_eq!(separate.key(), combined.key());
    assert_eq!(separate.fingerprint, files.load("c", "k").unwrap().fingerprint);
    let (pem, key) = node();
    files.write("c", &pem);
    files.write("k", key.serialize_pem());
    assert_ne!(separate.fingerprint, files.load("c", "k").unwrap().fingerprint);
    assert!(!format!("{separate:?}").to_lowercase().contains("key"));
}

#[test]
fn load_cert_names_the_file_and_the_problem() {
    let files = Files::new();
    let (pem, key) = node();
    files.write("c", &pem);
    files.write("chain", format!("{pem}{}", node().0));
    files.write("k", key.serialize_pem());
    files.write("other", KeyPair::generate().unwrap().serialize_pem());
    files.write("empty", "");
    files.write("garbage", [0xff, 0, b'-', b'\n', 7]);
    files.write("base64", "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n");
    files.write("open", "-----BEGIN CERTIFICATE-----\nAAAA\n");
    files.write("der", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    files.write("badkey", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
    files.write(
        "locked",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    );
    fs::create_dir(files.0.path().join("dir")).unwrap();
    for (cert, key, expected) in [
        ("none", "k", "cannot read none: No such file or directory"),
        ("c", "none", "cannot read none: No such file or directory"),
        ("dir", "k", "cannot read dir: not a regular file"),
        ("c", "other", "other: the private key does not belong to the certificate in c"),
        (
            "chain",
            "other",
            "other: the private key does not belong to the certificate in chain (its first \
             one: the leaf must come first)",
        ),
        ("empty", "k", "empty: is empty"),
        ("garbage", "k", "garbage: contains no certificate (PEM, -----BEGIN CERTIFICATE-----)"),
        (
            "k",
            "k",
            "k: contains no certificate (PEM, -----BEGIN CERTIFICATE-----); it contains PRIVATE KEY (line 1)",
        ),
        (
            "c",
            "c",
            "c: contains no private key (PEM, -----BEGIN PRIVATE KEY-----); it contains CERTIFICATE (line 1)",
        ),
        ("der", "k", "der: line 1: cannot read the certificate: not an X.509 certificate"),
        (
            "c",
            "locked",
            "locked: line 1: the private key is encrypted; store it without a passphrase (openssl pkey -in FILE \
             -out NEW-FILE)",
        ),
        ("base64", "k", "base64: line 1: the certificate is not read: line 2 is not Base64"),
        (
            "open",
            "k",
            "open: line 1: the certificate is not read: it has no END line: the file is truncated",
        ),
    ] {
        assert_eq!(files.load(cert, key).unwrap_err(), expected, "{cert} {key}");
    }
    let message = files.load("c", "badkey").unwrap_err();
    assert!(
        message.starts_with("badkey: line 1: the private key is damaged or of a kind"),
        "{message}"
    );
    let missing = load_ca(&files.0.path().join("none")).unwrap_err();
    assert!(missing.is_missing());
}

#[test]
fn load_ca_reads_every_certificate_of_a_bundle() {
    let files = Files::new();
    let bundle = format!("{}{}{}", node().0, node().0, node().1.serialize_pem());
    let ca = load_ca(&files.write("ca", bundle)).unwrap();
    assert_eq!((ca.roots.len(), ca.bundle.certificates.len()), (2, 2));
    let message =
        |contents: &str| files.message(&load_ca(&files.write("ca", contents)).unwrap_err());
    assert_eq!(message("a\n"), "ca: contains no certificate (PEM, -----BEGIN CERTIFICATE-----)");
    assert_eq!(
        message("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        "ca: no certificate in it can be used as a CA: line 1: not an X.509 certificate"
    );
}

/// A bundle of two certificates: both are in use, or the one that is not is in [`CaBundle::skipped`].
#[test]
fn load_ca_never_drops_a_certificate_silently() {
    let files = Files::new();
    let (first, second) = (node().0.replace("\r\n", "\n"), node().0.replace("\r\n", "\n"));
    let line = first.lines().count() + 1;
    let label = |from: &str, to: &str| second.replace(from, to);
    let without = |part: &str| second.replace(part, "");
    let lines: Vec<&str> = second.lines().collect();
    let (body, end) = (lines[2], "-----END CERTIFICATE-----");
    let both: [(String, &str); 6] = [
        (format!("{}{second}", first.trim_end()), "other text follows the END"),
        (format!("{first}{}", second.trim_end()), ""),
        (format!("{first}{second}").replace('\n', "\r\n"), ""),
        (format!("{first}{second}").replace('\n', "\r"), "carriage returns alone"),
        (format!("\u{feff}{first}{second}"), "byte order mark"),
        (format!("{first}  {}", second.replace('\n', "\n  ")), "indented"),
    ];
    for (text, note) in &both {
        let loaded = load_ca(&files.write("ca", text)).unwrap();
        assert_eq!((loaded.roots.len(), loaded.bundle.count), (2, 2), "{note}");
        assert_eq!(loaded.bundle.skipped, [""; 0], "{note}");
        let notes = loaded.bundle.notes.concat();
        assert_eq!(notes.is_empty(), note.is_empty(), "{notes}");
        assert!(notes.contains(note), "{notes}");
    }
    for (damaged, reason) in [
        (without(end), "has no END line"),
        (second[..second.len() / 2].to_owned(), "has no END line"),
        (without("-----BEGIN CERTIFICATE-----"), "no BEGIN line"),
        (label("-----BEGIN", "----BEGIN"), "the line must begin with -----BEGIN"),
        (label("-----BEGIN", "x: -----BEGIN"), "the line must begin with -----BEGIN"),
        (label("CERTIFICATE", "TRUSTED CERTIFICATE"), "openssl x509"),
        (label("CERTIFICATE", "X509 CERTIFICATE"), "write its label as CERTIFICATE"),
        (label("CERTIFICATE", "PKCS7"), "openssl pkcs7"),
        (label("END CERTIFICATE", "END X509 CRL"), "ends with -----END X509 CRL-----"),
        (label(body, "MIIBLTCB0wIUCfLg*"), "line 3 is not Base64"),
        (label(body, "MIIB"), "not an X.509 certificate"),
        (label("\n", " "), "its line breaks are missing"),
        (label("\n", "\\n"), "its line breaks are missing"),
    ] {
        let reason = reason.replace("line 3", &format!("line {}", line + 2));
        for text in [format!("{first}{damaged}"), format!("{damaged}\n{first}")] {
            let loaded = load_ca(&files.write("ca", &text)).unwrap();
            assert_eq!(loaded.roots.len(), 1, "{text}");
            let skipped = loaded.bundle.skipped.join("\n");
            assert!(!skipped.is_empty(), "{text}");
            if text.starts_with(&first) {
                assert!(skipped.contains(&reason), "{reason}: {skipped}");
                assert!(skipped.contains("/ca: line "), "{skipped}");
            }
        }
        let alone = load_ca(&files.write("ca", &damaged)).unwrap_err().to_string();
        assert!(alone.contains(": line "), "{alone}");
    }
}

#[test]
fn load_cert_reads_keys_as_go_does() {
    use base64::Engine as _;
    let files = Files::new();
    let (pem, key) = node();
    files.write("c", &pem);
    let pkcs8 = key.serialize_pem();
    for text in [
        pkcs8.replace("PRIVATE KEY", "EC PRIVATE KEY"),
        pkcs8.replace("PRIVATE KEY", "RSA PRIVATE KEY"),
        pkcs8.replace("PRIVATE KEY", "ANY PRIVATE KEY"),
        format!(
            "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n{pkcs8}"
        ),
        format!("Bag Attributes\n    localKeyID: 01\nKey Attributes: <No Attributes>\n{pkcs8}"),
        pkcs8.replace('\n', "\r\n"),
        format!("{}{pem}", pkcs8.trim_end()),
        format!("{}{pkcs8}", pem.trim_end()),
        format!("{pkcs8}-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
    ] {
        files.write("k", &text);
        assert!(files.load("c", "k").is_ok(), "{text}");
    }
    let der = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
    let locked = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,6F73\n\n";
    let begin = "-----BEGIN PRIVATE KEY-----\n";
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    for (contents, expected) in [
        (
            pkcs8.replace(begin, &format!("{begin}{locked}")).into_bytes(),
            "k: line 1: the private key is encrypted",
        ),
        (
            pkcs8.replace("PRIVATE", "ENCRYPTED PRIVATE").into_bytes(),
            "k: line 1: the private key is encrypted",
        ),
        (
            pkcs8.replace("PRIVATE", "OPENSSH PRIVATE").into_bytes(),
            "k: line 1: the private key has the format of Open",
        ),
        (
            pkcs8.replace("PRIVATE", "DSA PRIVATE").into_bytes(),
            "k: line 1: the private key is damaged or of a kind",
        ),
        (pkcs8.replace("PRIVATE", "PUBLIC").into_bytes(), "k: contains no private key"),
        (
            pkcs8.as_bytes()[..80].to_vec(),
            "k: line 1: the private key is not read: it has no END line",
        ),
        (
            pkcs8.as_bytes()[28..].to_vec(),
            "k: line 4: the private key is not read: it has an END line and no BEGIN",
        ),
        (
            key.serialize_der(),
            "k: is a private key in DER: convert it to PEM (openssl pkey -inform DER",
        ),
        (
            certificate.to_vec(),
            "k: is a certificate in DER: convert it to PEM (openssl x509 -inform DER",
        ),
        (der(pkcs8.as_bytes()).into_bytes(), "k: is PEM in Base64"),
        (der(&key.serialize_der()).into_bytes(), "k: is Base64 without its -----BEGIN"),
        (b"\xfe\xed\xfe\xed\0\0\0\x02".to_vec(), "k: is a Java keystore"),
        (b"\xff\xfe-\0-\0".to_vec(), "k: is UTF-16: save it as UTF-8"),
        (b" \n".to_vec(), "k: is empty"),
    ] {
        files.write("k", &contents);
        let error = files.load("c", "k").unwrap_err();
        assert!(error.starts_with(expected), "{expected}: {error}");
        assert!(!error.contains("MIG"), "{error}");
    }
    let other = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    files.write("k", format!("{}{pkcs8}", other.serialize_pem()));
    assert_eq!(
        files.load("c", "k").unwrap_err(),
        "k: line 1: the private key does not belong to the certificate in c: the key is Ed25519, and that of the \
         certificate is ECDSA on P-256"
    );
}

proptest::proptest! {
    #[test]
    fn cert_info_of_garbage_does_not_panic(bytes: Vec<u8>, cut in 0_usize..400, flip in 0_usize..400) {
        let _ = cert_info(&CertificateDer::from(bytes));
        let (pem, _) = node();
        let mut der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec();
        if let Some(byte) = der.get_mut(flip) {
            *byte ^= 0x41;
        }
        let _ = cert_info(&CertificateDer::from(der.clone()));
        der.truncate(cut);
        let _ = cert_info(&CertificateDer::from(der));
    }
}

/// Made by `openssl x509 -req` without `-extfile`.
pub(in crate::tls) const VERSION_1_CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----
MIIBLTCB0wIUCfLgIXu75J9zuFb1bHPttozchmwwCgYIKoZIzj0EAwIwDTELMAkG
A1UEAwwCY2EwIBcNMjYxMTI1MDk0ODQ3WhgPMjEyNjExMDEwOTQ4NDdaMCMxDTAL
BgNVBAoMBGRldnMxEjAQBgNVBAMMCXZlcnNpb24tMTBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABAuCKvgFRglGEcHB6tduMuOUV1Yjuvo9npib8b2+lLuTZbgUivBw
kNzTFApWkvfzVDTlbOWd8S/IfOnZLIesiTYwCgYIKoZIzj0EAwIDSQAwRgIhAOvb
4ypt2AzZHLv4SRDV8HGYTyBeyAxy6pN2kKBLe3JhAiEAuT+Op936t1YvoVIzWi04
qJFfqyLWQq9DmPVThlUf+GY=
-----END CERTIFICATE-----
";
pub(in crate::tls) const VERSION_1_KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgorZAbAw4WWHzG7XY
HBj63KDZ+fSd4QIq9arDcGJV02ehRANCAAQLgir4BUYJRhHBwerXbjLjlFdWI7r6
PZ6Ym/G9vpS7k2W4FIrwcJDc0xQKVpL381Q05WzlnfEvyHzp2SyHrIk2
-----END PRIVATE KEY-----
";

/// rustls' own comparison of key and certificate refuses version 1.
#[test]
fn version_1_certificate_is_loaded_for_a_client_and_refused_for_a_server() {
    let files = Files::new();
    files.write("v1.crt", VERSION_1_CERTIFICATE);
    files.write("v1.key", VERSION_1_KEY);
    let loaded = files.load("v1.crt", "v1.key").unwrap();
    assert!(loaded.info.is_version_1);
    assert_eq!(loaded.info.subject.to_string(), "CN=version-1, O=devs");
    let paths = |key: &str| CertPaths {
        cert_file: files.0.path().join("v1.crt"),
        key_file: files.0.path().join(key),
    };
    let refused = files.message(&load_serving_cert(&paths("v1.key")).unwrap_err());
    assert!(
        refused.starts_with("v1.crt: the certificate is X.509 version 1: reissue it as"),
        "{refused}"
    );
    let (_, other) = node();
    files.write("other.key", other.serialize_pem());
    let error = load_cert(&paths("other.key")).unwrap_err();
    assert_eq!(error.problem, TlsFileProblem::Mismatch, "{error}");
}
