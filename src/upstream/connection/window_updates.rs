//! Sends the windows of a connection to the apiserver.
//!
//! h2 sends one change of `SETTINGS_INITIAL_WINDOW_SIZE` at a time, and the next one when the apiserver has
//! acknowledged it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::Connection as H2Connection;
use jackstay_net::frame_limiter::PeerFrames;
use jackstay_sys::clock;

use super::Connection;
use super::line_windows::{LineWindows, Windows};
use super::receiving::ReceivingStreams;
use crate::upstream::dial::Http2Stream;

/// The windows that the apiserver knows, and those that it needs.
#[derive(Debug)]
pub(super) struct WindowUpdates {
    line: LineWindows,
    /// What the last check has decided.
    wanted: Windows,
    /// The windows that the apiserver knows, or learns from the next frames.
    announced: Windows,
    frames: PeerFrames,
    /// SETTINGS that were sent; the first ones with the preface.
    settings: u64,
    /// The apiserver has acknowledged all of them.
    acknowledged: bool,
    /// Whether the windows must be adjusted because of what has arrived.
    due: bool,
}

impl WindowUpdates {
    pub(super) fn new(line: LineWindows, frames: PeerFrames) -> Self {
        let initial = line.initial();
        Self {
            line,
            wanted: initial,
            announced: initial,
            frames,
            settings: 1,
            acknowledged: false,
            due: false,
        }
    }

    /// When [`Self::update`] is due without further bytes.
    pub(super) fn check_at(&self) -> Option<Instant> {
        self.line.check_at()
    }

    /// Records a round trip.
    pub(super) fn round_trip(&mut self, rtt: Duration) {
        self.line.round_trip(rtt);
    }

    /// Records that the connection has received `bytes` in all.
    pub(super) fn received(&mut self, bytes: u64, streams: &ReceivingStreams, now: Instant) {
        if !self.acknowledged && self.frames.settings_acks() >= self.settings {
            self.acknowledged = true;
            self.line.acknowledged(now);
            streams.check_windows();
        }
        self.due |= self.line.received(bytes, now);
    }

    /// Adjusts the windows if that is due, and sends them if they have changed. Returns whether h2 has something to
    /// send.
    pub(super) fn update(
        &mut self,
        h2: &mut H2Connection<Http2Stream, Bytes>,
        connection: &Connection,
    ) -> bool {
        if std::mem::take(&mut self.due) || self.line.is_due() {
            let held = connection.receiving.held(self.line.initial().stream);
            self.wanted = self.line.adjust(held, clock::now());
        }
        let (wanted, before) = (self.wanted, self.announced);
        if wanted.connection != before.connection {
            h2.set_target_window_size(wanted.connection);
            self.announced.connection = wanted.connection;
        }
        if wanted.stream != before.stream
            && self.acknowledged
            && h2.set_initial_window_size(wanted.stream).is_ok()
        {
            self.announced.stream = wanted.stream;
            self.settings += 1;
            self.acknowledged = false;
            self.line.announced(wanted.stream);
            connection.stats.set_stream_window(wanted.stream);
            connection.endpoint.metrics.window_changed(wanted.stream > before.stream);
        }
        self.announced != before
    }
}
