//! The blocks of a PEM text, with the lines in which they begin.
//!
//! The rules are those of Go (`encoding/pem`, `Decode`). Go skips a block that it cannot read, and its callers cannot
//! distinguish a skipped block from text. Here such a block is an entry of its own, with the reason. Forms that are not
//! ambiguous are read although Go does not read them ([`Unusual`]): a missing line break between END and BEGIN,
//! indented lines, a byte order mark, and line ends of one carriage return.

use std::fmt;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use zeroize::Zeroizing;

const BEGIN: &[u8] = b"-----BEGIN ";
const END: &[u8] = b"-----END ";
const DASHES: &[u8] = b"-----";
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Maximum length of a label in a message. The longest common one has 21 characters.
const MAX_LABEL: usize = 40;
/// A buffer of this size holds the Base64 of a private key: one that grows would leave copies in freed memory.
const KEY_SIZE: usize = 16 << 10;
/// Go ignores the unused bits of the last character, too.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// A block, or a line that looks like the start or the end of one.
pub(super) struct Block {
    /// The text between `BEGIN` and the dashes, such as `CERTIFICATE`.
    pub(super) label: String,
    /// The number of the line with the label, from 1.
    pub(super) line: usize,
    /// The decoded content, or why there is none.
    pub(super) content: Result<Zeroizing<Vec<u8>>, BlockError>,
    /// Whether headers say that the content is encrypted (RFC 1421 section 4.6.1).
    pub(super) is_encrypted: bool,
    /// A form that Go does not read, and the number of its line.
    pub(super) unusual: Option<(usize, Unusual)>,
}

/// Why a block has no content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BlockError {
    /// The text ends, or another block begins, before the END line.
    NoEnd,
    /// The END line in this line has another label.
    OtherEnd(usize, String),
    /// There is an END line, and no BEGIN line.
    NoBegin,
    /// Base64 follows in the line of BEGIN.
    OneLine,
    /// The line contains `BEGIN` and a label, and it is not a BEGIN line.
    Marker,
    /// A character of this line is not Base64.
    NotBase64(usize),
    /// The number of Base64 characters is not a multiple of four.
    Incomplete,
}

impl fmt::Display for BlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoEnd => "it has no END line: the file is truncated",
            Self::OtherEnd(line, label) => {
                return write!(f, "it ends with -----END {label}----- in line {line}");
            }
            Self::NoBegin => "it has an END line and no BEGIN line: the start of the block is missing",
            Self::OneLine => {
                "its line breaks are missing: write BEGIN, END and the Base64 on lines of their own"
            }
            Self::Marker => {
                "the line must begin with -----BEGIN, have five dashes at both ends, and no other text"
            }
            Self::NotBase64(line) => return write!(f, "line {line} is not Base64"),
            Self::Incomplete => "its Base64 is incomplete: the file is truncated or damaged",
        })
    }
}

/// A form that this parser reads and Go does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unusual {
    /// The END line does not end with its dashes.
    TextAfterEnd,
    /// The END line does not begin with its dashes.
    TextBeforeEnd,
    /// A BEGIN or END line is indented.
    Indented,
    /// A byte order mark precedes the BEGIN line.
    ByteOrderMark,
    /// Lines end with a carriage return alone.
    CarriageReturns,
}

impl fmt::Display for Unusual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TextAfterEnd => "other text follows the END of a block on the same line",
            Self::TextBeforeEnd => "the END of a block is not on a line of its own",
            Self::Indented => "the BEGIN or END of a block is indented",
            Self::ByteOrderMark => "the file begins with a byte order mark",
            Self::CarriageReturns => "the lines end with carriage returns alone",
        })
    }
}

impl Block {
    fn failed(label: &[u8], line: usize, error: BlockError) -> Self {
        let content = Err(error);
        Self { label: label_text(label), line, content, is_encrypted: false, unusual: None }
    }
}

/// The blocks of a text, in order.
pub(super) fn blocks(text: &[u8]) -> Vec<Block> {
    let mut scanner = Scanner::default();
    let without_mark = text.strip_prefix(BYTE_ORDER_MARK);
    scanner.unusual = without_mark.map(|_| (1, Unusual::ByteOrderMark));
    for line in Lines::new(without_mark.unwrap_or(text)) {
        scanner.line(&line);
    }
    scanner.abandon();
    scanner.blocks
}

/// A line, without its end and without spaces around it.
struct Line<'a> {
    number: usize,
    text: &'a [u8],
    is_indented: bool,
    has_carriage_return: bool,
}

