//! The frames that a peer may send on a connection: a burst, a rate, and a credit for use that causes such
//! frames.
//!
//! | frames of a client | burst | per second | credit |
//! |---|---|---|---|
//! | PING | 1,000 | 50 | |
//! | SETTINGS | 100 | 1 | |
//! | PRIORITY | 1,000 | 10 | 2 for each stream |
//! | `WINDOW_UPDATE` | 4,000 | 1,000 | 4 for each DATA frame sent to it, 1 for each KiB |
//! | `RST_STREAM` | 2,000, or the stream limit if it is larger | 50 | 1 for each response head sent to it |
//! | DATA without bytes and `END_STREAM` | 100 | 10 | |
//! | HEADERS and CONTINUATION without bytes | 100 | 1 | |
//! | trailers: HEADERS on a stream that was opened before | 100 | 10 | |
//! | unknown types, GOAWAY, `PUSH_PROMISE` | 100 | 10 | |
//!
//! A server has the same budgets with these differences:
//!
//! | frames of a server | burst | per second | credit |
//! |---|---|---|---|
//! | HEADERS with bytes, of which each interim response (1xx) is one | 100 and 4 for each stream of the stream limit | 10 | 4 for each request |
//! | `RST_STREAM` | as a client | 50 | 1 for each request |
//! | PRIORITY | counted with the unknown types | | |
//!
//! h2 queues interim responses without a limit until the request takes them.
//!
//! Acknowledgements are not counted; jackstay sends no more than it wants acknowledged.

use std::time::Instant;

use crate::http2_frames::{ACK, END_STREAM, FrameHeader, frame_type};

/// Frames that have a common budget. Also the value of a metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitedFrame {
    /// PING without ACK.
    Ping,
    /// SETTINGS without ACK.
    Settings,
    /// PRIORITY.
    Priority,
    /// `WINDOW_UPDATE`.
    WindowUpdate,
    /// `RST_STREAM`.
    Reset,
    /// DATA without bytes and `END_STREAM`.
    EmptyData,
    /// HEADERS or CONTINUATION without bytes.
    EmptyHeaders,
    /// HEADERS of a server.
    Headers,
    /// HEADERS of a client on a stream that was opened before.
    Trailers,
    /// All other frames.
    Other,
    /// HEADERS without the rest of the header block. Has no budget but a time.
    HeaderBlock,
}

impl LimitedFrame {
    /// The kinds that have a budget.
    const COUNT: usize = 10;

    /// The label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::Settings => "settings",
            Self::Priority => "priority",
            Self::WindowUpdate => "window_update",
            Self::Reset => "rst_stream",
            Self::EmptyData => "empty_data",
            Self::EmptyHeaders => "empty_headers",
            Self::Trailers => "trailers",
            Self::HeaderBlock => "header_block",
            Self::Headers => "headers",
            Self::Other => "other",
        }
    }

    /// `None` for a frame that is not limited here.
    fn of(header: FrameHeader, peer: Peer) -> Option<Self> {
        let has = |flag| header.flags & flag != 0;
        let empty = header.length == 0;
        match header.frame_type {
            frame_type::DATA => (empty && !has(END_STREAM)).then_some(Self::EmptyData),
            frame_type::HEADERS | frame_type::CONTINUATION if empty => Some(Self::EmptyHeaders),
            frame_type::HEADERS => (peer == Peer::Server).then_some(Self::Headers),
            frame_type::CONTINUATION => None,
            frame_type::PRIORITY if peer == Peer::Client => Some(Self::Priority),
            frame_type::RST_STREAM => Some(Self::Reset),
            frame_type::SETTINGS => (!has(ACK)).then_some(Self::Settings),
            frame_type::PING => (!has(ACK)).then_some(Self::Ping),
            frame_type::WINDOW_UPDATE => Some(Self::WindowUpdate),
            _ => Some(Self::Other),
        }
    }

    /// Burst, which is also the limit of the credit, and frames a second.
    pub fn rate(self, max_streams: u32) -> (u32, u32) {
        match self {
            Self::Ping => (1_000, 50),
            Self::Settings | Self::EmptyHeaders => (100, 1),
            Self::Priority => (1_000, 10),
            Self::WindowUpdate => (4_000, 1_000),
            Self::Reset => (2_000.max(max_streams), 50),
            Self::EmptyData | Self::Trailers | Self::Other => (100, 10),
            Self::HeaderBlock => (0, 0),
            Self::Headers => (100 + max_streams.saturating_mul(4), 10),
        }
    }
}

