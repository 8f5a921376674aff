//! The skipping scanner over one JSON event.

use super::{Event, INITIAL_EVENTS_END, KINDS, Kind};

/// Deeper values are not followed. Go's decoder stops at 10,000, real objects at some dozens.
const MAX_DEPTH: u32 = 512;

/// What was found on the way through the event.
#[derive(Default)]
struct Found<'a> {
    kind: Option<Kind>,
    object: bool,
    metadata: bool,
    version: Option<&'a [u8]>,
    versioned: bool,
    /// Where the value of the annotations begins.
    annotations: Option<usize>,
    /// The value of `.object.code` as it is written.
    code: Option<&'a [u8]>,
}

/// Reads one event; `None` if that is not what it is.
pub(super) fn event(frame: &[u8]) -> Option<Event<'_>> {
    let mut scan = Scan { bytes: frame, at: 0 };
    let mut found = Found::default();
    scan.members(|scan, key| {
        if text_is(key, b"type") {
            once(found.kind.is_some())?;
            let text = scan.string()?;
            let known = KINDS.iter().find(|(name, _)| text_is(text, name));
            found.kind = Some(known.map_or(Kind::Other, |(_, kind)| *kind));
            Some(())
        } else if text_is(key, b"object") {
            once(std::mem::replace(&mut found.object, true))?;
            object(scan, &mut found)
        } else {
            scan.skip()
        }
    })?;
    if scan.token().is_some() {
        return None;
    }
    let kind = found.kind?;
    let annotations = found.annotations.filter(|_| kind == Kind::Bookmark);
    Some(Event {
        kind,
        version: found.version.filter(|_| kind != Kind::Error),
        initial_events_end: match annotations {
            Some(at) => ends_initial_events(Scan { bytes: frame, at })?,
            None => false,
        },
        code: found.code.filter(|_| kind == Kind::Error).and_then(number),
    })
}

fn object<'a>(scan: &mut Scan<'a>, found: &mut Found<'a>) -> Option<()> {
    if scan.token() != Some(b'{') {
        return scan.skip();
    }
    scan.members(|scan, key| {
        if text_is(key, b"metadata") {
            once(std::mem::replace(&mut found.metadata, true))?;
            metadata(scan, found)
        } else if text_is(key, b"code") {
            let start = scan.start()?;
            scan.skip()?;
            found.code = Some(&scan.bytes[start..scan.at]);
            Some(())
        } else {
            scan.skip()
        }
    })
}

fn metadata<'a>(scan: &mut Scan<'a>, found: &mut Found<'a>) -> Option<()> {
    if scan.token() != Some(b'{') {
        return scan.skip();
    }
    scan.members(|scan, key| {
        if text_is(key, b"resourceVersion") {
            once(std::mem::replace(&mut found.versioned, true))?;
            if scan.token() == Some(b'"') {
                found.version = Some(scan.string()?);
                return Some(());
            }
        } else if text_is(key, b"annotations") {
            once(found.annotations.is_some())?;
            found.annotations = Some(scan.start()?);
        }
        scan.skip()
    })
}

fn ends_initial_events(mut scan: Scan<'_>) -> Option<bool> {
    let mut ends = false;
    if scan.token() == Some(b'{') {
        scan.members(|scan, key| {
            if text_is(key, INITIAL_EVENTS_END) && scan.token() == Some(b'"') {
                ends = text_is(scan.string()?, b"true");
                return Some(());
            }
            scan.skip()
        })?;
    }
    Some(ends)
}

/// `None`, which makes the frame unreadable, if it was there before.
fn once(before: bool) -> Option<()> {
    (!before).then_some(())
}

fn number(text: &[u8]) -> Option<u16> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// A place in the text.
struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    /// The next byte that is not white space, left where it is.
    fn token(&mut self) -> Option<u8> {
        while let Some(&byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// Where the next value begins.
    fn start(&mut self) -> Option<usize> {
        self.token().map(|_| self.at)
    }

    fn expect(&mut self, wanted: u8) -> Option<()> {
        if self.token()? != wanted {
            return None;
        }
        self.at += 1;
        Some(())
    }

    /// Hands each member of an object to `each`, which must consume its value.
    fn members(&mut self, mut each: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        self.expect(b'{')?;
        if self.token()? == b'}' {
            self.at += 1;
            return Some(());
        }
        loop {
            let key = self.string()?;
            self.expect(b':')?;
            each(self, key)?;
            match self.token()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Some(());
                }
                _ => return None,
            }
        }
    }

    /// A string's text as it is written, between its quotes.
    fn string(&mut self) -> Option<&'a [u8]> {
        self.expect(b'"')?;
        let start = self.at;
        self.at = string_end(self.bytes, start)?;
        Some(&self.bytes[start..self.at - 1])
    }

    /// Skips one value of any type.
    fn skip(&mut self) -> Option<()> {
        match self.token()? {
            b'"' => self.at = string_end(self.bytes, self.at + 1)?,
            b'{' | b'[' => self.at = nested_end(self.bytes, self.at)?,
            _ => {
                let start = self.at;
                let scalar = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'+' | b'.');
                self.at += self.bytes[start..].iter().take_while(|b| scalar(b)).count();
                if self.at == start {
                    return None;
                }
            }
        }
        Some(())
    }
}

/// The place after the object or array that begins at `at`.
fn nested_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0;
    loop {
        let byte = *bytes.get(at)?;
        at += 1;
        match byte {
            b'"' => at = string_end(bytes, at)?,
            b'{' | b'[' if depth == MAX_DEPTH => return None,
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 1 => return Some(at),
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
}

/// The place after the closing quote of the string whose text begins at `at`.
///
/// Eight bytes at a time: a byte of `x - 0x01…` that is above 0x7f where `x`'s was not is one that
/// was zero, and the lowest of these is exact (the classic from Hacker's Delight, section 6-1).
fn string_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const QUOTES: u64 = ONES * b'"' as u64;
    const BACKSLASHES: u64 = ONES * b'\\' as u64;
    let zeros = |x: u64| x.wrapping_sub(ONES) & !x & (ONES << 7);
    loop {
        while let Some(word) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) {
            let word = u64::from_le_bytes(*word);
            let hits = zeros(word ^ QUOTES) | zeros(word ^ BACKSLASHES);
            if hits != 0 {
                at += hits.trailing_zeros() as usize / 8;
                break;
            }
            at += 8;
        }
        match *bytes.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Whether a string, as it is written, means the ASCII text `wanted`.
fn text_is(written: &[u8], wanted: &[u8]) -> bool {
    // An escape is longer than what it means.
    written == wanted
        || written.len() > wanted.len() && written.contains(&b'\\') && unescaped_is(written, wanted)
}

fn unescaped_is(mut written: &[u8], mut wanted: &[u8]) -> bool {
    while let Some((&byte, rest)) = written.split_first() {
        let (meant, rest) = match (byte, rest) {
            (b'\\', [b'u', a, b, c, d, rest @ ..]) => {
                let hex = [a, b, c, d].iter().try_fold(0, |sum, digit| {
                    char::from(**digit).to_digit(16).map(|digit| sum * 16 + digit)
                });
                match hex.map(u8::try_from) {
                    Some(Ok(meant)) => (meant, rest),
                    _ => return false,
                }
            }
            (b'\\', [escaped @ (b'"' | b'\\' | b'/'), rest @ ..]) => (*escaped, rest),
            (b'\\', _) => return false,
            (byte, rest) => (byte, rest),
        };
        match wanted.split_first() {
            Some((&first, more)) if first == meant => wanted = more,
            _ => return false,
        }
        written = rest;
    }
    wanted.is_empty()
}
