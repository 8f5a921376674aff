//! Every interleaving of a watch with a shadow: the shipped [`Relay`](super::super::relay::Relay) with encoded frames, against
//! an oracle that knows the history.

mod client;
mod rows;
mod search;
mod servers;
mod upstream;
mod world;

use std::time::Instant;

use self::search::{Found, search};
use self::servers::{Events, Fault, Frames};
use self::world::{Limits, Setting};
use super::events::request;
use crate::watch::codec::Encoding::{self, Cbor, Json, Protobuf};
use crate::watch::codec::event::EventType::{Added, Deleted, Modified, Unknown};
use crate::watch::request::WatchRequest;
use crate::watch::shadow::LEAD_LIMIT;

/// Events of one version each.
const WRITES: &Events = &[(Added, 12), (Modified, 14), (Modified, 16)];
/// Objects that expire together.
const EXPIRY: &Events = &[(Modified, 12), (Deleted, 14), (Deleted, 14), (Deleted, 14)];
const MIXED: &Events = &[(Deleted, 12), (Deleted, 12), (Modified, 14)];
const NEWS: &Events = &[(Added, 12), (Unknown, 14), (Modified, 16)];

fn setting(name: &str, encoding: Encoding, events: &Events, limits: Limits) -> Setting {
    sized(name, encoding, events, 0, None, limits)
}

fn sized(
    name: &str,
    encoding: Encoding,
    events: &Events,
    padding: usize,
    fault: Option<Fault>,
    limits: Limits,
) -> Setting {
    let mut frames = Frames::new(encoding, events, padding);
    let common = frames.add_common();
    let faulty = fault.map(|fault| frames.add_fault(fault));
    Setting {
        name: format!("{name}, {encoding:?}, {fault:?}"),
        frames,
        common,
        faulty,
        request: request("10"),
        limits,
        budget: 2_000,
        lead_limit: LEAD_LIMIT,
        start: Instant::now(),
    }
}

fn expiring(setting: Setting) -> Setting {
    Setting { request: WatchRequest { objects_expire: true, ..request("10") }, ..setting }
}

fn with_bookmarks(setting: Setting) -> Setting {
    Setting { request: WatchRequest { bookmarks: true, ..setting.request.clone() }, ..setting }
}

const FAULTS: [fn(usize) -> Fault; 13] = [
    Fault::Skips,
    Fault::Repeats,
    Fault::Swaps,
    Fault::ChangesType,
    Fault::Invents,
    Fault::SendsOld,
    Fault::Jumps,
    Fault::BookmarksAhead,
    Fault::BookmarksBack,
    Fault::Garbage,
    Fault::UnknownType,
    Fault::NoNumber,
    Fault::Endless,
];

/// `scale` 1 takes some seconds without optimization, 2 less than a minute with it.
fn settings(scale: u8) -> Vec<Setting> {
    let few = Limits {
        cuts: scale,
        bookmarks: 1,
        errors: scale - 1,
        losses: 2,
        ends: 1,
        shadows: 1,
        answers: scale - 1,
        controls: scale - 1,
        moves: scale - 1,
    };
    let pair = Limits { shadows: 2, cuts: scale - 1, ..few };
    let failing = Limits { losses: scale, errors: 1, answers: scale - 1, cuts: 0, moves: 0, ..few };
    let stopped = Limits { losses: 1, bookmarks: 0, controls: 1, answers: 1, cuts: 0, ..few };
    let small = |limits| Setting { lead_limit: 1, ..setting("a short lead", Json, WRITES, limits) };
    let large = |padding, limits| Setting {
        budget: 700,
        ..sized("a frame above the budget", Json, WRITES, padding, None, limits)
    };
    let mut settings = vec![
        setting("writes", Json, WRITES, Limits { losses: scale, controls: 0, moves: 0, ..few }),
        expiring(setting(
            "expiry",
            Json,
            EXPIRY,
            Limits { bookmarks: 0, errors: 0, controls: 0, ..few },
        )),
        with_bookmarks(expiring(setting("mixed", Json, MIXED, failing))),
        with_bookmarks(setting("errors", Json, WRITES, Limits { bookmarks: scale - 1, ..failing })),
        expiring(setting("stopped", Json, MIXED, stopped)),
        setting("two shadows", Json, MIXED, Limits { bookmarks: 0, ends: 0, ..pair }),
        setting("moves", Json, MIXED, Limits { moves: 1, cuts: 0, ..few }),
        setting("an unknown type", Json, NEWS, Limits { cuts: 0, errors: 0, ..few }),
        small(Limits { errors: 0, cuts: 0, ..few }),
        large(900, Limits { cuts: 1, errors: 0, bookmarks: 0, ..few }),
    ];
    for encoding in [Protobuf, Cbor] {
        let limits = Limits { cuts: 1, bookmarks: 0, answers: 0, controls: 0, ..few };
        settings.push(expiring(setting("encodings", encoding, MIXED, limits)));
    }
    for fault in FAULTS {
        for at in 0..=usize::from(scale) {
            let bookmarks = u8::from(scale > 1 || at == 0);
            let errors = u8::from(scale > 1 && at == 1);
            let limits =
                Limits { ends: 0, cuts: 0, moves: 0, errors, bookmarks, losses: scale, ..few };
            let fault = fault(at);
            let is_endless = matches!(fault, Fault::Endless(_));
            let limits = if is_endless { Limits { cuts: 1, errors: 0, ..limits } } else { limits };
            let budget = if is_endless { 700 } else { 2_000 };
            let wrong = |name, events| Setting {
                budget,
                ..sized(name, Json, events, 0, Some(fault), limits)
            };
            settings.push(with_bookmarks(wrong("writes", WRITES)));
            if scale > 1 {
                settings.push(expiring(wrong("mixed", MIXED)));
            }
        }
    }
    settings
}

fn search_all(scale: u8) -> Found {
    let mut all = Found::default();
    for setting in settings(scale) {
        let begun = Instant::now();
        let found = search(&setting);
        println!(
            "{}: {} states, {} steps, {} paths, {:?}, {:.1} s",
            setting.name,
            found.states,
            found.steps,
            found.paths,
            found.ends,
            begun.elapsed().as_secs_f64()
        );
        all.add(&found);
    }
    println!("{} states, {} steps, {} paths, {:?}", all.states, all.steps, all.paths, all.ends);
    all
}

#[test]
fn no_interleaving_of_a_watch_and_its_shadow_breaks_a_promise() {
    let found = search_all(1);
    assert!(found.paths > 1_000_000);
    assert!(found.ends.len() >= 6, "{:?}", found.ends);
}

#[test]
#[ignore = "a minute with optimization: cargo test --release -p jackstay-core -- --ignored --nocapture larger_search"]
fn larger_search_of_a_watch_and_its_shadow_finds_no_broken_promise() {
    let found = search_all(2);
    assert!(found.paths > 1_000_000_000);
}
