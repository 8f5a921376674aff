//! The corpus: requests that two parties could read differently.
//!
//! Each line of a file is `name: template`. A template has these elements:
//!
//! | element | meaning |
//! |---|---|
//! | `{a\|b\|}` | alternatives: one entry for each combination |
//! | `<S>` | a complete request for `/smuggled`, of 37 bytes |
//! | `<text*10>` | the text 10 times |
//! | `~` | CR LF |
//! | `\r` `\n` `\t` `\0` `\\` `\x41` | one byte |
//!
//! A template of HTTP/1.1 is the bytes on the connection. A template of HTTP/2 (`http2.txt`) is a list of frames of
//! stream 1, separated by ` ; `: `H` HEADERS, `D` DATA, `T` HEADERS with `END_STREAM`, `R` `RST_STREAM`. `end` after
//! the letter sets `END_STREAM`. Header fields are `name=value`, separated by ` & `; `@GET /a` stands for the four
//! pseudo-header fields of that request.

use std::path::{Path, PathBuf};

/// The request that `<S>` stands for.
pub const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: api\r\n\r\n";

/// The files of the corpus. Entries of `identity.txt` are also sent without a client certificate.
const FILES: [&str; 5] = ["framing.txt", "heads.txt", "targets.txt", "identity.txt", "http2.txt"];

/// A request, or several, as a client sends them.
#[derive(Debug, Clone)]
pub enum Content {
    /// The bytes on an HTTP/1.1 connection.
    Http1(Vec<u8>),
    /// The frames of stream 1 of an HTTP/2 connection.
    Http2(Vec<Frame>),
}

/// A frame of an HTTP/2 entry.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    Headers { end: bool, fields: Vec<(Vec<u8>, Vec<u8>)> },
    Data { end: bool, data: Vec<u8> },
    Reset,
}

/// An entry of the corpus.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Unique; ends with the number of the combination.
    pub name: String,
    /// The template of this combination.
    pub text: String,
    pub content: Content,
    /// The client presents the certificate of the configured identity.
    pub certificate: bool,
}

/// The folder of the files.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/smuggling/corpus")
}

/// All entries.
pub fn load() -> Vec<Entry> {
    let mut entries = Vec::new();
    for file in FILES {
        let stem = file.trim_end_matches(".txt");
        let text = std::fs::read_to_string(folder().join(file)).unwrap();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (name, template) = line.split_once(": ").unwrap_or_else(|| panic!("{line}"));
            for (number, text) in alternatives(template).into_iter().enumerate() {
                let content = match stem {
                    "http2" => Content::Http2(frames(&text)),
                    _ => Content::Http1(bytes(&text)),
                };
                let name = format!("{stem}/{name}.{}", number + 1);
                let entry = Entry { name, text, content, certificate: true };
                if stem == "identity" {
                    let name = format!("{} without certificate", entry.name);
                    entries.push(Entry { name, certificate: false, ..entry.clone() });
                }
                entries.push(entry);
            }
        }
    }
    entries
}

/// All combinations of the alternatives in a template.
fn alternatives(template: &str) -> Vec<String> {
    let Some((before, rest)) = template.split_once('{') else { return vec![template.to_owned()] };
    let (choices, after) = rest.split_once('}').expect("a closing brace");
    let tails = alternatives(after);
    let combine = |choice: &str| {
        tails.iter().map(|tail| format!("{before}{choice}{tail}")).collect::<Vec<_>>()
    };
    choices.split('|').flat_map(combine).collect()
}

/// The bytes of a text without alternatives.
fn bytes(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let mut used = first.len_utf8();
        match first {
            '~' => out.extend(b"\r\n"),
            '<' => {
                let (inside, _) = rest[1..].split_once('>').expect("a closing angle bracket");
                used += inside.len() + 1;
                match inside.rsplit_once('*') {
                    Some((text, count)) => out.extend(bytes(text).repeat(count.parse().unwrap())),
                    None if inside == "S" => out.extend(SMUGGLED.as_bytes()),
                    None => panic!("unknown macro <{inside}>"),
                }
            }
            '\\' => {
                used += 1;
                out.push(match rest.as_bytes()[1] {
                    b'r' => b'\r',
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'0' => 0,
                    b'\\' => b'\\',
                    b'x' => {
                        used += 2;
                        u8::from_str_radix(&rest[2..4], 16).expect("two hexadecimal digits")
                    }
                    _ => panic!("unknown escape in {rest}"),
                });
            }
            _ => out.extend(&rest.as_bytes()[..used]),
        }
        rest = &rest[used..];
    }
    out
}

/// The frames of an HTTP/2 entry.
fn frames(text: &str) -> Vec<Frame> {
    text.split(" ; ")
        .map(|frame| {
            let (kind, rest) = frame.split_at(1);
            let rest = rest.strip_prefix(' ').unwrap_or(rest);
            let (end, rest) = match rest.strip_prefix("end") {
                Some(rest) => (true, rest.strip_prefix(' ').unwrap_or(rest)),
                None => (false, rest),
            };
            match kind {
                "H" => Frame::Headers { end, fields: fields(rest) },
                "T" => Frame::Headers { end: true, fields: fields(rest) },
                "D" => Frame::Data { end, data: bytes(rest) },
                "R" => Frame::Reset,
                _ => panic!("unknown frame in {text}"),
            }
        })
        .collect()
}

fn fields(text: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut fields = Vec::new();
    for field in text.split(" & ") {
        if let Some((method, path)) = field.strip_prefix('@').and_then(|line| line.split_once(' '))
        {
            for (name, value) in
                [(":method", method), (":scheme", "https"), (":authority", "api"), (":path", path)]
            {
                fields.push((name.into(), bytes(value)));
            }
        } else {
            let (name, value) = field.split_once('=').unwrap_or_else(|| panic!("{text}"));
            fields.push((bytes(name), bytes(value)));
        }
    }
    fields
}

#[test]
fn templates_expand_to_bytes_and_frames() {
    assert_eq!(alternatives("a{b|}c{d|e}"), ["abcd", "abce", "acd", "ace"]);
    assert_eq!(bytes(r"a~\x41\0<b~*2>"), b"a\r\nA\0b\r\nb\r\n");
    assert_eq!(bytes("<S>").len(), 37);
    let parsed = frames("H @POST /a & x=y=z ; D hello ; D end ; T a= ; R");
    let Frame::Headers { end: false, fields } = &parsed[0] else { panic!("{parsed:?}") };
    assert_eq!(fields[3], (b":path".to_vec(), b"/a".to_vec()));
    assert_eq!(fields[4], (b"x".to_vec(), b"y=z".to_vec()));
    assert_eq!(parsed[1], Frame::Data { end: false, data: b"hello".to_vec() });
    assert_eq!(parsed[2], Frame::Data { end: true, data: Vec::new() });
    assert_eq!(parsed[3], Frame::Headers { end: true, fields: vec![(b"a".to_vec(), Vec::new())] });
    assert_eq!(parsed[4], Frame::Reset);
}

#[test]
fn corpus_has_unique_names_and_300_entries() {
    let mut names: Vec<_> = load().into_iter().map(|entry| entry.name).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(count >= 300, "{count}");
    println!("{count} entries");
}
