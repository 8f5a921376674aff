//! The source `endpoints_file`: a file of addresses.
//!
//! The file is checked every second, like certificates ([`crate::control::file_watch`]).

use std::path::PathBuf;
use std::rc::Rc;

use jackstay_config::endpoints_file::{parse, read};
use jackstay_core::discovery::source::EndpointSource;

use super::source_states::SourceStates;
use crate::control::file_watch::{FileWatch, poll_ticks};

/// Reads the file, and again after each change, until the future is dropped.
pub async fn follow(path: PathBuf, states: Rc<SourceStates>) {
    let mut watch = FileWatch::unread(vec![path.clone()]);
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        if watch.changed() {
            let text = read(&path);
            watch.set_settled(text.is_ok());
            match text {
                Ok(text) => states.update(EndpointSource::File, parse(&text)),
                Err(error) => states.fail(EndpointSource::File, &error.to_string()),
            }
        } else {
            states.upstream().sources.confirmed(EndpointSource::File);
        }
    }
}
