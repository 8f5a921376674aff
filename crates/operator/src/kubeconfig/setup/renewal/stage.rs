//! Decides what a run of the renewal does: a function of the time, of the validity of the pairs, and of the trust of
//! the clients.
//!
//! | state | action |
//! |---|---|
//! | less than two thirds of the lifetime have passed | nothing |
//! | no next pair | [`Action::Publish`]: clients learn the next CA, the present certificate is served |
//! | a next pair, time left | [`Action::Keep`]: a kubeconfig that lacks the next CA gets it |
//! | [`SWITCH_BEFORE`] the end, all clients have had [`READERS_TIME`] | [`Action::Switch`] |
//! | [`LAST_DAYS`] before the end | [`Action::Switch`], with an alarm if a client lacks the next CA |
//! | the served certificate is not valid, another one is | [`Action::Switch`] or [`Action::Return`] at once |
//! | no certificate is valid, and the served one has expired | [`Action::Replace`] |
//!
//! `force` takes the next step at once: it publishes, and the next time it switches if all clients trust the next CA.
//!
//! The replaced pair is kept, so that a switch under a clock that is years ahead is taken back when the clock is right.

use std::time::{Duration, SystemTime};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// The next certificate is served from this time before the end of the present one. The alert on certificates that
/// expire within 14 days does not fire on a renewal that succeeds.
pub const SWITCH_BEFORE: Duration = Duration::from_secs(21 * 24 * 3600);
/// In this time before its end the certificate is replaced in any case.
pub const LAST_DAYS: Duration = Duration::from_secs(3 * 24 * 3600);
/// How long a kubeconfig has the next CA before a client that reads it is assumed to have it.
pub const READERS_TIME: Duration = Duration::from_secs(14 * 24 * 3600);
/// The restarts of the readers of a fleet are spread over this time after the publication.
pub const RESTART_SPREAD: Duration = Duration::from_secs(14 * 24 * 3600);

/// The time in which a certificate and its CA are both valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The first second.
    pub from: SystemTime,
    /// The last second.
    pub until: SystemTime,
}

impl Window {
    /// Whether the certificate is valid at `now`.
    pub fn contains(self, now: SystemTime) -> bool {
        self.from <= now && now <= self.until
    }

    /// The time from which the certificate is to be renewed: after two thirds of its lifetime.
    pub fn renewal_time(self) -> SystemTime {
        self.from + self.until.duration_since(self.from).unwrap_or_default() * 2 / 3
    }
}

/// Whether the clients trust the next CA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// No listed kubeconfig is known to trust the local CA, so the clients are not known.
    Unknown,
    /// A kubeconfig or a running client does not trust it.
    Incomplete,
    /// All do, the last one since this time.
    Since(SystemTime),
}

/// What a run sees.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// The time by the clock of this machine.
    pub now: SystemTime,
    /// The validity of the served pair.
    pub current: Window,
    /// The validity of the next pair, which is published and not served yet.
    pub next: Option<Window>,
    /// The validity of the pair that was served before.
    pub previous: Option<Window>,
    /// The trust of the clients in the next CA.
    pub trust: Trust,
    /// Whether the user asks for the next step now.
    pub force: bool,
}

/// What the run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It serves the same certificate, and repairs kubeconfigs that lack a CA.
    Keep,
    /// It creates the next pair and publishes its CA.
    Publish,
    /// It serves the next pair.
    Switch,
    /// It serves the previous pair again.
    Return,
    /// It creates a pair and serves it at once: no certificate is valid.
    Replace,
}

/// What an operator must know or do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// No listed kubeconfig trusts the local CA.
    NoKubeconfig,
    /// It is time to switch, and a client lacks the next CA.
    NotTrusted,
    /// The switch was due in any case, and a client lacks the new CA.
    SwitchedUntrusted,
    /// The certificate had expired before clients had time to get the new CA.
    Expired,
    /// The certificate is not valid yet by the clock of this machine.
    NotYetValid,
}

/// The decision of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// What the run does.
    pub action: Action,
    /// What is wrong.
    pub alarm: Option<Alarm>,
}

impl Decision {
    const fn new(action: Action, alarm: Option<Alarm>) -> Self {
        Self { action, alarm }
    }
}

/// Decides what the run does.
pub fn decide(seen: &Observed) -> Decision {
    if seen.current.contains(seen.now) { decide_valid(seen) } else { decide_not_valid(seen) }
}

