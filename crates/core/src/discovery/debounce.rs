//! Decides when a change of the wanted endpoint set is applied: a pure step function over time.
//!
//! | change | applied |
//! |---|---|
//! | any but a removal, while no endpoint is usable | at once |
//! | addition, or change of an endpoint that stays | [`WINDOW`] after the first such change, all together |
//! | removal | after the endpoint has been unwanted for [`WINDOW`] without a break |
//! | removal of a usable endpoint, while no wanted endpoint is usable | as above, and not before a wanted endpoint is usable |
//!
//! Therefore an answer that replaces all endpoints by unusable ones removes no usable endpoint, and an
//! endpoint that flaps stays. Every other change is applied within 1.5 s.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::source::{EndpointIdentity, EndpointSpec};

/// Changes within this time are applied together.
pub const WINDOW: Duration = Duration::from_secs(1);

/// Interval of the checks whether a wanted endpoint is usable, while a removal waits for one.
const USABLE_CHECK: Duration = Duration::from_millis(100);

/// The result of [`Debouncer::step`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DebounceStep {
    /// The set to apply; `None` if the current one stays.
    pub apply: Option<Vec<EndpointSpec>>,
    /// When the next step is due, even if nothing changes until then.
    pub step_at: Option<Instant>,
    /// Number of unwanted endpoints that stay because no wanted endpoint is usable.
    pub retained: usize,
}

/// Times of the changes that are not applied yet.
#[derive(Debug, Default)]
pub struct Debouncer {
    /// When the first pending addition or other change appeared.
    changed_at: Option<Instant>,
    /// The unwanted endpoints, and since when they have been unwanted without a break.
    unwanted: HashMap<EndpointIdentity, Instant>,
}

