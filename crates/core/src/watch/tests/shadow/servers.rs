//! The frames of a history, and what honest and wrong servers send for it.

use bytes::Bytes;

use super::super::events::{encode, json_event, protobuf_status};
use crate::watch::codec::Encoding;
use crate::watch::codec::error_event;
use crate::watch::codec::event::EventType;
use crate::watch::codec::parse;

/// A frame that a server may send.
#[derive(Debug)]
pub struct Frame {
    pub bytes: Bytes,
    /// `None` for an ERROR event and for frames that cannot be used.
    pub version: Option<u64>,
    pub event_type: Option<EventType>,
}

/// The index of a frame in [`Frames`].
pub type FrameId = u8;

/// What is wrong with the second server. The number is the position in what it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Skips(usize),
    Repeats(usize),
    Swaps(usize),
    /// The event has another type.
    ChangesType(usize),
    /// An event that does not exist, between two others.
    Invents(usize),
    /// An event not above the version of the request.
    SendsOld(usize),
    Jumps(usize),
    /// A bookmark above every event of the history.
    BookmarksAhead(usize),
    /// A bookmark below the one before.
    BookmarksBack(usize),
    Garbage(usize),
    UnknownType(usize),
    NoNumber(usize),
    /// The frame has no end.
    Endless(usize),
}

/// The frames of a scenario: first the events of the history, in order.
#[derive(Debug)]
pub struct Frames {
    pub all: Vec<Frame>,
    pub encoding: Encoding,
    /// The number of events of the history.
    pub len: usize,
}

/// The types and versions of a history.
pub type Events = [(EventType, u64)];

/// The version of the first request.
pub const START: u64 = 10;
/// Above every version of a history.
const AHEAD: u64 = 90;

fn name(event_type: EventType) -> &'static str {
    match event_type {
        EventType::Added => "ADDED",
        EventType::Modified => "MODIFIED",
        EventType::Deleted => "DELETED",
        EventType::Bookmark => "BOOKMARK",
        EventType::Error | EventType::Unknown => "NEWS",
    }
}

impl Frames {
    /// `padding`: of the last event, in bytes.
    pub fn new(encoding: Encoding, events: &Events, padding: usize) -> Self {
        let mut frames = Self { all: Vec::new(), encoding, len: events.len() };
        for (n, (event_type, version)) in events.iter().enumerate() {
            let size = if n + 1 == events.len() { padding } else { 0 };
            frames.add(*event_type, *version, &format!("{n}{}", "x".repeat(size)));
        }
        frames
    }

    pub fn get(&self, id: FrameId) -> &Frame {
        &self.all[usize::from(id)]
    }

    pub fn version(&self, event: usize) -> u64 {
        self.all[event].version.unwrap_or_default()
    }

    fn add(&mut self, event_type: EventType, version: u64, padding: &str) -> FrameId {
        let bytes = encode(self.encoding, name(event_type), version, padding);
        assert_eq!(parse(self.encoding, &bytes).map(|event| event.event_type), Some(event_type));
        self.push(bytes, Some(version), Some(event_type))
    }

    fn push(
        &mut self,
        bytes: Vec<u8>,
        version: Option<u64>,
        event_type: Option<EventType>,
    ) -> FrameId {
        self.all.push(Frame { bytes: bytes.into(), version, event_type });
        FrameId::try_from(self.all.len() - 1).unwrap()
    }

    /// The bookmarks and ERROR events that any server may send: bookmarks at each version from [`START`] up to the last.
    pub fn add_common(&mut self) -> Common {
        let last = self.version(self.len - 1);
        let bookmarks = (START..=last).map(|version| self.add(EventType::Bookmark, version, "b"));
        let bookmarks = bookmarks.collect();
        let error = |frames: &mut Self, code: u16| {
            let bytes = match frames.encoding {
                Encoding::Protobuf => protobuf_status(code.into()),
                Encoding::Cbor => {
                    // The client tells both from each other by their messages.
                    let text = if code == 410 { "410" } else { "500" };
                    error_event::expired(Encoding::Cbor, text)
                }
                Encoding::Json => format!(
                    "{{\"type\":\"ERROR\",\"object\":{{\"kind\":\"Status\",\"code\":{code}}}}}\n"
                )
                .into_bytes(),
            };
            frames.push(bytes, None, None)
        };
        let errors = [error(self, 410), error(self, 500)];
        Common { bookmarks, errors }
    }

