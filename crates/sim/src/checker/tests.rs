//! Tables of histories and of what clients saw of them.

use std::time::{Duration, Instant};

use super::*;

mod restores;

const MAPS: Collection = Collection::CONFIG_MAPS;

/// A run of which each observation begins and ends at the numbers of moments that are given, in milliseconds.
struct Table {
    start: Instant,
    history: History,
    observations: Vec<Observation>,
}

fn list(recency: Recency, version: u64, objects: &[(&str, u64)]) -> Seen {
    let objects = objects.iter().map(|(name, version)| (MAPS.key(name), *version)).collect();
    Seen::List { recency, version, objects }
}

fn get(recency: Recency, name: &str, version: u64, token: u64) -> Seen {
    let shown = Some(ShownObject { version, token: Some(token) });
    Seen::Object { recency, key: MAPS.key(name), shown }
}

fn absent(recency: Recency, name: &str) -> Seen {
    Seen::Object { recency, key: MAPS.key(name), shown: None }
}

fn write(name: &str, token: u64, outcome: WriteOutcome) -> Seen {
    Seen::Write { key: MAPS.key(name), kind: ChangeKind::Modified, token, outcome }
}

fn event(kind: ChangeKind, name: &str, version: u64, token: u64) -> Seen {
    Seen::Event { kind, key: MAPS.key(name), version, token: Some(token) }
}

impl Table {
    /// A store in which 1 and 2 create `a` and `b`, 3 and 4 write `a`, 5 deletes `b`, and 6 writes `a`. A change has the
    /// version as its token, and is committed at the millisecond of its version.
    fn new() -> Self {
        use ChangeKind::{Added, Deleted, Modified};
        let start = Instant::now();
        let changes = [
            (1, "a", Added),
            (2, "b", Added),
            (3, "a", Modified),
            (4, "a", Modified),
            (5, "b", Deleted),
            (6, "a", Modified),
        ];
        let changes = changes.map(|(version, name, kind)| Change {
            version,
            at: start + Duration::from_millis(version),
            resource: MAPS.resource.to_owned(),
            namespace: MAPS.namespace.to_owned(),
            name: name.to_owned(),
            kind,
            token: Some(if kind == Deleted { 2 } else { version }),
        });
        let history = History { changes: changes.into(), ..History::default() };
        Self { start, history, observations: Vec::new() }
    }

    fn moment(&self, order: u64) -> Moment {
        Moment { order, at: self.start + Duration::from_millis(order) }
    }

    /// Adds what a client of a group saw between two moments.
    fn saw(
        mut self,
        number: u16,
        group: Option<u32>,
        (began, ended): (u64, u64),
        seen: Seen,
    ) -> Self {
        self.observations.push(Observation {
            client: ClientId { number, group },
            request: began,
            collection: MAPS,
            began: self.moment(began),
            ended: self.moment(ended),
            seen,
        });
        self
    }

    fn violations(&self) -> Vec<String> {
        self.findings().violations
    }

    fn findings(&self) -> Findings {
        let mut findings = Findings::default();
        check(&self.history, &self.observations, &mut findings);
        findings
    }
}

/// The violations of one client, whose observations begin at 10, 20, … and end 5 later.
fn of_one(seen: impl IntoIterator<Item = Seen>) -> Vec<String> {
    let mut table = Table::new();
    for (at, seen) in (10..).step_by(10).zip(seen) {
        table = table.saw(1, Some(0), (at, at + 5), seen);
    }
    table.violations()
}

use ChangeKind::{Added, Deleted, Modified};
use Recency::{Any, Exact, MostRecent, NotOlderThan};
use WriteOutcome::{Done, Refused, Unknown};

#[test]
fn events_of_the_store_in_order_break_no_rule() {
    let seen = [
        list(Any, 2, &[("a", 1), ("b", 2)]),
        Seen::WatchStarted(2),
        event(Modified, "a", 3, 3),
        event(Modified, "a", 4, 4),
        Seen::Bookmark(4),
        Seen::WatchStarted(4),
        event(Deleted, "b", 5, 2),
        event(Modified, "a", 6, 6),
        Seen::Bookmark(6),
        Seen::InformerStopped(6),
    ];
    assert_eq!(of_one(seen), [""; 0]);
}