/// The next pair if it is valid and does not end before the current one. Both may be of the same second.
pub fn usable_next(seen: &Observed) -> Option<Window> {
    seen.next.filter(|next| next.contains(seen.now) && next.until >= seen.current.until)
}

fn decide_valid(seen: &Observed) -> Decision {
    let Observed { now, current, trust, .. } = *seen;
    let unknown = (trust == Trust::Unknown).then_some(Alarm::NoKubeconfig);
    if usable_next(seen).is_none() {
        let is_due = now >= current.renewal_time() || seen.force;
        return if is_due {
            Decision::new(Action::Publish, unknown)
        } else {
            Decision::new(Action::Keep, None)
        };
    }
    let is_ready = matches!(trust, Trust::Since(_));
    // A publication that was interrupted, and is repeated with `force`, is completed first.
    if seen.force && trust != Trust::Incomplete {
        return Decision::new(Action::Switch, unknown);
    }
    if now >= last_switch(current) {
        let untrusted = (!is_ready).then_some(Alarm::SwitchedUntrusted);
        return Decision::new(Action::Switch, untrusted);
    }
    if now < current.until - SWITCH_BEFORE {
        return Decision::new(Action::Keep, unknown);
    }
    match trust {
        Trust::Since(since) if now >= since + READERS_TIME => Decision::new(Action::Switch, None),
        Trust::Since(_) => Decision::new(Action::Keep, None),
        Trust::Incomplete => Decision::new(Action::Keep, Some(Alarm::NotTrusted)),
        Trust::Unknown => Decision::new(Action::Keep, unknown),
    }
}

fn decide_not_valid(seen: &Observed) -> Decision {
    let Observed { now, current, next, previous, .. } = *seen;
    let is_valid = |window: Option<Window>| window.is_some_and(|window| window.contains(now));
    if is_valid(next) {
        let is_ready = matches!(seen.trust, Trust::Since(_));
        Decision::new(Action::Switch, (!is_ready).then_some(Alarm::Expired))
    } else if is_valid(previous) {
        Decision::new(Action::Return, Some(Alarm::NotYetValid))
    } else if now > current.until || seen.force {
        Decision::new(Action::Replace, Some(Alarm::Expired))
    } else {
        // A clock that is behind is more likely than a certificate that was created with a clock that was ahead. With
        // the first, a new certificate would have expired when the clock is right.
        Decision::new(Action::Keep, Some(Alarm::NotYetValid))
    }
}

/// The time from which the certificate is replaced in any case.
pub fn last_switch(current: Window) -> SystemTime {
    current.until - LAST_DAYS
}

/// When a switch is expected if the clients trust the next CA.
pub fn expected_switch(current: Window, trust: Trust) -> SystemTime {
    let start = current.until - SWITCH_BEFORE;
    match trust {
        Trust::Since(since) => (since + READERS_TIME).max(start).min(last_switch(current)),
        Trust::Unknown | Trust::Incomplete => last_switch(current),
    }
}