    /// What an honest server sends after this version.
    pub fn after(&self, version: u64) -> Vec<FrameId> {
        let events = 0..self.len;
        events.filter(|n| self.version(*n) > version).map(|n| n as FrameId).collect()
    }

    /// Adds the frames of a fault. Returns them.
    pub fn add_fault(&mut self, fault: Fault) -> FaultyServer {
        use EventType::{Added, Bookmark, Modified};
        let mut frame = Vec::new();
        match fault {
            Fault::Skips(_) | Fault::Repeats(_) | Fault::Swaps(_) => {}
            Fault::ChangesType(_) => {
                for event in 0..self.len {
                    let is_added = self.all[event].event_type == Some(Added);
                    let other = if is_added { Modified } else { Added };
                    frame.push(self.add(other, self.version(event), "wrong"));
                }
            }
            // The versions of a history leave room.
            Fault::Invents(_) => {
                for event in 0..self.len {
                    let version = self.version(event);
                    frame.push(self.add(Modified, version + 1, "invented"));
                }
            }
            Fault::SendsOld(_) => frame.push(self.add(Modified, 3, "old")),
            Fault::Jumps(_) => frame.push(self.add(Modified, 1 << 60, "jump")),
            Fault::BookmarksAhead(_) => frame.push(self.add(Bookmark, AHEAD, "ahead")),
            Fault::BookmarksBack(_) => frame.push(self.add(Bookmark, 3, "back")),
            Fault::Garbage(_) => {
                let bytes = match self.encoding {
                    Encoding::Json => b"{\"type\":}\n".to_vec(),
                    Encoding::Protobuf => vec![0, 0, 0, 2, 0xff, 0xff],
                    Encoding::Cbor => vec![0xff],
                };
                frame.push(self.push(bytes, None, None));
            }
            Fault::UnknownType(_) => frame.push(self.add(EventType::Unknown, AHEAD, "new")),
            Fault::NoNumber(_) => {
                let text = String::from_utf8(json_event("ADDED", 77, "none")).unwrap();
                frame.push(self.push(text.replace("77", "7a").into_bytes(), None, None));
            }
            Fault::Endless(_) => frame.push(self.push(vec![b'{'; 150], None, None)),
        }
        FaultyServer { fault, frames: frame }
    }
}

/// The frames that any server may send.
#[derive(Debug)]
pub struct Common {
    bookmarks: Vec<FrameId>,
    /// 410 and 500.
    pub errors: [FrameId; 2],
}

impl Common {
    pub fn bookmark(&self, version: u64) -> Option<FrameId> {
        self.bookmarks.get(usize::try_from(version.checked_sub(START)?).unwrap()).copied()
    }
}

/// A wrong server.
#[derive(Debug)]
pub struct FaultyServer {
    pub fault: Fault,
    frames: Vec<FrameId>,
}

impl FaultyServer {
    /// What it sends instead of these frames.
    pub fn sent(&self, mut honest: Vec<FrameId>) -> Vec<FrameId> {
        match self.fault {
            Fault::Skips(at) if at < honest.len() => {
                honest.remove(at);
            }
            Fault::Repeats(at) if at < honest.len() => honest.insert(at, honest[at]),
            Fault::Swaps(at) if at + 1 < honest.len() => honest.swap(at, at + 1),
            Fault::ChangesType(at) if at < honest.len() => {
                honest[at] = self.frames[usize::from(honest[at])];
            }
            Fault::Invents(at) if at < honest.len() => {
                honest.insert(at + 1, self.frames[usize::from(honest[at])]);
            }
            Fault::SendsOld(at)
            | Fault::Jumps(at)
            | Fault::BookmarksAhead(at)
            | Fault::BookmarksBack(at)
            | Fault::Garbage(at)
            | Fault::UnknownType(at)
            | Fault::NoNumber(at) => honest.insert(at.min(honest.len()), self.frames[0]),
            Fault::Endless(at) => {
                honest.truncate(at);
                honest.extend([self.frames[0]; 6]);
            }
            _ => {}
        }
        honest
    }
}