impl Debouncer {
    /// Compares the wanted set with the current one. `usable` are the usable endpoints.
    pub fn step(
        &mut self,
        wanted: &[EndpointSpec],
        current: &[EndpointSpec],
        usable: &HashSet<EndpointIdentity>,
        now: Instant,
    ) -> DebounceStep {
        let identities = |specs: &[EndpointSpec]| -> HashSet<EndpointIdentity> {
            specs.iter().map(EndpointSpec::identity).collect()
        };
        let (wanted_ones, current_ones) = (identities(wanted), identities(current));
        let is_wanted = |spec: &EndpointSpec| wanted_ones.contains(&spec.identity());
        let is_usable = |spec: &EndpointSpec| usable.contains(&spec.identity());
        self.unwanted.retain(|one, _| current_ones.contains(one) && !wanted_ones.contains(one));

        let none_usable = !current.iter().any(is_usable);
        let has_changes = wanted.iter().any(|w| !current.contains(w));
        if !has_changes {
            self.changed_at = None;
        }
        let due = has_changes.then(|| *self.changed_at.get_or_insert(now) + WINDOW);
        let apply_wanted = due.is_some_and(|due| none_usable || now >= due);
        let mut step =
            DebounceStep { step_at: due.filter(|_| !apply_wanted), ..DebounceStep::default() };

        let wanted_usable = current.iter().any(|c| is_usable(c) && is_wanted(c));
        let mut set: Vec<EndpointSpec> = if apply_wanted {
            wanted.to_vec()
        } else {
            current.iter().filter(|c| is_wanted(c)).cloned().collect()
        };
        for spec in current.iter().filter(|c| !is_wanted(c)) {
            let due = *self.unwanted.entry(spec.identity()).or_insert(now) + WINDOW;
            let retained = now >= due && is_usable(spec) && !wanted_usable;
            if now < due || retained {
                step.retained += usize::from(retained);
                let at = if retained { now + USABLE_CHECK } else { due };
                step.step_at = Some(step.step_at.map_or(at, |earlier| earlier.min(at)));
                // Beside the wanted endpoints, an unwanted one is a fallback.
                let fallback = spec.fallback || apply_wanted;
                set.push(EndpointSpec { fallback, ..spec.clone() });
            }
        }
        if apply_wanted {
            self.changed_at = None;
        }
        let unchanged = set.len() == current.len() && set.iter().all(|s| current.contains(s));
        step.apply = (!unchanged).then_some(set);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::super::address::EndpointAddress;
    use super::*;

    fn spec(host: &str) -> EndpointSpec {
        let address = EndpointAddress { host: host.into(), port: 1 };
        EndpointSpec { address, server_name: None, fallback: false }
    }

    fn specs(hosts: &[&str]) -> Vec<EndpointSpec> {
        hosts.iter().map(|h| spec(h)).collect()
    }

    /// A debouncer with a current set, the usable hosts, and a clock.
    struct Simulation {
        debouncer: Debouncer,
        current: Vec<EndpointSpec>,
        usable: Vec<&'static str>,
        start: Instant,
        applied: usize,
    }

    impl Simulation {
        fn new(current: &[&str], usable: &[&'static str]) -> Self {
            Self {
                debouncer: Debouncer::default(),
                current: specs(current),
                usable: usable.to_vec(),
                start: Instant::now(),
                applied: 0,
            }
        }

        /// Steps at `ms`; returns when the next step is due.
        fn step(&mut self, ms: u64, wanted: &[&str]) -> Option<u64> {
            let usable = specs(&self.usable).iter().map(EndpointSpec::identity).collect();
            let now = self.start + Duration::from_millis(ms);
            let step = self.debouncer.step(&specs(wanted), &self.current, &usable, now);
            if let Some(set) = step.apply {
                assert!(!set.is_empty() || wanted.is_empty());
                self.current = set;
                self.applied += 1;
            }
            step.step_at.map(|at| (at - self.start).as_millis() as u64)
        }

        fn hosts(&self) -> Vec<&str> {
            let mut hosts: Vec<_> = self.current.iter().map(|s| &*s.address.host).collect();
            hosts.sort_unstable();
            hosts
        }
    }

    #[test]
    fn step_nothing_usable_applies_additions_at_once() {
        let mut simulation = Simulation::new(&[], &[]);
        assert_eq!(simulation.step(0, &["a"]), None);
        assert_eq!(simulation.hosts(), ["a"]);
        simulation.step(10, &["a", "b"]);
        assert_eq!(simulation.hosts(), ["a", "b"], "no endpoint is usable yet");
    }

    #[test]
    fn step_additions_within_window_are_applied_together() {
        let mut simulation = Simulation::new(&["a"], &["a"]);
        assert_eq!(simulation.step(0, &["a", "b"]), Some(1000));
        assert_eq!(simulation.step(400, &["a", "b", "c"]), Some(1000));
        assert_eq!(simulation.applied, 0);
        assert_eq!(simulation.step(1000, &["a", "b", "c"]), None);
        assert_eq!((simulation.hosts(), simulation.applied), (vec!["a", "b", "c"], 1));
    }

    #[test]
    fn step_addition_withdrawn_within_window_is_not_applied() {
        let mut simulation = Simulation::new(&["a"], &["a"]);
        simulation.step(0, &["a", "b"]);
        assert_eq!(simulation.step(500, &["a"]), None);
        assert_eq!(simulation.step(900, &["a", "b"]), Some(1900), "a new change");
        assert_eq!(simulation.applied, 0);
    }

    #[test]
    fn step_removal_waits_for_window_and_flapping_endpoint_stays() {
        let mut simulation = Simulation::new(&["a", "b"], &["a", "b"]);
        for turn in 0..50 {
            simulation.step(turn * 400, &["a"]);
            simulation.step(turn * 400 + 200, &["a", "b"]);
        }
        assert_eq!(simulation.applied, 0, "{:?}", simulation.hosts());
        assert_eq!(simulation.step(20_000, &["a"]), Some(21_000));
        assert_eq!(simulation.step(21_000, &["a"]), None);
        assert_eq!(simulation.hosts(), ["a"]);
    }

    #[test]
    fn step_unusable_replacements_retain_the_usable_endpoint() {
        let mut simulation = Simulation::new(&["a", "b"], &["a"]);
        simulation.step(0, &["x", "y"]);
        simulation.step(1000, &["x", "y"]);
        assert_eq!(simulation.hosts(), ["a", "x", "y"], "a is usable, b is not");
        let fallback =
            |host| simulation.current.iter().any(|s| s.address.host == host && s.fallback);
        assert!(fallback("a") && !fallback("x"));
        assert_eq!(
            simulation.step(60_000, &["x", "y"]),
            Some(60_100),
            "a is retained without a time limit"
        );
        assert_eq!(simulation.hosts(), ["a", "x", "y"]);
        simulation.usable = vec!["a", "y"];
        assert_eq!(simulation.step(60_100, &["x", "y"]), None);
        assert_eq!(simulation.hosts(), ["x", "y"]);
    }

    /// The addresses stay, and the name to verify changes: no certificate may have the new one.
    #[test]
    fn step_same_addresses_with_another_name_retain_the_usable_endpoints() {
        let named = |name: &str| {
            ["a", "b"].map(|host| EndpointSpec { server_name: Some(name.into()), ..spec(host) })
        };
        let (old, new) = (named("old"), named("new"));
        let mut debouncer = Debouncer::default();
        let now = Instant::now();
        let mut usable: HashSet<_> = old.iter().map(EndpointSpec::identity).collect();
        assert_eq!(debouncer.step(&new, &old, &usable, now).apply, None);
        let step = debouncer.step(&new, &old, &usable, now + WINDOW);
        let all = step.apply.unwrap();
        assert_eq!((all.len(), step.retained), (4, 2));
        for after in [10, 60_000] {
            let now = now + WINDOW + Duration::from_millis(after);
            let step = debouncer.step(&new, &all, &usable, now);
            assert_eq!((step.apply, step.retained), (None, 2));
        }
        // One that is verified by the new name is enough.
        usable.insert(new[1].identity());
        let step = debouncer.step(&new, &all, &usable, now + WINDOW * 100);
        assert_eq!(step.apply.as_deref(), Some(&new[..]));
    }

    #[test]
    fn step_1000_updates_applies_each_within_1500_ms() {
        let mut simulation = Simulation::new(&["a"], &["a"]);
        let names: Vec<String> = (0..10).map(|n| format!("m{n}")).collect();
        let mut now = 0;
        for update in 0..1000 {
            let wanted = ["a", &names[update % 10], &names[(update * 7 + 3) % 10]];
            let mut step_at = simulation.step(now, &wanted);
            // The next update comes after 50 ms to 2 s.
            let next = now + 50 + (update as u64 * 37) % 1950;
            while let Some(at) = step_at.filter(|at| *at < next) {
                step_at = simulation.step(at, &wanted);
                assert_ne!(step_at, Some(at), "the next step is due at once, again and again");
            }
            if next - now >= 1500 {
                let mut expected = wanted.to_vec();
                expected.sort_unstable();
                expected.dedup();
                assert_eq!(simulation.hosts(), expected, "update {update}");
            }
            now = next;
        }
    }

    #[test]
    fn step_endpoint_becomes_fallback_is_applied_after_window() {
        let mut debouncer = Debouncer::default();
        let now = Instant::now();
        let current = [spec("a")];
        let usable = HashSet::from([spec("a").identity()]);
        let wanted = [spec("x"), EndpointSpec { fallback: true, ..spec("a") }];
        assert_eq!(debouncer.step(&wanted, &current, &usable, now).apply, None);
        let step = debouncer.step(&wanted, &current, &usable, now + WINDOW);
        assert_eq!(step.apply.as_deref(), Some(&wanted[..]));
    }
}