/// When a reader that lacks the next CA since `since` is restarted. `place`, from 0 to 1, is its place in the fleet.
/// The restarts of a fleet are over before half of the time until the last switch has passed.
pub fn restart_time(since: SystemTime, place: f64, current: Window) -> SystemTime {
    let left = last_switch(current).duration_since(since).unwrap_or_default();
    // The restart and the switch are each done by a daily run.
    let spread = RESTART_SPREAD.min(left.saturating_sub(DAY) / 2);
    since + spread.mul_f64(place.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    fn day(number: u32) -> SystemTime {
        UNIX_EPOCH + DAY * (20_000 + number)
    }

    fn window(from: u32, until: u32) -> Window {
        Window { from: day(from), until: day(until) }
    }

    /// A year that begins at day 0.
    fn seen(now: u32, next: Option<Window>, trust: Trust) -> Observed {
        let current = window(0, 365);
        Observed { now: day(now), current, next, previous: None, trust, force: false }
    }

    #[test]
    fn decide_valid_certificate_publishes_then_switches_when_clients_have_had_time() {
        let next = Some(window(243, 609));
        let since = |at| Trust::Since(day(at));
        let both = Trust::Incomplete;
        for (now, next, trust, action, alarm) in [
            (100, None, since(0), Action::Keep, None),
            (242, None, both, Action::Keep, None),
            (244, None, both, Action::Publish, None),
            (244, None, Trust::Unknown, Action::Publish, Some(Alarm::NoKubeconfig)),
            (245, next, both, Action::Keep, None),
            (300, next, Trust::Unknown, Action::Keep, Some(Alarm::NoKubeconfig)),
            (343, next, since(245), Action::Keep, None),
            (344, next, since(245), Action::Switch, None),
            // A kubeconfig was rewritten by hand.
            (344, next, both, Action::Keep, Some(Alarm::NotTrusted)),
            (345, next, since(340), Action::Keep, None),
            (354, next, since(340), Action::Switch, None),
            (355, next, Trust::Unknown, Action::Keep, Some(Alarm::NoKubeconfig)),
            (361, next, both, Action::Keep, Some(Alarm::NotTrusted)),
            (362, next, both, Action::Switch, Some(Alarm::SwitchedUntrusted)),
            (362, next, since(361), Action::Switch, None),
            (362, next, Trust::Unknown, Action::Switch, Some(Alarm::SwitchedUntrusted)),
            // The machine was off until the last days.
            (364, None, both, Action::Publish, None),
            // A next pair that is not valid yet, or ends before the current one, is replaced.
            (300, Some(window(1000, 1365)), both, Action::Publish, None),
            (100, Some(window(1000, 1365)), both, Action::Keep, None),
            (300, Some(window(0, 301)), both, Action::Publish, None),
        ] {
            let decision = decide(&seen(now, next, trust));
            assert_eq!(decision, Decision { action, alarm }, "day {now}, {next:?}, {trust:?}");
        }
    }

    #[test]
    fn decide_force_publishes_first_and_switches_next() {
        let forced = |next, trust| decide(&Observed { force: true, ..seen(10, next, trust) });
        assert_eq!(forced(None, Trust::Incomplete).action, Action::Publish);
        let next = Some(window(9, 375));
        assert_eq!(forced(next, Trust::Since(day(10))), Decision::new(Action::Switch, None));
        assert_eq!(forced(next, Trust::Incomplete), Decision::new(Action::Keep, None));
        let alarm = Some(Alarm::NoKubeconfig);
        assert_eq!(forced(next, Trust::Unknown), Decision::new(Action::Switch, alarm));
    }

    #[test]
    fn decide_certificate_that_is_not_valid_is_replaced_by_one_that_is() {
        let (both, since) = (Trust::Incomplete, Trust::Since(day(250)));
        let not_valid =
            |now, next, previous, trust| decide(&Observed { previous, ..seen(now, next, trust) });
        let (valid, old) = (Some(window(243, 609)), Some(window(100, 200)));
        let expired = Some(Alarm::Expired);
        for (now, next, previous, trust, action, alarm) in [
            (400, valid, None, since, Action::Switch, None),
            (400, valid, old, both, Action::Switch, expired),
            (400, None, None, both, Action::Replace, expired),
            (700, valid, old, since, Action::Replace, expired),
        ] {
            let decision = not_valid(now, next, previous, trust);
            assert_eq!(decision, Decision { action, alarm }, "day {now}");
        }
        // Created by a clock that was two years ahead.
        let ahead = |previous, force| {
            let current = window(730, 1095);
            decide(&Observed { current, previous, force, ..seen(10, None, both) })
        };
        let alarm = Some(Alarm::NotYetValid);
        let year = Some(window(0, 365));
        assert_eq!(ahead(year, false), Decision { action: Action::Return, alarm });
        assert_eq!(ahead(None, false), Decision { action: Action::Keep, alarm });
        assert_eq!(ahead(None, true).action, Action::Replace);
    }

    #[test]
    fn restart_time_is_spread_over_two_weeks_and_ends_before_the_switch() {
        let current = window(0, 365);
        assert_eq!(restart_time(day(243), 0.0, current), day(243));
        assert_eq!(restart_time(day(243), 0.5, current), day(250));
        assert_eq!(restart_time(day(243), 1.0, current), day(257));
        // Published late: the last restart is half-way to the last switch, a daily run before it.
        assert_eq!(restart_time(day(351), 1.0, current), day(356));
        assert_eq!(restart_time(day(362), 1.0, current), day(362));
        assert_eq!(restart_time(day(364), 1.0, current), day(364));
    }

    #[test]
    fn expected_switch_is_between_its_bounds() {
        let current = window(0, 365);
        for (trust, expected) in [
            (Trust::Since(day(244)), 344),
            (Trust::Since(day(340)), 354),
            (Trust::Since(day(360)), 362),
            (Trust::Incomplete, 362),
            (Trust::Unknown, 362),
        ] {
            assert_eq!(expected_switch(current, trust), day(expected), "{trust:?}");
        }
    }
}
