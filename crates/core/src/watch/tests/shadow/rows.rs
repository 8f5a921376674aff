//! Single cases of a watch with a shadow: what the search does not tell apart.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::events::{cursor, encode, request};
use crate::admission::ByteAccount;
use crate::endpoint_condition::EndpointCondition;
use crate::endpoint_state::EndpointState;
use crate::pool::EndpointKey;
use crate::watch::codec::Encoding::Json;
use crate::watch::relay::{FirstEnd, PushResult, Relay};
use crate::watch::request::WatchRequest;
use crate::watch::session::limiter::MAX_SHADOWS;
use crate::watch::session::{Ending, NotResumable, SessionEffect as Effect, SessionInput as Input};
use crate::watch::shadow::{ShadowEnd, Side};

/// A watch from version 10, and what its client receives.
struct Watch {
    relay: Relay,
    sent: Vec<u8>,
    now: Instant,
}

impl Watch {
    fn new(request: WatchRequest) -> Self {
        let now = Instant::now();
        let account = ByteAccount::unmetered(1 << 20);
        Self { relay: Relay::new(Json, request, now, account), sent: Vec::new(), now }
    }

    /// A watch of Events with an accepted shadow, after these frames.
    fn shadowed(frames: &[(&str, u64)]) -> Self {
        let mut watch = Self::new(WatchRequest { objects_expire: true, ..request("10") });
        for (event_type, version) in frames {
            watch.event(Side::First, event_type, *version);
        }
        assert!(watch.relay.request_shadow(watch.now));
        watch.relay.shadow_accepted();
        watch
    }

    fn push(&mut self, side: Side, bytes: &[u8]) -> PushResult {
        let (sent, chunk) = (&mut self.sent, Bytes::copy_from_slice(bytes));
        let keep = |piece: Bytes| sent.extend_from_slice(&piece);
        match side {
            Side::First => self.relay.push(&chunk, self.now, keep),
            Side::Shadow => self.relay.push_shadow(&chunk, self.now, keep),
        }
    }

    fn event(&mut self, side: Side, event_type: &str, version: u64) -> PushResult {
        self.push(side, &encode(Json, event_type, version, "x"))
    }

    /// The versions that the client has received since the last call.
    fn received(&mut self) -> Vec<u64> {
        let text = String::from_utf8(std::mem::take(&mut self.sent)).unwrap();
        let version =
            |line: &str| line.split("resourceVersion\":\"").nth(1)?.split('"').next()?.parse().ok();
        text.lines().filter_map(version).collect()
    }

    fn asked(&self) -> Option<String> {
        cursor(self.relay.session(), self.now)
    }
}

const ERROR_410: &[u8] = b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"code\":410}}\n";
const ENDPOINTS: [EndpointCondition; 1] = [EndpointCondition {
    key: EndpointKey(2),
    state: EndpointState::Ready,
    probe_fails: false,
    is_starting: false,
}];

#[test]
fn shadow_is_requested_only_for_a_watch_that_may_be_resumed() {
    let later = Duration::from_secs(3);
    let custom = WatchRequest { resumable_group: false, ..request("10") };
    let late = WatchRequest { timeout: Some(Duration::from_secs(1)), ..request("10") };
    let long = "9".repeat(30);
    for (name, request, expected) in [
        ("built-in", request("10"), true),
        ("initial events", request(""), false),
        ("a group that is not resumed", custom, false),
        ("late", late, false),
        ("a version above 64 bits", request(&long), false),
    ] {
        let mut watch = Watch::new(request);
        assert_eq!(watch.relay.can_shadow(watch.now), expected, "{name}");
        assert_eq!(watch.relay.request_shadow(watch.now), expected, "{name}");
        assert_eq!(watch.relay.has_shadow(), expected, "{name}");
        assert!(!watch.relay.request_shadow(watch.now + later), "{name}: there is one");
    }
    let mut watch = Watch::shadowed(&[]);
    watch.relay.shadow_lost(watch.now);
    for _ in 1..MAX_SHADOWS {
        assert!(watch.relay.request_shadow(watch.now));
        watch.relay.shadow_lost(watch.now);
    }
    assert!(!watch.relay.request_shadow(watch.now + later), "the shadows of a minute");
    assert!(watch.relay.request_shadow(watch.now + Duration::from_secs(60)));
}

#[test]
fn json_object_of_one_stream_ends_with_a_newline_before_the_other_stream_sends() {
    let mut watch = Watch::shadowed(&[]);
    let first = encode(Json, "ADDED", 12, "x");
    watch.push(Side::First, &first[..first.len() - 1]);
    watch.event(Side::Shadow, "ADDED", 12);
    watch.event(Side::Shadow, "ADDED", 14);
    watch.push(Side::First, b"\n");
    let objects = watch.sent.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    assert!(objects.into_iter().all(|line| line.ends_with(b"}}}")));
    assert_eq!(watch.received(), [12, 14]);
}

#[test]
fn bookmark_is_withheld_until_both_streams_have_reached_it() {
    let bookmarks = WatchRequest { bookmarks: true, ..request("10") };
    let mut watch = Watch::new(bookmarks);
    assert!(watch.relay.request_shadow(watch.now));
    watch.relay.shadow_accepted();
    watch.event(Side::Shadow, "BOOKMARK", 20);
    watch.event(Side::First, "BOOKMARK", 15);
    assert_eq!((watch.received(), watch.asked().as_deref()), (vec![15], Some("15")));
    watch.event(Side::First, "BOOKMARK", 22);
    assert_eq!((watch.received(), watch.asked().as_deref()), (vec![], Some("15")));
    watch.event(Side::Shadow, "BOOKMARK", 21);
    assert_eq!((watch.received(), watch.asked().as_deref()), (vec![21], Some("21")));
}