#[test]
fn events_that_are_missing_or_wrong_are_violations() {
    let cases: [(&[Seen], &str); 7] = [
        (
            &[Seen::WatchStarted(2), event(Modified, "a", 4, 4)],
            "client 1: event 4 came after 2, and the store has Some(3)",
        ),
        (
            &[Seen::WatchStarted(3), event(Modified, "a", 4, 4), event(Modified, "a", 4, 4)],
            "client 1: event 4 came after 4, and the store has Some(5)",
        ),
        (
            &[Seen::WatchStarted(6), event(Modified, "a", 7, 7)],
            "client 1: event 7 came after 6, and the store has None",
        ),
        (
            &[Seen::WatchStarted(2), event(Added, "a", 3, 3)],
            "client 1: event 3 is Added default/a of Some(3)",
        ),
        (
            &[Seen::WatchStarted(2), event(Modified, "a", 3, 4)],
            "client 1: event 3 is Modified default/a of Some(4)",
        ),
        (&[Seen::WatchStarted(2), Seen::Bookmark(3)], "client 1: bookmark 3 came before event 3"),
        (&[Seen::WatchStarted(4), Seen::Bookmark(3)], "client 1: bookmark 3 came after 4"),
    ];
    for (seen, expected) in cases {
        let violations = of_one(seen.iter().cloned());
        assert!(
            violations.len() == 1 && violations[0].starts_with(expected),
            "{violations:#?} instead of {expected}"
        );
    }
}

#[test]
fn silence_is_the_time_from_a_change_to_its_event_or_to_the_end() {
    let table = Table::new()
        .saw(1, None, (0, 0), Seen::WatchStarted(4))
        .saw(1, None, (35, 35), event(Deleted, "b", 5, 2))
        .saw(1, None, (100, 100), Seen::InformerStopped(5));
    let findings = table.findings();
    assert_eq!((findings.events, findings.violations.len()), (1, 0));
    // 6 was committed at 6 ms, and had not come at 100 ms.
    assert_eq!(findings.longest_silence, Duration::from_millis(94));
    let early = Table::new()
        .saw(1, None, (0, 0), Seen::WatchStarted(5))
        .saw(1, None, (36, 36), event(Modified, "a", 6, 6))
        .saw(1, None, (100, 100), Seen::InformerStopped(6));
    assert_eq!(early.findings().longest_silence, Duration::from_millis(30));
}

#[test]
fn changes_of_one_version_are_events_of_one_version() {
    let mut table = Table::new();
    // b and c are deleted in one transaction.
    let mut created = table.history.changes[1].clone();
    (created.name, created.token) = ("c".to_owned(), Some(9));
    table.history.changes.insert(2, created);
    let mut deleted = table.history.changes[5].clone();
    deleted.name = "c".to_owned();
    table.history.changes.insert(6, deleted);
    let table = table.saw(1, None, (10, 10), Seen::WatchStarted(4)).saw(
        1,
        None,
        (11, 11),
        event(Deleted, "b", 5, 2),
    );
    let both = table.saw(1, None, (12, 12), event(Deleted, "c", 5, 2)).saw(
        1,
        None,
        (13, 13),
        event(Modified, "a", 6, 6),
    );
    assert_eq!(both.violations(), [""; 0]);
    let mut one = both;
    one.observations.remove(2);
    assert_eq!(one.violations(), ["client 1: event 6 came after 5, and the store has Some(5)"]);
}

