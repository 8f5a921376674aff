use super::*;
use ClientRank::{Identity, Token, Unproven};

const MIB: usize = 1 << 20;
const LIMIT: usize = 160 * MIB;

fn usage(used: usize, by_source: usize) -> Usage {
    Usage { limit: LIMIT, used: used * MIB, by_source: by_source * MIB }
}

#[test]
fn fits_leaves_reserves_and_half_of_what_is_free() {
    for (used, by_source, rank, fits) in [
        // Unproven clients share 100 MiB, tokens 120 MiB.
        (50, 50, Unproven, true),
        (51, 51, Unproven, false),
        (60, 60, Token, true),
        (61, 61, Token, false),
        (180, 180, Identity, true),
        (181, 1, Identity, false),
        // What others hold is not free.
        (80, 20, Unproven, true),
        (80, 21, Unproven, false),
        (100, 0, Unproven, true),
        (101, 0, Unproven, false),
        (101, 1, Token, true),
    ] {
        assert_eq!(usage(used, by_source).fits(rank), fits, "{used} {by_source} {rank:?}");
        // One more byte than is left does not fit.
        let usage = usage(used, by_source);
        let left = usage.left(rank);
        let with =
            |bytes| Usage { used: usage.used + bytes, by_source: usage.by_source + bytes, ..usage };
        assert!(!fits || with(left).fits(rank), "{left} more");
        assert!(!with(left + 1).fits(rank), "{left} + 1 more");
    }
}

#[test]
fn level_follows_the_class_and_the_source() {
    for (used, by_source, rank, level) in [
        (24, 24, Unproven, Level::Free),
        (25, 25, Unproven, Level::Half),
        (38, 38, Unproven, Level::High),
        (44, 44, Unproven, Level::Critical),
        // Another source is under pressure only when the whole share is used.
        (44, 1, Unproven, Level::Free),
        (50, 1, Unproven, Level::Half),
        (75, 1, Unproven, Level::High),
        (88, 1, Unproven, Level::Critical),
        (75, 1, Token, Level::Half),
        (139, 139, Identity, Level::Free),
        (140, 0, Identity, Level::High),
        (500, 500, Unproven, Level::Critical),
    ] {
        assert_eq!(usage(used, by_source).level(rank), level, "{used} {by_source} {rank:?}");
    }
    let nothing = Usage { limit: 0, used: 0, by_source: 0 };
    assert_eq!(nothing.level(Unproven), Level::Free);
}

#[test]
fn charges_return_to_zero() {
    let budget = MemoryBudget::new(LIMIT);
    let (one, two) = (budget.source(1), budget.source(2));
    assert!(Arc::ptr_eq(&one, &budget.source(1)));
    let held = one.charge(MemoryKind::Streams, 60 * MIB);
    assert!(one.try_charge(MemoryKind::Streams, 1, Unproven).is_none());
    let other = two.try_charge(MemoryKind::Flows, MIB, Unproven);
    assert!(other.is_some(), "another source has its share");
    assert_eq!(budget.used(), 61 * MIB, "a refused charge is not counted");
    assert_eq!(budget.used_for(MemoryKind::Streams), 60 * MIB);
    assert_eq!((one.used(), two.used()), (60 * MIB, MIB));
    drop((held, other));
    assert_eq!((budget.used(), one.used(), two.used()), (0, 0, 0));
    drop((one, two));
    assert!(budget.sources.lock().unwrap().is_empty());
}

#[test]
fn a_smaller_limit_applies_to_later_charges() {
    let budget = MemoryBudget::new(LIMIT);
    let process = budget.source(1);
    let held = process.charge(MemoryKind::HeldBodies, 2 * MIB);
    budget.set_limit(MIB);
    assert!(process.try_charge(MemoryKind::HeldBodies, 1, Identity).is_none());
    drop(held);
    assert!(process.try_charge(MemoryKind::HeldBodies, 1, Identity).is_some());
}

#[test]
fn status_shows_what_is_held_and_shed() {
    let budget = MemoryBudget::new(LIMIT);
    let _held = budget.source(1).charge(MemoryKind::WatchFrames, 7);
    budget.count(Refusal::StalledReader);
    budget.count(Refusal::StalledReader);
    budget.count(Refusal::SlotsFull);
    let status = serde_json::to_value(budget.status()).unwrap();
    let expected = serde_json::json!({
        "limit_bytes": LIMIT,
        "used_bytes": 7,
        "by_kind": { "watch_frames": 7 },
        "shed": { "stalled_reader": 2 },
    });
    assert_eq!(status, expected);
}
