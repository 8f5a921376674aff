//! Finds the end of a CBOR data item (RFC 8949) across any number of chunks.

/// Maximum nesting of arrays, maps and strings in chunks. Kubernetes decodes at most 64 levels
/// (`MaxNestedLevels` in apimachinery, `serializer/cbor/internal/modes/decode.go`).
pub const MAX_DEPTH: usize = 64;

/// The entry of an item of indefinite length in [`ItemEnd::missing`]. No smaller number of items fits into a frame.
const INDEFINITE: u32 = u32::MAX;

/// The position in a data item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemEnd {
    /// The number of items that are missing in each open array or map, from the outermost one.
    missing: [u32; MAX_DEPTH],
    depth: u8,
    head: ItemHead,
    /// The number of missing bytes of the argument of `head`.
    argument_left: u8,
    /// The number of missing bytes of the current string.
    string_left: u64,
}

/// The initial byte of an item and its argument.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ItemHead {
    /// The major type.
    pub major: u8,
    /// Argument, `None` for an indefinite length or a break.
    pub argument: Option<u64>,
}

/// The bytes are no CBOR, or an item is nested too deeply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

impl ItemHead {
    /// The head with this initial byte, and the number of bytes of its argument that follow it.
    #[inline]
    pub fn begin(initial: u8) -> Result<(Self, u8), Malformed> {
        let (argument, bytes) = match initial & 0x1f {
            info @ 0..=23 => (Some(info.into()), 0),
            info @ 24..=27 => (Some(0), 1 << (info - 24)),
            31 => (None, 0),
            _ => return Err(Malformed),
        };
        Ok((Self { major: initial >> 5, argument }, bytes))
    }

    /// Appends a byte to the argument.
    #[inline]
    pub fn push(&mut self, byte: u8) {
        self.argument = self.argument.map(|argument| argument << 8 | u64::from(byte));
    }
}

impl Default for ItemEnd {
    fn default() -> Self {
        Self {
            missing: [0; MAX_DEPTH],
            depth: 0,
            head: ItemHead::default(),
            argument_left: 0,
            string_left: 0,
        }
    }
}