#[test]
fn reads_that_the_store_never_had_are_violations() {
    for (seen, expected) in [
        (get(Any, "a", 2, 2), "default/a at 2, which the store never had"),
        (get(Any, "b", 5, 2), "default/b at 5, which the store never had"),
        (get(Any, "a", 3, 4), "default/a at 3 is of write Some(4), and in the store of Some(3)"),
        (list(Any, 4, &[("a", 4)]), "a list at 4 of 2 objects had 1, without default/b"),
        (
            list(Any, 5, &[("a", 4), ("b", 2)]),
            "a list at 5 has default/b, which the store does not have",
        ),
        (list(Any, 4, &[("a", 3), ("b", 2)]), "a list at 4 has default/a at 3, and the store at 4"),
        (list(Any, 4, &[("a", 4), ("a", 4), ("b", 2)]), "a list at 4 has an object twice"),
        (list(Any, 7, &[("a", 6)]), "a list of 1 objects at 7, and the store is at 6"),
    ] {
        assert_eq!(of_one([seen]), [format!("client 1: request 10: {expected}")]);
    }
    for seen in [
        get(Any, "a", 4, 4),
        list(Any, 0, &[]),
        list(Any, 4, &[("a", 4), ("b", 2)]),
        list(MostRecent, 6, &[("a", 6)]),
    ] {
        assert_eq!(of_one([seen]), [""; 0]);
    }
}

/// What a client sees first, what it sees then, and whether that goes back.
#[test]
fn read_that_is_older_than_an_earlier_one_of_its_group_goes_back() {
    let full = |version| match version {
        3 => list(Any, 3, &[("a", 3), ("b", 2)]),
        4 => list(Any, 4, &[("a", 4), ("b", 2)]),
        _ => list(Any, 5, &[("a", 4)]),
    };
    for (first, then, goes_back) in [
        (full(4), full(3), true),
        (full(4), full(4), false),
        (full(3), full(4), false),
        (full(4), get(Any, "a", 3, 3), true),
        (full(4), get(Any, "a", 4, 4), false),
        // The version of b is lower, but it was its last one at 4.
        (full(4), get(Any, "b", 2, 2), false),
        (full(5), get(Any, "b", 2, 2), true),
        (full(5), absent(Any, "b"), false),
        (full(4), absent(Any, "b"), false),
        (full(4), absent(Any, "a"), true),
        (get(Any, "a", 4, 4), full(3), true),
        (get(Any, "a", 4, 4), get(Any, "a", 3, 3), true),
        // a was written by 6, so b was gone.
        (get(Any, "a", 6, 6), get(Any, "b", 2, 2), true),
        (write("a", 4, Done(Some(4))), full(3), true),
        (write("a", 4, Done(Some(4))), get(Any, "a", 3, 3), true),
        (write("a", 4, Unknown), get(Any, "a", 3, 3), false),
        (event(Modified, "a", 4, 4), get(Any, "a", 3, 3), true),
        (Seen::Bookmark(5), full(4), true),
        (Seen::Bookmark(5), get(Any, "b", 2, 2), false),
        // A version that the request names is a floor of its own, and the only one.
        (full(5), list(NotOlderThan(4), 4, &[("a", 4), ("b", 2)]), false),
        (full(5), list(Exact(4), 4, &[("a", 4), ("b", 2)]), false),
        (full(3), list(Exact(3), 4, &[("a", 4), ("b", 2)]), true),
        (full(3), get(NotOlderThan(4), "a", 3, 3), true),
        (full(3), list(NotOlderThan(4), 4, &[("a", 4), ("b", 2)]), false),
    ] {
        let first_of_watch = match &first {
            Seen::Event { version, .. } | Seen::Bookmark(version) => Some(version - 1),
            _ => None,
        };
        let mut seen: Vec<_> = first_of_watch.map(Seen::WatchStarted).into_iter().collect();
        seen.extend([first.clone(), then.clone()]);
        let mut violations = of_one(seen);
        violations.retain(|text| !text.contains("bookmark 5 came before"));
        assert_eq!(!violations.is_empty(), goes_back, "{first:?}, {then:?}: {violations:#?}");
        let is_named = |text: &String| text.contains("goes back") || text.contains("asks for");
        assert!(violations.iter().all(is_named), "{violations:#?}");
    }
}