#[test]
fn shadow_that_was_requested_after_a_version_is_dropped_at_another_event_of_it() {
    let mut watch = Watch::shadowed(&[("MODIFIED", 12), ("BOOKMARK", 14)]);
    assert_eq!(watch.asked().as_deref(), Some("14"));
    let pushed = watch.event(Side::First, "DELETED", 14);
    assert_eq!(pushed.shadow, Some(ShadowEnd::FirstNotResumable));
    assert_eq!(watch.received(), [12, 14]);
    // The next one is requested before the event.
    assert_eq!(watch.asked().as_deref(), Some("13"));
}

#[test]
fn error_410_of_the_first_stream_is_kept_for_the_client_while_the_shadow_is_unconfirmed() {
    let mut watch = Watch::shadowed(&[("MODIFIED", 12)]);
    let pushed = watch.push(Side::First, ERROR_410);
    assert_eq!((pushed.shadow, pushed.effect), (Some(ShadowEnd::Promoted), Effect::None));
    let pushed = watch.push(Side::First, ERROR_410);
    assert_eq!(pushed.effect, Effect::NextEndpoint);
    let input =
        Input::Rejected { error_event: None, endpoint: EndpointKey(2), endpoints: &ENDPOINTS };
    let effect = watch.relay.session_mut().step(input, watch.now);
    assert_eq!(effect, Effect::End(Ending::Withheld, NotResumable::TooOld));
    assert_eq!(watch.relay.session_mut().take_error_event().as_deref(), Some(ERROR_410));
    assert_eq!(watch.received(), [12]);
}

#[test]
fn only_stream_that_is_behind_is_reset_at_an_error_event() {
    for end in [false, true] {
        let mut watch = Watch::shadowed(&[("MODIFIED", 12)]);
        watch.event(Side::Shadow, "DELETED", 14);
        watch.relay.shadow_lost(watch.now);
        assert!(watch.relay.first_follows() && !watch.relay.session().is_confirmed());
        if end {
            let lost = watch.relay.first_ended(watch.now);
            assert!(matches!(lost, FirstEnd::Lost(Effect::Request { .. })), "{lost:?}");
        } else {
            assert_eq!(watch.push(Side::First, ERROR_410).effect, Effect::NextEndpoint);
        }
        assert_eq!(watch.asked().as_deref(), Some("13"));
    }
}

/// A second without news on a stream that has yet to show the deletion says nothing about others of its version.
#[test]
fn stream_that_is_behind_is_not_settled() {
    for (caught_up, expected) in [(false, Ending::Reset), (true, Ending::Clean)] {
        let mut watch = Watch::shadowed(&[("MODIFIED", 12)]);
        watch.event(Side::Shadow, "DELETED", 14);
        watch.relay.shadow_lost(watch.now);
        if caught_up {
            watch.event(Side::First, "DELETED", 14);
        }
        let later = watch.now + Duration::from_secs(2);
        let effect = watch.relay.stop(NotResumable::Shutdown, later);
        assert_eq!(effect, Effect::End(expected, NotResumable::Shutdown));
    }
}

#[test]
fn shadow_goes_when_the_first_stream_answers_and_has_caught_up() {
    let mut watch = Watch::shadowed(&[]);
    watch.event(Side::Shadow, "ADDED", 12);
    assert_eq!(watch.relay.first_answers(watch.now), None);
    watch.relay.first_suspect();
    assert_eq!(watch.event(Side::First, "ADDED", 12).shadow, None);
    assert!(watch.relay.has_shadow());
    watch.event(Side::Shadow, "ADDED", 13);
    assert_eq!(watch.relay.first_answers(watch.now), None);
    assert_eq!(watch.event(Side::First, "ADDED", 13).shadow, Some(ShadowEnd::Recovered));
    assert!(!watch.relay.has_shadow());
    assert_eq!(watch.received(), [12, 13]);
}

#[test]
fn promoted_shadow_continues_its_partial_frame_in_the_same_chunk() {
    let mut watch = Watch::new(request("10"));
    assert!(watch.relay.request_shadow_with(1, watch.now));
    watch.relay.shadow_accepted();
    let frames = [12, 13, 14].map(|version| encode(Json, "ADDED", version, "x")).concat();
    let (some, rest) = frames.split_at(frames.len() - 20);
    let pushed = watch.push(Side::Shadow, some);
    assert_eq!(pushed.shadow, Some(ShadowEnd::Promoted), "the first stream is too far behind");
    assert_eq!(watch.push(Side::First, rest).effect, Effect::None);
    assert_eq!(watch.received(), [12, 13, 14]);
}

#[test]
fn versions_of_both_streams_are_reported() {
    let mut watch = Watch::shadowed(&[]);
    assert_eq!(watch.event(Side::Shadow, "ADDED", 12).versions.objects, 12);
    assert_eq!(watch.event(Side::First, "ADDED", 12).versions.objects, 0, "a repetition");
    assert_eq!(watch.event(Side::First, "BOOKMARK", 13).versions.shown, 13);
}

/// Every running watch has a relay. A shadow may add the eight bytes of a pointer to those that have none.
#[test]
fn relay_is_small() {
    assert!(size_of::<Relay>() <= 256, "{}", size_of::<Relay>());
}
