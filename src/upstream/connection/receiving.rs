//! The streams of a connection whose bodies are received piece by piece.

use std::cell::RefCell;
use std::collections::HashMap;

use super::line_windows::Held;
use h2::{FlowControl, RecvStream, StreamId};

/// The open streams with long bodies, by their number.
#[derive(Debug, Default)]
pub(super) struct ReceivingStreams(RefCell<HashMap<StreamId, FlowControl>>);

impl ReceivingStreams {
    /// Adds a stream, which stays open until it is removed.
    pub(super) fn add(&self, stream: &mut RecvStream) -> StreamId {
        let flow = stream.flow_control().clone();
        let number = flow.stream_id();
        self.0.borrow_mut().insert(number, flow);
        number
    }

    /// Removes a stream whose body is dropped.
    pub(super) fn remove(&self, number: StreamId) {
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
}