#[test]
fn only_reads_that_begin_after_the_end_of_another_one_of_the_group_go_back() {
    let newer = || list(Any, 4, &[("a", 4), ("b", 2)]);
    let older = || list(Any, 3, &[("a", 3), ("b", 2)]);
    let run = |first: (Option<u32>, (u64, u64)), second: (Option<u32>, (u64, u64))| {
        let table = Table::new().saw(1, first.0, first.1, newer());
        table.saw(2, second.0, second.1, older()).violations()
    };
    assert_eq!(
        run((Some(0), (10, 20)), (Some(0), (30, 40))),
        ["client 2: request 30: a read goes back: a list at 3 came after a list at 4 of client 1 \
          (request 10), which had ended 10ms before"]
    );
    // At once, in another group, and behind a load balancer.
    assert_eq!(run((Some(0), (10, 20)), (Some(0), (15, 40))), [""; 0]);
    assert_eq!(run((Some(0), (10, 20)), (Some(1), (30, 40))), [""; 0]);
    assert_eq!(run((None, (10, 20)), (None, (30, 40))), [""; 0]);
}

#[test]
fn most_recent_read_is_as_new_as_what_any_client_has_seen() {
    let run = |first: Seen, second: Seen| {
        let table = Table::new().saw(1, Some(0), (10, 20), first);
        table.saw(2, None, (30, 40), second).violations()
    };
    let acknowledged = || write("a", 4, Done(Some(4)));
    assert_eq!(
        run(acknowledged(), get(MostRecent, "a", 3, 3)),
        [
            "client 2: request 30: a most recent read goes back: default/a at 3 came after a write of \
          default/a at 4 of client 1 (request 10), which had ended 10ms before"
        ]
    );
    assert_eq!(run(acknowledged(), list(MostRecent, 3, &[("a", 3), ("b", 2)])).len(), 1);
    assert_eq!(run(acknowledged(), get(MostRecent, "a", 4, 4)), [""; 0]);
    assert_eq!(run(get(Any, "a", 6, 6), get(MostRecent, "b", 2, 2)).len(), 1);
    assert_eq!(run(get(Any, "a", 6, 6), absent(MostRecent, "b")), [""; 0]);
}

#[test]
fn writes_that_are_lost_or_made_twice_are_violations() {
    let of = |name, token, outcome| of_one([write(name, token, outcome)]);
    assert_eq!(of("a", 4, Done(Some(4))), [""; 0]);
    assert_eq!(of("a", 9, Unknown), [""; 0]);
    assert_eq!(of("a", 9, Refused), [""; 0]);
    let prefix = "client 1: request 10: write";
    assert_eq!(
        of("a", 9, Done(Some(4))),
        [format!("{prefix} 9 was answered, and the store does not have it")]
    );
    assert_eq!(
        of("a", 4, Done(Some(3))),
        [format!(
            "{prefix} 4 of default/a was answered with Some(3), and the store has (\"default/a\", 4)"
        )]
    );
    assert_eq!(of("a", 4, Refused), [format!("{prefix} 4 was refused, and the store has it")]);

    let mut twice = Table::new();
    twice.history.changes[3].token = Some(3);
    assert_eq!(twice.violations(), ["write 3 was carried out 2 times"]);
    let mut unseen = Table::new();
    unseen.history.carried_out = vec![3, 4, 4, 6];
    assert_eq!(unseen.violations(), ["write 4 was carried out 2 times"]);
}

#[test]
fn deletion_that_was_answered_is_in_the_store() {
    let deleted = |name: &str, period| {
        let (kind, outcome) = (Deleted, Done(None));
        let seen = Seen::Write { key: MAPS.key(name), kind, token: 9, outcome };
        Table::new().saw(1, None, period, seen).violations()
    };
    assert_eq!(deleted("b", (4, 6)), [""; 0]);
    let expected =
        "client 1: request 4: write 9 deleted default/a, and the store has no such change";
    assert_eq!(deleted("a", (4, 6)), [expected]);
    assert_eq!(deleted("b", (7, 9)).len(), 1);

    // With a count of requests, that says what was carried out.
    let (kind, outcome, token) = (Deleted, Done(None), 9);
    let seen = Seen::Write { key: MAPS.key("b"), kind, token, outcome };
    let mut counted = Table::new().saw(1, None, (4, 6), seen);
    counted.history.carried_out = vec![9];
    assert_eq!(counted.violations(), [""; 0]);
    counted.history.carried_out = vec![8];
    assert_eq!(counted.violations().len(), 1);
}