/// The lines of a text, which end with LF, CR LF or CR.
struct Lines<'a> {
    rest: &'a [u8],
    number: usize,
}

impl<'a> Lines<'a> {
    fn new(text: &'a [u8]) -> Self {
        Self { rest: text, number: 0 }
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = Line<'a>;

    fn next(&mut self) -> Option<Line<'a>> {
        if self.rest.is_empty() {
            return None;
        }
        let end = self.rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        let (line, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        let has_carriage_return = rest.starts_with(b"\r") && !rest.starts_with(b"\r\n");
        self.rest = rest.strip_prefix(b"\r\n").or(rest.get(1..)).unwrap_or_default();
        self.number += 1;
        let text = line.trim_ascii();
        let is_indented = !line.starts_with(text);
        Some(Line { number: self.number, text, is_indented, has_carriage_return })
    }
}

/// A block whose END line has not been read.
struct OpenBlock {
    label: Vec<u8>,
    line: usize,
    /// Whether a line without a colon has been read, after which there are no headers.
    has_body: bool,
    is_encrypted: bool,
    base64: Zeroizing<Vec<u8>>,
    error: Option<BlockError>,
    unusual: Option<(usize, Unusual)>,
}

#[derive(Default)]
struct Scanner {
    blocks: Vec<Block>,
    open: Option<OpenBlock>,
    /// An unusual form that precedes the next block.
    unusual: Option<(usize, Unusual)>,
}

impl Scanner {
    /// Reads a line, which may contain several parts if line breaks are missing.
    fn line(&mut self, line: &Line<'_>) {
        let mut rest = line.text;
        loop {
            let after = if let Some(label) = rest.strip_prefix(BEGIN) {
                self.begin(line, label)
            } else if let Some(label) = rest.strip_prefix(END) {
                self.end(line, label)
            } else {
                self.text(line.number, rest)
            };
            match after {
                Some(after) if after.len() < rest.len() => rest = after,
                _ => return,
            }
        }
    }

    /// Opens a block. Returns the rest of the line if another part follows.
    fn begin<'a>(&mut self, line: &Line<'_>, label: &'a [u8]) -> Option<&'a [u8]> {
        self.abandon();
        let unusual = self.unusual.take();
        let Some((label, after)) = split(label, DASHES) else {
            self.blocks.push(Block::failed(label, line.number, BlockError::Marker));
            return None;
        };
        let after = after.trim_ascii();
        let error = (!after.is_empty()).then_some(BlockError::OneLine);
        let form = (line.is_indented, Unusual::Indented);
        let forms = [form, (line.has_carriage_return, Unusual::CarriageReturns)];
        let form = forms.into_iter().find_map(|(is, form)| is.then_some((line.number, form)));
        self.open = Some(OpenBlock {
            label: label.to_owned(),
            line: line.number,
            has_body: false,
            is_encrypted: false,
            base64: Zeroizing::new(Vec::with_capacity(KEY_SIZE)),
            error,
            unusual: unusual.or(form),
        });
        // The end of a block without line breaks.
        split(after, END).map(|(before, _)| &after[before.len()..])
    }

    /// Closes a block. Returns the rest of the line if a block begins in it.
    fn end<'a>(&mut self, line: &Line<'_>, label: &'a [u8]) -> Option<&'a [u8]> {
        let (label, after) = split(label, DASHES).unwrap_or((label, b""));
        let after = after.trim_ascii();
        match self.open.take() {
            Some(mut open) if open.label == label => {
                if !after.is_empty() {
                    open.unusual = Some((line.number, Unusual::TextAfterEnd));
                } else if line.is_indented {
                    open.unusual.get_or_insert((line.number, Unusual::Indented));
                }
                self.blocks.push(open.close());
            }
            Some(open) => {
                let error = BlockError::OtherEnd(line.number, label_text(label));
                self.blocks.push(Block::failed(&open.label, open.line, error));
            }
            None => self.blocks.push(Block::failed(label, line.number, BlockError::NoBegin)),
        }
        after.starts_with(BEGIN).then_some(after)
    }

