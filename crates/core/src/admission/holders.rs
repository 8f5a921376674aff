//! Counts how many of something each key holds, and finds the key that holds the most, from which one is taken for
//! another key. What may be taken is known to the caller.

use std::collections::{BTreeMap, BTreeSet};

/// How many each key holds.
#[derive(Debug)]
pub struct Holders<K> {
    keys: BTreeMap<K, Holder>,
    /// The keys from which one may be taken, by the number that they hold.
    by_size: BTreeSet<(usize, K)>,
    total: usize,
}

#[derive(Debug, Default)]
struct Holder {
    count: usize,
    /// Whether one may be taken from the key.
    gives: bool,
}

impl<K> Default for Holders<K> {
    fn default() -> Self {
        Self { keys: BTreeMap::new(), by_size: BTreeSet::new(), total: 0 }
    }
}

impl<K: Ord + Copy> Holders<K> {
    /// How many this key holds.
    pub fn count(&self, key: K) -> usize {
        self.keys.get(&key).map_or(0, |holder| holder.count)
    }

    /// How many all keys hold.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The key holds one more.
    pub fn add(&mut self, key: K) {
        self.total += 1;
        self.update(key, |holder| holder.count += 1);
    }

    /// The key holds one less. Changes nothing if it holds none.
    pub fn remove(&mut self, key: K) {
        if self.count(key) > 0 {
            self.total -= 1;
            self.update(key, |holder| holder.count -= 1);
        }
    }

    /// Sets whether one may be taken from the key, as long as it holds any.
    pub fn set_gives(&mut self, key: K, gives: bool) {
        if self.keys.get(&key).is_some_and(|holder| holder.gives != gives) {
            self.update(key, |holder| holder.gives = gives);
        }
    }

    /// The key that holds the most, with that number, of those from which one may be taken; after `before`, the one
    /// that follows it in this order.
    pub fn largest(&self, before: Option<(usize, K)>) -> Option<(usize, K)> {
        match before {
            None => self.by_size.last().copied(),
            Some(before) => self.by_size.range(..before).next_back().copied(),
        }
    }

    fn update(&mut self, key: K, update: impl FnOnce(&mut Holder)) {
        let holder = self.keys.entry(key).or_default();
        if holder.gives {
            self.by_size.remove(&(holder.count, key));
        }
        update(holder);
        if holder.count == 0 {
            self.keys.remove(&key);
        } else if holder.gives {
            self.by_size.insert((holder.count, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Add,
        Remove,
        Gives(bool),
    }

    proptest! {
        #[test]
        fn largest_names_all_that_give_by_size_and_nothing_remains_after_all_have_left(
            steps in prop::collection::vec((0..6_u8, 0..4_u8), 0..200),
        ) {
            let mut holders = Holders::default();
            let mut known: BTreeMap<u8, (usize, bool)> = BTreeMap::new();
            for (key, step) in steps {
                let step = [Step::Add, Step::Remove, Step::Gives(true), Step::Gives(false)][usize::from(step)];
                let (count, gives) = known.get(&key).copied().unwrap_or_default();
                match step {
                    Step::Add => {
                        holders.add(key);
                        known.insert(key, (count + 1, gives));
                    }
                    Step::Remove => {
                        holders.remove(key);
                        known.insert(key, (count.saturating_sub(1), gives));
                    }
                    Step::Gives(gives) => {
                        holders.set_gives(key, gives);
                        known.insert(key, (count, gives));
                    }
                }
                known.retain(|_, (count, _)| *count > 0);
                prop_assert_eq!(holders.count(key), known.get(&key).map_or(0, |(count, _)| *count));
                prop_assert_eq!(holders.total(), known.values().map(|(count, _)| count).sum::<usize>());
                let found = std::iter::successors(holders.largest(None), |at| holders.largest(Some(*at)));
                let mut expected: Vec<_> = known
                    .iter()
                    .filter(|(_, (_, gives))| *gives)
                    .map(|(key, (count, _))| (*count, *key))
                    .collect();
                expected.sort_unstable();
                expected.reverse();
                prop_assert_eq!(found.collect::<Vec<_>>(), expected);
            }
            for (key, (count, _)) in known {
                (0..=count).for_each(|_| holders.remove(key));
            }
            prop_assert_eq!((holders.total(), holders.keys.len(), holders.by_size.len()), (0, 0, 0));
        }
    }
}
