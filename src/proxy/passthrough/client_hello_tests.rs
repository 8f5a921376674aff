use super::*;
use proptest::prelude::*;
use std::sync::Arc;

/// The `ClientHello` of rustls.
fn rustls_hello(name: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = name.to_owned().try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// The same message in records of `size` bytes.
fn in_records(hello: &[u8], size: usize) -> Vec<u8> {
    let (message, _) = handshake_bytes(hello).unwrap_or_else(|_| panic!("no records"));
    let mut out = Vec::new();
    for piece in message.chunks(size) {
        out.extend_from_slice(&[HANDSHAKE, 3, 1]);
        out.extend_from_slice(&(piece.len() as u16).to_be_bytes());
        out.extend_from_slice(piece);
    }
    out
}

#[test]
fn read_returns_the_server_name_of_a_client_or_none() {
    assert_eq!(
        read(&rustls_hello("Kubernetes.Default.svc")),
        ClientHello::ServerName("kubernetes.default.svc".into())
    );
    assert_eq!(read(&rustls_hello("10.0.0.1")), ClientHello::NoServerName);
}

#[test]
fn read_accepts_any_split_into_records_and_segments() {
    let hello = rustls_hello("a.example.com");
    for size in [1, 2, 3, 5, 100, 300, 10_000] {
        let hello = in_records(&hello, size);
        let mut found_at = None;
        for end in 0..=hello.len() {
            match read(&hello[..end]) {
                ClientHello::Incomplete => assert_eq!(found_at, None, "{end} of {}", hello.len()),
                ClientHello::ServerName(name) => {
                    assert_eq!(name, "a.example.com");
                    found_at.get_or_insert(end);
                }
                other => panic!("{other:?} at {end} of {}", hello.len()),
            }
        }
        assert!(found_at.is_some(), "in records of {size}");
    }
    let none = rustls_hello("::1");
    for end in 0..none.len() {
        assert_eq!(read(&none[..end]), ClientHello::Incomplete);
    }
}

#[test]
fn read_rejects_other_protocols_at_the_first_byte() {
    for bytes in [
        &b"G"[..],
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-x",
        b"\0",
        &[21, 3, 1, 0, 2],
        &[22, 2],
        &[22, 3, 1, 0, 0],
        &[22, 3, 1, 0x40, 1],
        // A ServerHello.
        &[22, 3, 3, 0, 1, 2],
    ] {
        assert_eq!(read(bytes), ClientHello::Unreadable, "{bytes:?}");
    }
    assert_eq!(read(b""), ClientHello::Incomplete);
    assert_eq!(read(&[22]), ClientHello::Incomplete);
}

/// Early data follows the `ClientHello` at once, and may arrive together with it.
#[test]
fn read_ignores_records_after_the_message() {
    for after in [&[20, 3, 3, 0, 1, 1][..], &[23, 3, 3, 0, 2, 7, 7], &[23], &[22, 3, 3, 0, 0]] {
        let hello = [&rustls_hello("a.example.com")[..], after].concat();
        assert_eq!(read(&hello), ClientHello::ServerName("a.example.com".into()), "{after:?}");
        let hello = [&rustls_hello("::1")[..], after].concat();
        assert_eq!(read(&hello), ClientHello::NoServerName, "{after:?}");
        // A record of another type within the message is not valid TLS.
        let part = &rustls_hello("a.example.com")[5..60];
        let hello = [&[22, 3, 1, 0, part.len() as u8][..], part, after].concat();
        assert_eq!(read(&hello), ClientHello::Unreadable, "{after:?}");
    }
}

#[test]
fn read_survives_the_fuzz_corpus() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/hello");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
        check_every_prefix(&std::fs::read(entry.unwrap().path()).unwrap());
        files += 1;
    }
    assert!(files > 0);
}

/// Checks that a decision does not change with more bytes, as `fuzz/fuzz_targets/hello.rs` does.
fn check_every_prefix(bytes: &[u8]) {
    let mut decision = ClientHello::Incomplete;
    for end in 0..=bytes.len() {
        let now = read(&bytes[..end]);
        assert!(
            decision == ClientHello::Incomplete || decision == now,
            "{decision:?}, then {now:?} at {end}"
        );
        decision = now;
    }
}

#[test]
fn read_rejects_a_message_that_is_too_large() {
    // A message of 100,000 bytes that is never complete.
    let mut bytes = vec![22, 3, 1, 0x40, 0, CLIENT_HELLO as u8, 1, 0x86, 0xa0];
    bytes.extend_from_slice(&[3, 3]);
    bytes.extend_from_slice(&[0; 32]);
    bytes.extend_from_slice(&[0, 0xff, 0xfe]);
    assert_eq!(read(&bytes), ClientHello::Incomplete);
    bytes.resize(MAX_LENGTH, 0);
    assert_eq!(read(&bytes), ClientHello::Unreadable);
}

#[test]
fn read_rejects_inconsistent_lengths() {
    let hello = rustls_hello("a.example.com");
    // The session ID is longer than the message. It follows the headers of the record (5 bytes) and of the
    // message (4 bytes), the version and the random (34 bytes).
    let mut malformed = hello.clone();
    malformed[5 + 4 + 34] = 255;
    malformed.truncate(5 + 4 + 34 + 100);
    let message_length = (malformed.len() - 9) as u32;
    malformed[6..9].copy_from_slice(&message_length.to_be_bytes()[1..]);
    let record_length = (malformed.len() - 5) as u16;
    malformed[3..5].copy_from_slice(&record_length.to_be_bytes());
    assert_eq!(read(&malformed), ClientHello::Unreadable);
}

proptest! {
    #[test]
    fn read_never_panics_on_random_bytes(bytes: Vec<u8>) {
        let _ = read(&bytes);
        let mut record = vec![22, 3, 1, 0, bytes.len() as u8];
        record.extend_from_slice(&bytes);
        check_every_prefix(&record);
    }

    #[test]
    fn read_never_panics_on_a_mutated_message(at in 0_usize..2000, byte: u8, end in 0_usize..2000, size in 1_usize..400) {
        let mut hello = in_records(&rustls_hello("a.example.com"), size);
        if let Some(changed) = hello.get_mut(at) {
            *changed = byte;
        }
        hello.truncate(end.max(1));
        check_every_prefix(&hello);
    }

    #[test]
    fn read_decision_is_stable(name in "[a-z]{1,20}(\\.[a-z]{1,20}){0,3}", size in 1_usize..300) {
        let hello = in_records(&rustls_hello(&name), size);
        let mut decision = None;
        for end in (0..=hello.len()).step_by(7).chain([hello.len()]) {
            let now = read(&hello[..end]);
            if let Some(before) = &decision {
                prop_assert_eq!(before, &now);
            } else if now != ClientHello::Incomplete {
                decision = Some(now);
            }
        }
        prop_assert_eq!(decision, Some(ClientHello::ServerName(name)));
    }
}