    /// Reads a header, Base64, or text between blocks. Returns the rest of the line if a BEGIN or END follows.
    fn text<'a>(&mut self, number: usize, text: &'a [u8]) -> Option<&'a [u8]> {
        let Some(open) = &mut self.open else {
            if let Some(label) = damaged_marker(text) {
                self.blocks.push(Block::failed(label, number, BlockError::Marker));
            }
            return None;
        };
        let marker = [END, BEGIN].into_iter().filter_map(|marker| split(text, marker));
        let before = marker.map(|(before, _)| before.len()).min();
        let base64 = &text[..before.unwrap_or(text.len())];
        if before.is_some() {
            open.unusual = Some((number, Unusual::TextBeforeEnd));
        }
        open.read(number, base64);
        before.map(|before| &text[before..])
    }

    /// Ends a block that has no END line.
    fn abandon(&mut self) {
        if let Some(open) = self.open.take() {
            self.blocks.push(Block::failed(&open.label, open.line, BlockError::NoEnd));
        }
    }
}

impl OpenBlock {
    /// Reads a line between BEGIN and END.
    fn read(&mut self, number: usize, text: &[u8]) {
        if !self.has_body {
            if let Some((key, value)) = split(text, b":") {
                let is_encrypted = match key.trim_ascii() {
                    b"Proc-Type" => split(value, b"ENCRYPTED").is_some(),
                    key => key == b"DEK-Info",
                };
                self.is_encrypted |= is_encrypted;
                return;
            }
            self.has_body = true;
        }
        let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/=".contains(byte);
        let content = text.iter().filter(|byte| !byte.is_ascii_whitespace());
        if self.error.is_none() && !content.clone().all(is_base64) {
            self.error = Some(BlockError::NotBase64(number));
        }
        self.base64.extend(content);
    }

    fn close(mut self) -> Block {
        let content = if let Some(error) = self.error.take() {
            Err(error)
        } else {
            let decoded = BASE64.decode(self.base64.as_slice());
            decoded.map(Zeroizing::new).map_err(|_| BlockError::Incomplete)
        };
        let (label, is_encrypted) = (label_text(&self.label), self.is_encrypted);
        Block { label, line: self.line, content, is_encrypted, unusual: self.unusual }
    }
}

/// The label of a line that was meant to begin a certificate or a private key: with fewer dashes, with other text
/// before it, with typographic dashes or in lower case. A comment (`#`) is none.
fn damaged_marker(line: &[u8]) -> Option<&'static [u8]> {
    if line.starts_with(b"#") {
        return None;
    }
    let upper = line.to_ascii_uppercase();
    let (before, after) = split(&upper, b"BEGIN ")?;
    let before = before.trim_ascii_end();
    // U+2010 to U+2015 are hyphens and dashes.
    let is_dash = before.ends_with(b"-")
        || matches!(before, [.., 0xe2, 0x80, last] if (0x90..=0x95).contains(last));
    let has = |label: &[u8]| split(after, label).is_some();
    if !is_dash || has(b"REQUEST") {
        return None;
    }
    let labels: [&[u8]; 2] = [b"CERTIFICATE", b"PRIVATE KEY"];
    labels.into_iter().find(|label| has(label))
}

/// The text before and after the first `separator`.
fn split<'a>(text: &'a [u8], separator: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = text.windows(separator.len()).position(|window| window == separator)?;
    Some((&text[..at], &text[at + separator.len()..]))
}

/// `; it contains X (line 1)` for the labels of a file that lacks what was expected.
pub(super) fn found_labels(blocks: &[Block]) -> String {
    let found = blocks.iter().take(3);
    let found: Vec<String> =
        found.map(|block| format!("{} (line {})", block.label, block.line)).collect();
    if found.is_empty() { String::new() } else { format!("; it contains {}", found.join(", ")) }
}

/// A message about a line of a file.
pub(super) fn at_line(line: usize, message: impl fmt::Display) -> String {
    format!("line {line}: {message}")
}

