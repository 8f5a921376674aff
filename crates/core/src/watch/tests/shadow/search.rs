//! A search over every order of the inputs of a world.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};

use super::world::{Action, Setting, World};
use crate::watch::shadow::{ShadowEnd, Side};

/// What a search has found.
#[derive(Debug, Default)]
pub struct Found {
    /// Different states.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
    /// Paths from the beginning to an end: the interleavings.
    pub paths: u128,
    /// How often each [`ShadowEnd`] was a result of a step.
    pub ends: HashMap<&'static str, usize>,
}

impl Found {
    pub fn add(&mut self, other: &Self) {
        self.states += other.states;
        self.steps += other.steps;
        self.paths += other.paths;
        for (name, count) in &other.ends {
            *self.ends.entry(name).or_default() += count;
        }
    }
}

/// 128 bits of the text of a state. Two of a million states have the same with a probability below 10⁻²⁶.
struct Fingerprint(DefaultHasher, DefaultHasher);

impl Write for Fingerprint {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        self.1.write(text.as_bytes());
        Ok(())
    }
}

impl World {
    fn fingerprint(&self) -> u128 {
        let mut print = Fingerprint(DefaultHasher::new(), DefaultHasher::new());
        print.1.write_u8(1);
        write!(print, "{self:?}").unwrap();
        u128::from(print.0.finish()) << 64 | u128::from(print.1.finish())
    }
}

/// A search in progress.
struct Search<'a> {
    setting: &'a Setting,
    /// The number of paths from a state to an end.
    seen: HashMap<u128, u128>,
    path: Vec<Action>,
    found: Found,
}

/// Visits every state that can follow, and counts the paths. Panics at the first state that breaks a promise.
pub fn search(setting: &Setting) -> Found {
    let mut search =
        Search { setting, seen: HashMap::new(), path: Vec::new(), found: Found::default() };
    search.found.paths = search.visit(&World::new(setting));
    search.found.states = search.seen.len();
    search.found
}

impl Search<'_> {
    fn visit(&mut self, world: &World) -> u128 {
        let print = world.fingerprint();
        if let Some(paths) = self.seen.get(&print) {
            return *paths;
        }
        let actions = world.actions(self.setting);
        let mut paths = u128::from(actions.is_empty());
        if actions.is_empty() {
            self.check_end(world);
        }
        for action in actions {
            let mut next = world.fork(self.setting);
            self.path.push(action);
            self.found.steps += 1;
            let side = match action {
                Action::Push(side, _) | Action::Bookmark(side, _) => Some(side),
                _ => None,
            };
            match next.take(self.setting, action) {
                Ok(shadow) => {
                    self.count(shadow);
                    let compares = world.relay.has_shadow() || world.relay.first_follows();
                    if let Err(broken) = next.check(self.setting, (side, compares), shadow) {
                        self.fail(&broken, world, &next);
                    }
                }
                Err(broken) => self.fail(&broken, world, &next),
            }
            paths += self.visit(&next);
            self.path.pop();
        }
        self.seen.insert(print, paths);
        paths
    }

    /// Nothing can happen any more: the watch has ended, or its client has every event.
    fn check_end(&self, world: &World) {
        let received = world.client.received.len();
        let is_behind = received < self.setting.frames.len && self.setting.faulty.is_none();
        if world.end.is_none() && is_behind {
            self.fail("the watch waits forever", world, world);
        }
        let World { relay, account, .. } = world.fork(self.setting);
        drop(relay);
        if account.budget().held() > 0 {
            self.fail("memory is not released", world, world);
        }
    }

    fn count(&mut self, shadow: Option<ShadowEnd>) {
        if let Some(end) = shadow {
            *self.found.ends.entry(end.as_str()).or_default() += 1;
        }
    }

    fn fail(&self, broken: &str, before: &World, after: &World) -> ! {
        let follows = [before, after].map(|world| world.relay.first_follows());
        panic!(
            "{}: {broken}\n{:?}\nfollows: {follows:?}, {:?}\nbefore: {before:?}\nafter: {after:?}",
            self.setting.name,
            self.path,
            Side::First,
        );
    }
}