/// The peer whose frames are limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// It sends requests.
    Client,
    /// It sends responses.
    Server,
}

/// The budgets of one connection.
#[derive(Debug)]
pub struct Budgets {
    /// The peer whose frames these are.
    pub peer: Peer,
    max_streams: u32,
    created: Instant,
    /// By [`LimitedFrame`]: frames left, and when they were last added, in milliseconds since `created`.
    left: [(u32, u64); LimitedFrame::COUNT],
}

impl Budgets {
    /// Full budgets of a connection that is created at `now` and has this limit of streams.
    pub fn new(peer: Peer, max_streams: u32, now: Instant) -> Self {
        use LimitedFrame as F;
        let all = [
            F::Ping,
            F::Settings,
            F::Priority,
            F::WindowUpdate,
            F::Reset,
            F::EmptyData,
            F::EmptyHeaders,
            F::Headers,
            F::Trailers,
            F::Other,
        ];
        let left = all.map(|frame| (frame.rate(max_streams).0, 0));
        Self { peer, max_streams, created: now, left }
    }

    /// Takes one frame of the budget. False if it is used up. Only then the clock is read.
    fn take(&mut self, frame: LimitedFrame, now: impl FnOnce() -> Instant) -> bool {
        let (left, added) = &mut self.left[frame as usize];
        if *left == 0 {
            let (burst, per_second) = frame.rate(self.max_streams);
            let now = now().saturating_duration_since(self.created).as_millis() as u64;
            let gained = now.saturating_sub(*added) * u64::from(per_second) / 1_000;
            if gained == 0 {
                return false;
            }
            *left = u32::try_from(gained).map_or(burst, |gained| gained.min(burst));
            *added = now;
        }
        *left -= 1;
        true
    }

    /// Adds frames to a budget, at most its burst.
    fn credit(&mut self, frame: LimitedFrame, count: u32) {
        let burst = frame.rate(self.max_streams).0;
        let left = &mut self.left[frame as usize].0;
        *left = left.saturating_add(count).min(burst);
    }

    /// Counts a received frame. `is_opened` says whether the stream was opened before. `now` is called only if a budget
    /// is used up.
    ///
    /// # Errors
    /// The budget of the frame is used up.
    pub fn received(
        &mut self,
        header: FrameHeader,
        is_opened: bool,
        now: impl Fn() -> Instant,
    ) -> Result<(), LimitedFrame> {
        if header.frame_type == frame_type::HEADERS {
            let is_client = self.peer == Peer::Client;
            if is_client && is_opened && !self.take(LimitedFrame::Trailers, &now) {
                return Err(LimitedFrame::Trailers);
            }
            self.credit(LimitedFrame::Priority, 2);
        }
        match LimitedFrame::of(header, self.peer) {
            Some(frame) if !self.take(frame, &now) => Err(frame),
            _ => Ok(()),
        }
    }

    /// Counts a sent frame, for which the peer may send others.
    pub fn sent(&mut self, header: FrameHeader) {
        match header.frame_type {
            frame_type::DATA => self.credit(LimitedFrame::WindowUpdate, 4 + header.length / 1024),
            frame_type::HEADERS => {
                self.credit(LimitedFrame::Reset, 1);
                self.credit(LimitedFrame::Headers, 4);
            }
            _ => {}
        }
    }
}
