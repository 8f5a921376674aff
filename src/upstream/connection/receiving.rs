//! The streams of a connection whose bodies are received piece by piece.

use std::cell::RefCell;
use std::collections::HashMap;

use super::line_windows::Held;
use h2::{FlowControl, RecvStream};

/// The open streams with long bodies, by their number.
#[derive(Debug, Default)]
pub(super) struct ReceivingStreams(RefCell<HashMap<u32, FlowControl>>);

impl ReceivingStreams {
    /// Adds a stream, which stays open until it is removed.
    pub(super) fn add(&self, number: u32, stream: &mut RecvStream) {
        self.0.borrow_mut().insert(number, stream.flow_control().clone());
    }

    /// Removes a stream whose body is dropped.
    pub(super) fn remove(&self, number: u32) {
        let removed = self.0.borrow_mut().remove(&number);
        drop(removed);
    }

    /// Bytes that the streams have received and not released. `window` is the initial window of each.
    pub(super) fn held(&self, window: u32) -> Held {
        let mut held = Held::default();
        for flow in self.0.borrow().values() {
            let bytes = flow.used_capacity();
            held.all += bytes;
            held.beyond += bytes.saturating_sub(window as usize);
        }
        held
    }

    /// Sends the window of each stream whose client has read what it has received. h2 decides that when a client reads,
    /// but not when `SETTINGS_INITIAL_WINDOW_SIZE` becomes smaller (h2 0.4, `Recv::apply_local_settings`). A window can
    /// then be negative, and neither the apiserver nor the client would continue the stream. nghttp2 had the same error
    /// (its pull request 1680).
    pub(super) fn check_windows(&self) {
        for flow in self.0.borrow_mut().values_mut() {
            let _ = flow.release_capacity(0);
        }
    }
}
