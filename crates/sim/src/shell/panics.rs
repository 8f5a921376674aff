//! Panics of tasks. tokio catches them, so a request fails or a watch ends, and no promise may be broken by that.

use std::panic;
use std::sync::{Mutex, PoisonError};

/// The panics so far, as the default hook prints them.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Records each panic of the process from now on. It is printed, too.
pub fn record() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        let message = text.unwrap_or("no message");
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let mut panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
        panics.push(format!("a task panicked at {place}: {message}"));
        drop(panics);
        print(panic);
    }));
}

/// Takes what was recorded.
pub fn take() -> Vec<String> {
    std::mem::take(&mut *PANICS.lock().unwrap_or_else(PoisonError::into_inner))
}
