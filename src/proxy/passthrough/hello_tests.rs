use super::*;
use proptest::prelude::*;
use std::sync::Arc;

/// What rustls says first.
fn real(name: &str) -> Vec<u8> {
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

/// The same message in records of so many bytes.
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
fn a_real_client_asks_for_a_name_or_for_none() {
    assert_eq!(read(&real("Kubernetes.Default.svc")), Hello::Name("kubernetes.default.svc".into()));
    assert_eq!(read(&real("10.0.0.1")), Hello::NoName);
}

#[test]
fn it_may_come_in_pieces_of_any_size() {
    let hello = real("a.example.com");
    for size in [1, 2, 3, 5, 100, 300, 10_000] {
        let hello = in_records(&hello, size);
        let mut found_at = None;
        for end in 0..=hello.len() {
            match read(&hello[..end]) {
                Hello::Partial => assert_eq!(found_at, None, "{end} of {}", hello.len()),
                Hello::Name(name) => {
                    assert_eq!(name, "a.example.com");
                    found_at.get_or_insert(end);
                }
                other => panic!("{other:?} at {end} of {}", hello.len()),
            }
        }
        assert!(found_at.is_some(), "in records of {size}");
    }
    let none = real("::1");
    for end in 0..none.len() {
        assert_eq!(read(&none[..end]), Hello::Partial);
    }
}

#[test]
fn what_is_no_client_hello_is_odd_at_once() {
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
        assert_eq!(read(bytes), Hello::Odd, "{bytes:?}");
    }
    assert_eq!(read(b""), Hello::Partial);
    assert_eq!(read(&[22]), Hello::Partial);
}

/// Early data follows its hello at once, and may come with it.
#[test]
fn what_follows_the_hello_changes_nothing() {
    for after in [&[20, 3, 3, 0, 1, 1][..], &[23, 3, 3, 0, 2, 7, 7], &[23], &[22, 3, 3, 0, 0]] {
        let hello = [&real("a.example.com")[..], after].concat();
        assert_eq!(read(&hello), Hello::Name("a.example.com".into()), "{after:?}");
        let hello = [&real("::1")[..], after].concat();
        assert_eq!(read(&hello), Hello::NoName, "{after:?}");
        // Within the hello it is no TLS.
        let half = &real("a.example.com")[5..60];
        let hello = [&[22, 3, 1, 0, half.len() as u8][..], half, after].concat();
        assert_eq!(read(&hello), Hello::Odd, "{after:?}");
    }
}

/// Everything that the corpus has ever taught us: no panic, and an answer that is given early stays.
#[test]
fn the_corpus_is_digested() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/hello");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
        digest(&std::fs::read(entry.unwrap().path()).unwrap());
        files += 1;
    }
    assert!(files > 0);
}

/// What `fuzz/fuzz_targets/hello.rs` asserts.
fn digest(bytes: &[u8]) {
    let mut answer = Hello::Partial;
    for end in 0..=bytes.len() {
        let now = read(&bytes[..end]);
        assert!(answer == Hello::Partial || answer == now, "{answer:?}, then {now:?} at {end}");
        answer = now;
    }
}

#[test]
fn one_that_is_too_large_is_odd() {
    // A message of 100,000 bytes that never comes to its end.
    let mut bytes = vec![22, 3, 1, 0x40, 0, CLIENT_HELLO, 1, 0x86, 0xa0];
    bytes.extend_from_slice(&[3, 3]);
    bytes.extend_from_slice(&[0; 32]);
    bytes.extend_from_slice(&[0, 0xff, 0xfe]);
    assert_eq!(read(&bytes), Hello::Partial);
    bytes.resize(MAX, 0);
    assert_eq!(read(&bytes), Hello::Odd);
}

#[test]
fn lengths_that_lie_are_odd() {
    let hello = real("a.example.com");
    // The session id is longer than the whole message.
    let mut lying = hello.clone();
    lying[5 + 4 + 34] = 255;
    lying.truncate(5 + 4 + 34 + 100);
    let length = (lying.len() - 9) as u32;
    lying[6..9].copy_from_slice(&length.to_be_bytes()[1..]);
    let record = (lying.len() - 5) as u16;
    lying[3..5].copy_from_slice(&record.to_be_bytes());
    assert_eq!(read(&lying), Hello::Odd);
}

#[test]
fn names_and_patterns() {
    for (pattern, name, expected) in [
        ("a.example", "a.example", true),
        ("a.example", "b.example", false),
        ("a.example", "x.a.example", false),
        ("*.example", "a.example", true),
        ("*.example", "a.b.example", false),
        ("*.example", ".example", false),
        ("*.example", "example", false),
    ] {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes: Vec<u8>) {
        let _ = read(&bytes);
        let mut record = vec![22, 3, 1, 0, bytes.len() as u8];
        record.extend_from_slice(&bytes);
        digest(&record);
    }

    #[test]
    fn a_mutated_hello_never_panics(at in 0_usize..2000, byte: u8, end in 0_usize..2000, size in 1_usize..400) {
        let mut hello = in_records(&real("a.example.com"), size);
        if let Some(there) = hello.get_mut(at) {
            *there = byte;
        }
        hello.truncate(end.max(1));
        digest(&hello);
    }

    /// Once it is not partial, more bytes change nothing.
    #[test]
    fn an_answer_stays(name in "[a-z]{1,20}(\\.[a-z]{1,20}){0,3}", size in 1_usize..300) {
        let hello = in_records(&real(&name), size);
        let mut answer = None;
        for end in (0..=hello.len()).step_by(7).chain([hello.len()]) {
            let now = read(&hello[..end]);
            if let Some(before) = &answer {
                prop_assert_eq!(before, &now);
            } else if now != Hello::Partial {
                answer = Some(now);
            }
        }
        prop_assert_eq!(answer, Some(Hello::Name(name)));
    }
}
