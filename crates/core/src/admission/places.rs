//! A bounded set whose places are shared by keys: while it is full, the key with the most places loses its oldest to a
//! new one.

use std::collections::BTreeMap;

use super::Holders;

/// The places that are taken, each with an item.
#[derive(Debug)]
pub struct Places<K, T> {
    holders: Holders<K>,
    taken: BTreeMap<(K, u64), T>,
    next_id: u64,
}

impl<K, T> Default for Places<K, T> {
    fn default() -> Self {
        Self { holders: Holders::default(), taken: BTreeMap::new(), next_id: 0 }
    }
}

impl<K: Ord + Copy, T> Places<K, T> {
    /// Takes a place for `key`, and returns its number. If the set is full, another item must leave: the oldest of the
    /// key that has the most places then, which is returned, too. In an empty set, that is the new one.
    pub fn take(&mut self, key: K, item: T, is_full: bool) -> (u64, Option<T>) {
        let id = self.next_id;
        self.next_id += 1;
        self.taken.insert((key, id), item);
        self.holders.add(key);
        self.holders.set_gives(key, true);
        let largest = if is_full { self.holders.largest(None) } else { None };
        let displaced = largest.and_then(|(_, largest)| {
            let (&place, _) = self.taken.range((largest, 0)..).next()?;
            self.remove(place)
        });
        (id, displaced)
    }

    /// Gives a place back. Changes nothing, and returns false, if its item was displaced.
    pub fn give_back(&mut self, key: K, id: u64) -> bool {
        self.remove((key, id)).is_some()
    }

    /// The number of places that are taken.
    pub fn len(&self) -> usize {
        self.taken.len()
    }

    /// Whether no place is taken.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    fn remove(&mut self, place: (K, u64)) -> Option<T> {
        let item = self.taken.remove(&place)?;
        self.holders.remove(place.0);
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a place of at most four, with its number as the item. Returns what is displaced.
    fn take(places: &mut Places<char, u64>, key: char, number: u64) -> Option<u64> {
        let is_full = places.len() >= 4;
        let (id, displaced) = places.take(key, number, is_full);
        assert_eq!(id, number);
        displaced
    }

    #[test]
    fn take_displaces_the_oldest_of_the_key_with_the_most() {
        let mut places = Places::default();
        for (number, (key, displaced)) in [
            ('a', None),
            ('a', None),
            ('a', None),
            ('b', None),
            // a has three places.
            ('b', Some(0)),
            // a has three again.
            ('a', Some(1)),
            ('b', Some(3)),
            // Both have two. The one that loses a place is the last in the order of keys.
            ('0', Some(4)),
            ('0', Some(2)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(take(&mut places, key, number as u64), displaced, "{number}");
        }
        assert_eq!(places.len(), 4);
    }

    #[test]
    fn give_back_frees_the_place_unless_it_was_displaced() {
        let mut places = Places::default();
        for number in 0..4 {
            assert_eq!(take(&mut places, 'a', number), None);
        }
        assert_eq!(take(&mut places, 'b', 4), Some(0));
        assert!(!places.give_back('a', 0));
        assert!(places.give_back('a', 2));
        assert_eq!(take(&mut places, 'b', 5), None);
        for (key, id) in [('a', 1), ('a', 3), ('b', 4), ('b', 5)] {
            assert!(!places.is_empty());
            assert!(places.give_back(key, id));
        }
        assert!(places.is_empty());
        assert_eq!(places.take('a', 6, true), (6, Some(6)));
    }
}
