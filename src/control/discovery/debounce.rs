//! When a change of the wanted set becomes a change of the set: a pure step function over time.
//!
//! | what | when |
//! |---|---|
//! | nothing is usable | additions at once |
//! | additions, and other changes of what stays | together, [`WINDOW`] after the first of them |
//! | a removal | when it has been wanted without a break for [`WINDOW`]: a member that flaps stays |
//! | a removal of what serves, while nothing that stays does | when something that stays does |
//!
//! So an answer that replaces every endpoint by one that does not work takes nothing away, and each
//! change is made within 1.5 s of being told.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::control::endpoint_set::EndpointSpec;

/// Changes within this time are made together.
pub const WINDOW: Duration = Duration::from_secs(1);

/// How often a removal that waits for something usable looks whether there is any.
const LOOK: Duration = Duration::from_millis(100);

/// A member of the set as it is now.
#[derive(Debug, Clone)]
pub struct Placed {
    /// What it was placed as.
    pub member: EndpointSpec,
    /// Whether requests get an answer there.
    pub usable: bool,
}

/// What to do now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The set to place, if it is another one.
    pub place: Option<Vec<EndpointSpec>>,
    /// When to look again, though nothing happens.
    pub again: Option<Instant>,
    /// EndpointSetWriter that would be gone if anything else served.
    pub held: usize,
}

/// What is not applied yet, and since when.
#[derive(Debug, Default)]
pub struct Debouncer {
    /// The first change that waits.
    changed: Option<Instant>,
    /// EndpointSetWriter that are no longer wanted, and since when without a break.
    unwanted: HashMap<EndpointSpec, Instant>,
}

/// The same endpoint, fallback or not.
fn same(a: &EndpointSpec, b: &EndpointSpec) -> bool {
    a.address == b.address && a.server_name == b.server_name
}

