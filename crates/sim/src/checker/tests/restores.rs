//! A store that is restored from a backup, and a jackstay that has lost its floors.

use super::*;

/// At the moment 100 the store of [`Table::new`] goes back to 3. Then 4 and 5 write `a`, with the tokens 14 and 15.
fn restored() -> Table {
    let mut table = Table::new();
    let changes = table.history.changes.len();
    table.history.restores.push(Restore { at: table.moment(100), changes, version: 3 });
    for version in [4, 5] {
        let mut change = table.history.changes[3].clone();
        (change.version, change.token) = (version, Some(10 + version));
        change.at = table.start + Duration::from_millis(100 + 10 * version);
        table.history.changes.push(change);
    }
    table
}

fn violations(seen: impl IntoIterator<Item = (u64, Seen)>) -> Vec<String> {
    let saw = |table: Table, (at, seen)| table.saw(1, Some(0), (at, at + 5), seen);
    seen.into_iter().fold(restored(), saw).violations()
}

#[test]
fn reads_are_compared_with_the_epoch_in_which_they_end() {
    let old = (10, list(Any, 6, &[("a", 6)]));
    let full = |version| list(Any, version, &[("a", version), ("b", 2)]);
    assert_eq!(violations([old.clone(), (200, full(4)), (210, full(5))]), [""; 0]);
    assert_eq!(violations([old.clone(), (200, get(Any, "a", 4, 14))]), [""; 0]);
    let lost = violations([(200, get(Any, "a", 4, 4))]);
    assert!(lost.len() == 1 && lost[0].contains("is of write"), "{lost:?}");
    let back = violations([old, (200, full(5)), (210, full(4))]);
    assert!(back.len() == 1 && back[0].contains("a list at 4 came after a list at 5"), "{back:?}");
}

#[test]
fn informer_of_a_lost_version_lists_before_its_next_event() {
    let watch = |version| (10, Seen::WatchStarted(version));
    let events = [(200, event(Modified, "a", 4, 14)), (210, event(Modified, "a", 5, 15))];
    let [first, second] = events;
    assert_eq!(violations([watch(3), first.clone(), second.clone()]), [""; 0]);
    let lost = violations([watch(4), second.clone()]);
    assert!(lost.len() == 1 && lost[0].ends_with("4, which a restore has lost"), "{lost:?}");
    // The watch of the new history is one of the lost version all the same.
    let lost = violations([watch(4), (200, Seen::WatchStarted(4)), (210, Seen::Bookmark(5))]);
    assert!(lost.len() == 1 && lost[0].ends_with("4, which a restore has lost"), "{lost:?}");
    let listed = (200, list(Any, 4, &[("a", 4), ("b", 2)]));
    let again = (205, Seen::WatchStarted(4));
    assert_eq!(violations([watch(6), listed, again, (210, second.1)]), [""; 0]);
}

#[test]
fn informer_that_keeps_a_lost_version_is_silent_since_the_restore() {
    let table = restored().saw(1, None, (10, 10), Seen::WatchStarted(6));
    let findings = table.saw(1, None, (300, 300), Seen::InformerStopped(6)).findings();
    assert_eq!(findings.longest_silence, Duration::from_millis(200));
}

#[test]
fn floors_of_a_group_end_when_its_jackstay_is_killed() {
    let run = |forgotten: &[u32]| {
        let mut table = Table::new();
        let at = table.moment(25);
        table.history.forgotten = forgotten.iter().map(|group| (*group, at)).collect();
        let newer = list(Any, 4, &[("a", 4), ("b", 2)]);
        let older = list(Any, 3, &[("a", 3), ("b", 2)]);
        table.saw(1, Some(0), (10, 20), newer).saw(1, Some(0), (30, 40), older).violations()
    };
    assert_eq!(run(&[]).len(), 1);
    assert_eq!(run(&[1]).len(), 1, "another group");
    assert_eq!(run(&[0]), [""; 0]);
}