impl ItemEnd {
    /// The number of bytes that belong to the item; `None` if they do not contain its end. After an end the next item
    /// may follow.
    pub fn find_end(&mut self, bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        let mut at = 0;
        while at < bytes.len() {
            if self.string_left > 0 {
                let rest = (bytes.len() - at) as u64;
                let skipped = self.string_left.min(rest);
                self.string_left -= skipped;
                at += skipped as usize;
                if self.string_left == 0 && self.item_ended() {
                    return Ok(Some(at));
                }
                continue;
            }
            let byte = bytes[at];
            if self.argument_left == 0 {
                (self.head, self.argument_left) = ItemHead::begin(byte)?;
            } else {
                self.head.push(byte);
                self.argument_left -= 1;
            }
            at += 1;
            if self.argument_left == 0 && self.on_head()? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// The number of bytes that the current string still needs.
    pub fn string_left(&self) -> u64 {
        self.string_left
    }

    /// Processes a whole head. Returns whether it ends the outermost item.
    #[inline]
    fn on_head(&mut self) -> Result<bool, Malformed> {
        let ItemHead { major, argument } = self.head;
        match (major, argument) {
            (0 | 1 | 7, Some(_)) | (2..=5, Some(0)) => return Ok(self.item_ended()),
            (2 | 3, Some(len)) => self.string_left = len,
            (4, Some(items)) => self.open(Some(items))?,
            (5, Some(pairs)) => self.open(pairs.checked_mul(2))?,
            (2..=5, None) => self.push(INDEFINITE)?,
            // The item with the tag follows.
            (6, Some(_)) => {}
            (7, None) => {
                self.depth = self.depth.checked_sub(1).ok_or(Malformed)?;
                let is_open = self.missing[usize::from(self.depth)] == INDEFINITE;
                return if is_open { Ok(self.item_ended()) } else { Err(Malformed) };
            }
            _ => return Err(Malformed),
        }
        Ok(false)
    }

    fn open(&mut self, items: Option<u64>) -> Result<(), Malformed> {
        let items = items.and_then(|items| u32::try_from(items).ok());
        self.push(items.filter(|&items| items != INDEFINITE).ok_or(Malformed)?)
    }

    fn push(&mut self, items: u32) -> Result<(), Malformed> {
        *self.missing.get_mut(usize::from(self.depth)).ok_or(Malformed)? = items;
        self.depth += 1;
        Ok(())
    }

    /// Counts an item that has ended, and every array and map that ends with it. Returns whether the outermost item
    /// has ended.
    fn item_ended(&mut self) -> bool {
        while self.depth > 0 {
            let missing = &mut self.missing[usize::from(self.depth) - 1];
            if *missing == INDEFINITE {
                return false;
            }
            *missing -= 1;
            if *missing > 0 {
                return false;
            }
            self.depth -= 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        ItemEnd::default().find_end(bytes)
    }

    /// Examples of RFC 8949, appendix A, and items around them.
    #[test]
    fn end_of_well_formed_items_is_found_in_any_chunks() {
        let deep = [vec![0x81; MAX_DEPTH], vec![0]].concat();
        let deep_indefinite = [vec![0x9f; MAX_DEPTH], vec![0xff; MAX_DEPTH]].concat();
        for item in [
            &b"\x00"[..],
            b"\x18\x18",
            b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x3b\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\xf9\x3c\x00",
            b"\xfb\x7e\x37\xe4\x3c\x88\x00\x75\x9c",
            b"\xf4",
            b"\xf8\xff",
            b"\xc1\x1a\x51\x4b\x67\xb0",
            b"\xd9\xd9\xf7\xd9\xd9\xf7\x44IETF",
            b"\x40",
            b"\x58\x03abc",
            b"\x60",
            b"\x80",
            b"\x83\x01\x82\x02\x03\x82\x04\x05",
            b"\xa0",
            b"\xa2\x61a\x01\x61b\x82\x02\x03",
            b"\x5f\x42\x01\x02\x43\x03\x04\x05\xff",
            b"\x7f\xff",
            b"\x9f\xff",
            b"\x9f\x01\x82\x02\x03\x9f\x04\x05\xff\xff",
            b"\x83\x01\x82\x02\x03\x9f\x04\x05\xff",
            b"\xbf\x61a\x01\x61b\x9f\x02\x03\xff\xff",
            &deep,
            &deep_indefinite,
        ] {
            let twice = [item, item].concat();
            assert_eq!(end(&twice), Ok(Some(item.len())), "{item:02x?}");
            for at in 1..item.len() {
                let mut state = ItemEnd::default();
                assert_eq!(state.find_end(&item[..at]), Ok(None), "{item:02x?} {at}");
                assert_eq!(state.find_end(&twice[at..]), Ok(Some(item.len() - at)));
                assert_eq!(state.find_end(item), Ok(Some(item.len())), "the next item");
            }
        }
    }

    #[test]
    fn malformed_and_deeply_nested_items_are_refused() {
        for item in [
            &b"\x1c"[..],
            b"\x3d",
            b"\x5e",
            b"\x1f",
            b"\x3f",
            b"\xdf",
            b"\xff",
            b"\x81\xff",
            b"\xa1\x00\xff",
            b"\x9f\x81\xff",
            b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x9a\xff\xff\xff\xff",
            b"\xbb\x80\x00\x00\x00\x00\x00\x00\x00",
            b"\xba\x80\x00\x00\x00",
            &[0x81; MAX_DEPTH + 1],
            &[0x9f; MAX_DEPTH + 1],
            &[0xa1; 10_000],
        ] {
            assert_eq!(end(item), Err(Malformed), "{:02x?}", &item[..item.len().min(9)]);
        }
    }

    #[test]
    fn length_of_a_string_is_not_allocated_and_does_not_overflow() {
        for len in [1_u64 << 63, u64::MAX] {
            let mut state = ItemEnd::default();
            let head = [&[0x5b][..], &len.to_be_bytes()].concat();
            assert_eq!(state.find_end(&head), Ok(None));
            assert_eq!(state.find_end(&[0xff; 1000]), Ok(None));
            assert_eq!(state.string_left(), len - 1000);
        }
    }
}