/// A label for messages: its start, with escapes for all but printable ASCII.
fn label_text(label: &[u8]) -> String {
    label.iter().take(MAX_LABEL).flat_map(|byte| byte.escape_ascii()).map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of a text as `LINE LABEL CONTENT`, with the forms that Go does not read.
    fn read(text: &str) -> Vec<String> {
        let describe = |block: Block| {
            let content = match block.content {
                Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
                Err(error) => format!("{error:?}"),
            };
            let unusual = block.unusual.map(|(line, form)| format!(" ({line} {form:?})"));
            let encrypted = if block.is_encrypted { " encrypted" } else { "" };
            let (line, label) = (block.line, block.label);
            format!("{line} {label} {content}{encrypted}{}", unusual.unwrap_or_default())
        };
        blocks(text.as_bytes()).into_iter().map(describe).collect()
    }

    /// A block of the label `X` whose content is `hi`.
    const HI: &str = "-----BEGIN X-----\naGk=\n-----END X-----";

    #[test]
    fn blocks_that_go_reads_are_read() {
        for text in [
            format!("{HI}\n"),
            HI.to_owned(),
            HI.replace('\n', "\r\n"),
            HI.replace("aGk=", "aG\nk=\n"),
            HI.replace("aGk=", "\n\n a G\tk=\n\n"),
            HI.replace("aGk=", "aGl="),
            HI.replace("X-----\n", "X----- \t\n"),
            format!("{HI}  \nBag Attributes\n    friendlyName: x\n"),
            HI.replace("aGk=", "key: value\nother: -----\n\naGk="),
        ] {
            assert_eq!(read(&text), ["1 X hi"], "{text:?}");
        }
        assert_eq!(read(&format!("subject=CN = a\n\n{HI}\n{HI}\n")), ["3 X hi", "6 X hi"]);
        let locked = HI.replace("aGk=", "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\naGk=");
        assert_eq!(read(&locked), ["1 X hi encrypted"]);
        assert_eq!(read("-----BEGIN X-----\n-----END X-----\n"), ["1 X "]);
        assert_eq!(read(""), [""; 0]);
    }

    #[test]
    fn unusual_blocks_are_read_and_marked() {
        for (text, expected) in [
            (format!("{HI}{HI}"), &["1 X hi (3 TextAfterEnd)", "3 X hi"][..]),
            (format!("{HI}# the end\n"), &["1 X hi (3 TextAfterEnd)"]),
            (HI.replace("=\n", "="), &["1 X hi (2 TextBeforeEnd)"]),
            (HI.replace('\n', "\n  ").replacen("---", " ---", 1), &["1 X hi (1 Indented)"]),
            (HI.replace("\n-", "\n\t-"), &["1 X hi (3 Indented)"]),
            (format!("\u{feff}{HI}"), &["1 X hi (1 ByteOrderMark)"]),
            (HI.replace('\n', "\r"), &["1 X hi (1 CarriageReturns)"]),
        ] {
            assert_eq!(read(&text), expected, "{text:?}");
        }
    }

    #[test]
    fn blocks_that_cannot_be_read_have_a_reason_and_do_not_hide_the_next() {
        for (damaged, expected) in [
            ("-----BEGIN X-----\naGk=\n", "1 X NoEnd"),
            ("-----BEGIN X-----\naGk=\n-----END Y-----\n", "1 X OtherEnd(3, \"Y\")"),
            ("aGk=\n-----END X-----\n", "2 X NoBegin"),
            ("-----BEGIN X-----aGk=-----END X-----\n", "1 X OneLine"),
            ("-----BEGIN X----- aGk= -----END X-----\n", "1 X OneLine"),
            ("-----BEGIN X-----aGk=\n-----END X-----\n", "1 X OneLine"),
            ("-----BEGIN X-----\\naGk=\\n-----END X-----\n", "1 X OneLine"),
            ("-----BEGIN X-----\naGk=\na!k=\n-----END X-----\n", "1 X NotBase64(3)"),
            ("-----BEGIN X-----\naGk\n-----END X-----\n", "1 X Incomplete"),
            ("-----BEGIN X-----\naGk=aGk=\n-----END X-----\n", "1 X Incomplete"),
            ("-----BEGIN X\naGk=\n", "1 X Marker"),
            ("----BEGIN CERTIFICATE----\n", "1 CERTIFICATE Marker"),
            ("ca: -----BEGIN CERTIFICATE-----\n", "1 CERTIFICATE Marker"),
            ("\u{2014}BEGIN RSA PRIVATE KEY\u{2014}\n", "1 PRIVATE KEY Marker"),
            ("-----begin certificate-----\n", "1 CERTIFICATE Marker"),
        ] {
            let text = format!("{damaged}{HI}\n");
            let found = read(&text);
            assert_eq!(found.len(), 2, "{text:?}: {found:?}");
            assert_eq!(found[0], expected, "{text:?}");
            assert!(found[1].ends_with("X hi"), "{text:?}: {found:?}");
        }
        for text in ["# -----BEGIN CERTIFICATE-----\n", "we BEGIN CERTIFICATE renewal here\n"] {
            assert_eq!(read(text), [""; 0], "{text:?}");
        }
        let label = format!("-----BEGIN {}\u{1b}[31m-----\n", "X".repeat(38));
        assert_eq!(read(&label), [format!("1 {}\\x1b[ NoEnd", "X".repeat(38))]);
    }
}