impl Debouncer {
    /// Compares what is wanted with what is.
    pub fn step(&mut self, wanted: &[EndpointSpec], placed: &[Placed], now: Instant) -> Step {
        let is_wanted = |member: &EndpointSpec| wanted.iter().any(|w| same(w, member));
        let is_placed = |member: &EndpointSpec| placed.iter().any(|p| same(&p.member, member));
        self.unwanted.retain(|member, _| is_placed(member) && !is_wanted(member));

        let nothing_usable = !placed.iter().any(|p| p.usable);
        let changes = wanted.iter().any(|w| !placed.iter().any(|p| p.member == *w));
        if !changes {
            self.changed = None;
        }
        let due = changes.then(|| *self.changed.get_or_insert(now) + WINDOW);
        let join = due.is_some_and(|due| nothing_usable || now >= due);
        let mut step = Step { again: due.filter(|_| !join), ..Step::default() };

        let stays_usable = placed.iter().any(|p| p.usable && is_wanted(&p.member));
        let mut set: Vec<EndpointSpec> = if join {
            wanted.to_vec()
        } else {
            placed.iter().filter(|p| is_wanted(&p.member)).map(|p| p.member.clone()).collect()
        };
        for Placed { member, usable } in placed.iter().filter(|p| !is_wanted(&p.member)) {
            let identity = EndpointSpec { fallback: false, ..member.clone() };
            let due = *self.unwanted.entry(identity).or_insert(now) + WINDOW;
            let held = now >= due && *usable && !stays_usable;
            if now < due || held {
                step.held += usize::from(held);
                let look = if held { now + LOOK } else { due };
                step.again = Some(step.again.map_or(look, |again| again.min(look)));
                // It still serves, but what is wanted comes first.
                set.push(EndpointSpec { fallback: member.fallback || join, ..member.clone() });
            }
        }
        if join {
            self.changed = None;
        }
        let unchanged = set.len() == placed.len()
            && set.iter().all(|member| placed.iter().any(|p| p.member == *member));
        step.place = (!unchanged).then_some(set);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EndpointAddress;

    fn member(host: &str) -> EndpointSpec {
        let address = EndpointAddress { host: host.into(), port: 1 };
        EndpointSpec { address, server_name: None, fallback: false }
    }

    fn members(hosts: &[&str]) -> Vec<EndpointSpec> {
        hosts.iter().map(|h| member(h)).collect()
    }

    /// A set, the clock, and who serves.
    struct World {
        settling: Debouncer,
        placed: Vec<EndpointSpec>,
        usable: Vec<&'static str>,
        start: Instant,
        changes: usize,
    }

    impl World {
        fn new(placed: &[&str], usable: &[&'static str]) -> Self {
            Self {
                settling: Debouncer::default(),
                placed: members(placed),
                usable: usable.to_vec(),
                start: Instant::now(),
                changes: 0,
            }
        }

        fn at(&mut self, ms: u64, wanted: &[&str]) -> Option<u64> {
            let placed: Vec<_> = self
                .placed
                .iter()
                .map(|member| Placed {
                    member: member.clone(),
                    usable: self.usable.contains(&&*member.address.host),
                })
                .collect();
            let now = self.start + Duration::from_millis(ms);
            let step = self.settling.step(&members(wanted), &placed, now);
            if let Some(set) = step.place {
                assert!(!set.is_empty() || wanted.is_empty());
                self.placed = set;
                self.changes += 1;
            }
            step.again.map(|again| (again - self.start).as_millis() as u64)
        }

        fn hosts(&self) -> Vec<&str> {
            let mut hosts: Vec<_> = self.placed.iter().map(|m| &*m.address.host).collect();
            hosts.sort_unstable();
            hosts
        }
    }

    #[test]
    fn at_the_start_nobody_waits() {
        let mut world = World::new(&[], &[]);
        assert_eq!(world.at(0, &["a"]), None);
        assert_eq!(world.hosts(), ["a"]);
        world.at(10, &["a", "b"]);
        assert_eq!(world.hosts(), ["a", "b"], "nothing is usable yet");
    }

    #[test]
    fn changes_within_a_second_are_one() {
        let mut world = World::new(&["a"], &["a"]);
        assert_eq!(world.at(0, &["a", "b"]), Some(1000));
        assert_eq!(world.at(400, &["a", "b", "c"]), Some(1000));
        assert_eq!(world.changes, 0);
        assert_eq!(world.at(1000, &["a", "b", "c"]), None);
        assert_eq!((world.hosts(), world.changes), (vec!["a", "b", "c"], 1));
    }

    #[test]
    fn what_was_taken_back_in_time_never_was() {
        let mut world = World::new(&["a"], &["a"]);
        world.at(0, &["a", "b"]);
        assert_eq!(world.at(500, &["a"]), None);
        assert_eq!(world.at(900, &["a", "b"]), Some(1900), "a new change");
        assert_eq!(world.changes, 0);
    }

    #[test]
    fn a_removal_waits_and_a_member_that_flaps_stays() {
        let mut world = World::new(&["a", "b"], &["a", "b"]);
        for turn in 0..50 {
            world.at(turn * 400, &["a"]);
            world.at(turn * 400 + 200, &["a", "b"]);
        }
        assert_eq!(world.changes, 0, "{:?}", world.hosts());
        assert_eq!(world.at(20_000, &["a"]), Some(21_000));
        assert_eq!(world.at(21_000, &["a"]), None);
        assert_eq!(world.hosts(), ["a"]);
    }

    #[test]
    fn all_replaced_at_once_by_what_does_not_work() {
        let mut world = World::new(&["a", "b"], &["a"]);
        world.at(0, &["x", "y"]);
        world.at(1000, &["x", "y"]);
        assert_eq!(world.hosts(), ["a", "x", "y"], "a serves, b does not");
        let fallback = |host| world.placed.iter().any(|m| m.address.host == host && m.fallback);
        assert!(fallback("a") && !fallback("x"));
        assert_eq!(world.at(60_000, &["x", "y"]), Some(60_100), "for as long as it takes");
        assert_eq!(world.hosts(), ["a", "x", "y"]);
        world.usable = vec!["a", "y"];
        assert_eq!(world.at(60_100, &["x", "y"]), None);
        assert_eq!(world.hosts(), ["x", "y"]);
    }

    #[test]
    fn a_thousand_updates_are_each_made_in_time() {
        let mut world = World::new(&["a"], &["a"]);
        let names: Vec<String> = (0..10).map(|n| format!("m{n}")).collect();
        let mut told = HashMap::new();
        let mut now = 0;
        for update in 0..1000 {
            let wanted = ["a", &names[update % 10], &names[(update * 7 + 3) % 10]];
            told.insert(update, now);
            let mut again = world.at(now, &wanted);
            // The next update comes after 50 ms to 2 s.
            let next = now + 50 + (update as u64 * 37) % 1950;
            while let Some(at) = again.filter(|at| *at < next) {
                again = world.at(at, &wanted);
                assert_ne!(again, Some(at), "it looks again without end");
            }
            let settled = next - now >= 1500;
            if settled {
                let mut expected = wanted.to_vec();
                expected.sort_unstable();
                expected.dedup();
                assert_eq!(world.hosts(), expected, "update {update}");
            }
            now = next;
        }
    }

    #[test]
    fn a_seed_that_becomes_a_fallback_is_a_change_like_any_other() {
        let mut settling = Debouncer::default();
        let now = Instant::now();
        let placed = [Placed { member: member("a"), usable: true }];
        let wanted = [member("x"), EndpointSpec { fallback: true, ..member("a") }];
        assert_eq!(settling.step(&wanted, &placed, now).place, None);
        let step = settling.step(&wanted, &placed, now + WINDOW);
        assert_eq!(step.place.as_deref(), Some(&wanted[..]));
    }
}
