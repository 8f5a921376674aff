//! Tests of the connection slots: shares, evictions and the reserve.

use std::time::Duration;

use jackstay_sys::clock;

use super::registry::MAX_CLOSING;
use super::*;

const A: Source = Source::User(1);
const B: Source = Source::User(2);

/// The slots of one listener, and the connections that are open.
struct Rig {
    slots: Rc<ConnectionSlots>,
    limit: SlotLimit,
    start: Instant,
    open: Vec<Rc<ConnectionSlot>>,
}

impl Rig {
    fn new(slots: usize, has_identities: bool) -> Self {
        let limit = SlotLimit { slots, has_identities, handed_over: 0 };
        let slots = Rc::<ConnectionSlots>::default();
        Self { slots, limit, start: clock::now(), open: Vec::new() }
    }

    /// Opens a connection at this millisecond. Returns the source of the evicted connection.
    fn open(&mut self, source: Source, at: u64) -> Result<Option<Source>, Refusal> {
        let now = self.start + Duration::from_millis(at);
        let admitted = self.slots.admit(source, self.limit, now)?;
        self.open.push(Rc::new(admitted.slot));
        Ok(admitted.evicted)
    }

    /// Opens connections until one is refused or another one is evicted for it. Returns their number.
    fn fill(&mut self, source: Source, at: u64) -> usize {
        (0..10_000).find(|_| self.open(source, at) != Ok(None)).unwrap()
    }

    /// Opens the connections of the share of a source, at 0 ms. Returns their number.
    fn fill_share(&mut self, source: Source) -> usize {
        while self.open(source, 0) == Ok(None) {
            if self.open.last().unwrap().must_prove_identity() {
                self.open.pop();
                break;
            }
        }
        self.open.len()
    }

    /// The connections that were evicted, by the order in which they were opened.
    fn evicted(&self) -> Vec<usize> {
        let phase = |slot: &Rc<ConnectionSlot>| slot.entry.phase.get();
        let numbered = self.open.iter().enumerate();
        numbered.filter(|(_, slot)| phase(slot) == Phase::Evicted).map(|(at, _)| at).collect()
    }
}

#[test]
fn admit_gives_a_source_half_of_the_free_slots() {
    let sources = [A, B, Source::User(3)];
    // The shares of the sources in the order of their arrival, of 400 slots.
    for (has_identities, expected) in [(false, [200, 100, 50]), (true, [175, 88, 44])] {
        let mut rig = Rig::new(400, has_identities);
        // No connection is idle, so those beyond the share come into the reserve, which is left out here.
        let mut requests = Vec::new();
        let mut shares = Vec::new();
        for source in sources {
            let mut share = 0;
            while let Ok(None) = rig.open(source, 0) {
                let slot = rig.open.last().unwrap();
                if slot.must_prove_identity() {
                    rig.open.pop();
                    break;
                }
                requests.push(slot.begin_request());
                share += 1;
            }
            shares.push(share);
        }
        assert_eq!(shares, expected, "identities: {has_identities}");
    }
}

/// A load balancer's clients are the nodes of the cluster, which share a /64.
#[test]
fn admit_gives_nodes_of_one_ipv6_network_more_than_half_only_with_a_longer_prefix() {
    for (prefix, expected) in [(64, 200), (128, 400)] {
        let mut rig = Rig::new(400, false);
        let mut requests = Vec::new();
        for n in 0..400_u16 {
            let node = std::net::Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, 0, n % 40 + 1);
            if rig.open(Source::from_ip(node.into(), prefix), 0) == Ok(None) {
                requests.push(rig.open.last().unwrap().begin_request());
            }
        }
        assert!(requests.len() * 10 >= expected * 9, "/{prefix}: {}", requests.len());
        assert!(requests.len() <= expected, "/{prefix}: {}", requests.len());
    }
}

#[test]
fn admit_beyond_the_share_evicts_the_longest_idle_connection_of_the_lowest_rank() {
    let mut rig = Rig::new(8, false);
    for at in 0..4 {
        assert_eq!(rig.open(A, at), Ok(None));
    }
    // 0 has an accepted token, 1 had a request, 2 has one, 3 had none.
    rig.open[0].set_rank(ClientRank::Token);
    drop(rig.open[1].begin_request());
    let request = rig.open[2].begin_request();
    let later = 10_000_000;
    assert_eq!(rig.open(A, later), Ok(Some(A)));
    assert_eq!(rig.evicted(), [3]);
    assert_eq!(rig.open(A, later), Ok(Some(A)));
    assert_eq!(rig.evicted(), [1, 3]);
    assert_eq!(rig.open(A, later), Ok(Some(A)));
    assert_eq!(rig.evicted(), [0, 1, 3]);
    // The new connections are too young, and one has a request.
    assert_eq!(rig.open(A, later), Err(Refusal::SourceShare));
    drop(request);
    assert_eq!(rig.open(A, later), Ok(Some(A)));
    assert_eq!(rig.evicted(), [0, 1, 2, 3]);
    rig.open.clear();
    assert_eq!(rig.slots.open(), 0);
}

#[test]
fn admit_evicts_connections_of_the_largest_source() {
    let mut rig = Rig::new(90, false);
    assert_eq!(rig.fill(A, 0), 45);
    assert_eq!(rig.fill(B, 0), 23);
    // Each new connection of B takes a slot of A until both have the same number, and then one of B.
    let (mut of_a, mut of_b) = (45, 23);
    while rig.open(B, 1_000) == Ok(Some(A)) {
        (of_a, of_b) = (of_a - 1, of_b + 1);
    }
    assert_eq!((of_a, of_b), (34, 34));
    assert_eq!(rig.evicted().len(), 12);
    rig.open.clear();
    assert_eq!(rig.slots.open(), 0);
}

#[test]
fn connection_without_a_request_is_evicted_after_its_grace_only() {
    let mut rig = Rig::new(2, false);
    assert_eq!(rig.open(A, 0), Ok(None));
    rig.open[0].handshake_complete(rig.start);
    for (at, expected) in [(99, Err(Refusal::SourceShare)), (100, Ok(Some(A)))] {
        assert_eq!(rig.open(A, at), expected, "at {at} ms");
    }
    // The end of the handshake starts another grace.
    rig.open[1].handshake_complete(rig.start + Duration::from_millis(190));
    assert_eq!(rig.open(A, 250), Err(Refusal::SourceShare));
    assert_eq!(rig.open(A, 290), Ok(Some(A)));
}

/// 25 clients in Go that open 2,000 watches at once open as many connections within a second. Each sends its
/// `ClientHello` late, and the handshakes beyond the first 400 take turns of 5 ms.
#[test]
fn burst_of_an_identity_beyond_the_share_of_its_source_is_admitted() {
    let mut rig = Rig::new(4096, true);
    let time = |ms| rig.start + Duration::from_millis(ms);
    let (begun, proven) = (time(900), time(1_000));
    for n in 0..2_000_usize {
        assert_eq!(rig.open(A, n as u64 / 2), Ok(None), "connection {n}");
        if let Some(earlier) = n.checked_sub(400) {
            rig.open[earlier].handshake_begun(rig.start + Duration::from_millis(n as u64 / 2));
        }
    }
    for n in 1_600..2_000 {
        rig.open[n].handshake_begun(begun);
    }
    assert!(rig.open[1_999].must_prove_identity());
    for slot in &rig.open {
        slot.handshake_complete(proven);
        slot.set_proven();
        assert!(!slot.must_prove_identity());
    }
    assert!(rig.evicted().is_empty());
    // All count as proven, so the source has its share again.
    assert_eq!(rig.open(A, 10_000), Ok(None));
    assert!(!rig.open[2_000].must_prove_identity());
}

#[test]
fn connection_without_a_request_is_evicted_by_its_source_early_only_if_the_reserve_is_in_use() {
    let mut rig = Rig::new(64, true);
    // The share, and half of the reserve.
    for n in 0..32 {
        assert_eq!(rig.open(A, 0), Ok(None), "{n}");
    }
    for (at, in_reserve) in [(99, true), (100, true), (2_999, true)] {
        assert_eq!(rig.open(A, at), Ok(None), "at {at} ms");
        assert_eq!(rig.open.pop().unwrap().must_prove_identity(), in_reserve);
    }
    assert_eq!(rig.open(A, 3_000), Ok(Some(A)));
    assert_eq!(rig.evicted(), [0]);
    for n in 0..24 {
        let at = 6_000 + 2 * n;
        let slot = rig.open[1 + n as usize].clone();
        slot.handshake_complete(rig.start + Duration::from_millis(at));
    }
    for slot in &rig.open[25..] {
        slot.handshake_complete(rig.start + Duration::from_millis(6_060));
    }
    for n in 0..8 {
        assert_eq!(rig.open(A, 6_100), Ok(None), "{n}");
        assert!(rig.open.last().unwrap().must_prove_identity());
    }
    assert_eq!(rig.open(A, 6_100), Ok(Some(A)));
    assert_eq!(rig.evicted(), [0, 1]);
    assert_eq!(rig.open(A, 6_100), Err(Refusal::SourceShare));
    assert_eq!(rig.open(A, 6_102), Ok(Some(A)));
    assert_eq!(rig.evicted(), [0, 1, 2]);
}

/// 18,000 connections a second of a process of the kubelet's user, which send nothing and are closed after 155 ms, must
/// not refuse the kubelet.
#[test]
fn connection_that_has_sent_nothing_is_evicted_by_its_source_when_the_reserve_is_in_use() {
    let mut rig = Rig::new(64, true);
    assert_eq!(rig.open(A, 0), Ok(None));
    rig.open[0].handshake_complete(rig.start);
    // The rest of the share, and the reserve.
    for n in 1..40 {
        assert_eq!(rig.open(A, 10), Ok(None), "{n}");
    }
    assert_eq!(rig.open(A, 29), Err(Refusal::SourceShare));
    assert_eq!(rig.open(A, 30), Ok(Some(A)));
    assert_eq!(rig.evicted(), [1], "not the first one, whose client has made its handshake");
}

/// A connection in its handshake may prove an identity.
#[test]
fn connection_in_its_handshake_is_evicted_for_a_smaller_source_only_after_all_idle_ones() {
    let mut rig = Rig::new(8, false);
    let (start, later) = (rig.start, 10_000_000);
    for at in 0..4 {
        assert_eq!(rig.open(A, at), Ok(None));
    }
    rig.open[0].handshake_begun(start);
    rig.open[1].set_rank(ClientRank::Token);
    drop(rig.open[2].begin_request());
    for expected in [vec![3], vec![2, 3], vec![1, 2, 3]] {
        assert_eq!(rig.open(A, later), Ok(Some(A)));
        assert_eq!(rig.evicted(), expected);
    }
    assert_eq!(rig.open(A, later), Err(Refusal::SourceShare), "its own source");
    // The idle connections of the smaller source are closed before it.
    for _ in 0..2 {
        assert_eq!(rig.open(B, later - 100), Ok(None));
    }
    for _ in 0..2 {
        assert_eq!(rig.open(B, later), Ok(Some(B)));
    }
    assert_eq!(rig.open(B, later), Ok(Some(A)));
    assert_eq!(rig.evicted()[..2], [0, 1]);
    // After the handshake a connection without an identity is idle again, and one with a request is not.
    let mut rig = Rig::new(8, false);
    assert_eq!(rig.fill(A, 0), 4);
    for slot in &rig.open {
        slot.handshake_begun(rig.start);
    }
    let request = rig.open[0].begin_request();
    rig.open[1].handshake_complete(rig.start + Duration::from_millis(50));
    assert_eq!(rig.open(A, 149), Err(Refusal::SourceShare));
    assert_eq!(rig.open(A, 150), Ok(Some(A)));
    assert_eq!(rig.evicted(), [1]);
    rig.open[4].handshake_begun(rig.start + Duration::from_millis(150));
    // The end of a handshake after the first request changes nothing.
    rig.open[0].handshake_complete(rig.start);
    assert_eq!(rig.open(A, 200), Err(Refusal::SourceShare));
    drop(request);
    assert_eq!(rig.open(A, 200), Ok(Some(A)));
    assert_eq!(rig.evicted(), [0, 1]);
    rig.open.clear();
    assert_eq!(rig.slots.open(), 0);
}

#[test]
fn reserve_is_left_to_connections_that_prove_an_identity() {
    let mut rig = Rig::new(64, true);
    let mut requests = Vec::new();
    // A fills its share with requests in progress, and then the reserve.
    for n in 0..40 {
        assert_eq!(rig.open(A, 0), Ok(None));
        let slot = &rig.open[n];
        assert_eq!(slot.must_prove_identity(), n >= 24, "{n}");
        if n < 24 {
            requests.push(slot.begin_request());
        }
    }
    assert_eq!(rig.open(A, 0), Err(Refusal::SourceShare));
    // A connection of the reserve that proves an identity stays, and its slot of the reserve is free again.
    rig.open[39].set_proven();
    assert!(!rig.open[39].must_prove_identity());
    assert_eq!(rig.open(A, 0), Ok(None));
    assert!(rig.open[40].must_prove_identity());
    // One that does not prove any for 100 ms is evicted for the next one.
    assert_eq!(rig.open(A, 150), Ok(Some(A)));
    assert_eq!(rig.evicted(), [24]);
    assert!(rig.open[41].must_prove_identity());
    // Another source has its share.
    assert_eq!(rig.open(B, 150), Ok(None));
    assert!(!rig.open[42].must_prove_identity());
}

/// As beside thousands of connections whose requests wait because their tokens are rejected.
#[test]
fn connection_of_the_reserve_takes_the_slot_of_one_that_is_idle_after_its_handshake() {
    let mut rig = Rig::new(64, true);
    assert_eq!(rig.fill_share(A), 24);
    let mut requests: Vec<_> = rig.open.iter().map(ConnectionSlot::begin_request).collect();
    assert_eq!(rig.open(A, 0), Ok(None));
    let own = Rc::clone(&rig.open[24]);
    own.handshake_begun(rig.start);
    own.handshake_complete(rig.start);
    assert!(own.must_prove_identity());
    assert!(!own.leave_reserve(rig.limit, rig.start), "all others have requests");
    requests.remove(3);
    assert!(own.leave_reserve(rig.limit, rig.start));
    assert!(!own.must_prove_identity());
    assert_eq!(rig.evicted(), [3]);
    // Its slot of the reserve is free again.
    for n in 0..16 {
        assert_eq!(rig.open(A, 0), Ok(None), "{n}");
        assert!(rig.open.last().unwrap().must_prove_identity());
    }
    assert_eq!(rig.open(A, 0), Err(Refusal::SourceShare));
    // Another source has a share of its own.
    assert_eq!(rig.open(B, 0), Ok(None));
    drop((own, requests));
    rig.open.clear();
    assert_eq!(rig.slots.open(), 0);
}

#[test]
fn evict_idle_of_source_leaves_other_sources_and_connections_with_requests() {
    let mut rig = Rig::new(64, false);
    for source in [A, A, B] {
        assert_eq!(rig.open(source, 0), Ok(None));
    }
    let later = rig.start + Duration::from_secs(10);
    let request = rig.open[0].begin_request();
    drop(rig.open[2].begin_request());
    rig.open[1].handshake_begun(rig.start);
    assert!(!rig.open[0].evict_idle_of_source(later));
    drop(request);
    assert!(rig.open[1].evict_idle_of_source(later));
    assert_eq!(rig.evicted(), [0]);
}

/// Users, each with as many connections as are admitted. Their clients use all of them, as flows do.
#[test]
fn reserve_is_left_to_identities_however_many_connections_they_have() {
    for (slots, reserve) in [(64, 16), (400, 50), (4_096, 512)] {
        for proven in [0, reserve / 2, reserve, 2 * reserve] {
            let mut rig = Rig::new(slots, true);
            for n in 0..proven {
                assert_eq!(rig.open(A, 0), Ok(None), "{n}");
                rig.open[n].set_proven();
            }
            for uid in 100..1_000 {
                while rig.open(Source::User(uid), 200) == Ok(None) {
                    if rig.open.last().unwrap().must_prove_identity() {
                        rig.open.pop();
                        break;
                    }
                    rig.open.last().unwrap().set_in_use();
                }
            }
            assert_eq!(rig.slots.open(), slots - reserve, "{proven} of {slots} are proven");
            for n in 0..reserve {
                let opened = rig.open(A, 400);
                assert_eq!(opened, Ok(None), "{n} beside {proven} of {slots}");
                rig.open.last().unwrap().set_proven();
            }
        }
    }
}

#[test]
fn proven_connections_are_not_evicted_and_may_use_all_slots() {
    let mut rig = Rig::new(40, true);
    for n in 0..40 {
        assert_eq!(rig.open(A, n), Ok(None), "{n}");
        rig.open[n as usize].set_proven();
    }
    assert_eq!(rig.open(A, 1_000_000), Err(Refusal::SlotsFull));
    assert_eq!(rig.open(B, 1_000_000), Err(Refusal::SlotsFull));
    rig.open.pop();
    assert_eq!(rig.slots.open(), 39);
    rig.limit.handed_over = 1;
    assert_eq!(rig.open(A, 1_000_000), Err(Refusal::SlotsFull));
    rig.limit.handed_over = 0;
    assert_eq!(rig.open(A, 1_000_000), Ok(None));
    rig.open.clear();
    assert_eq!(rig.slots.open(), 0);
}

#[tokio::test(start_paused = true)]
async fn evicted_resolves_for_the_evicted_connection_only() {
    let mut rig = Rig::new(2, false);
    let evicted = |slot: &Rc<ConnectionSlot>| {
        let slot = Rc::clone(slot);
        async move { tokio::time::timeout(Duration::from_secs(1), slot.evicted()).await.is_ok() }
    };
    assert_eq!(rig.open(A, 0), Ok(None));
    assert!(!evicted(&rig.open[0]).await);
    assert_eq!(rig.open(A, 200), Ok(Some(A)));
    assert!(evicted(&rig.open[0]).await);
    assert!(!evicted(&rig.open[1]).await);
    assert_eq!(rig.slots.open(), 2, "the evicted connection is still open");
    rig.open.remove(0);
    assert_eq!(rig.slots.open(), 1);
}

#[test]
fn admit_refuses_while_too_many_evicted_connections_are_open() {
    let mut rig = Rig::new(4, false);
    assert_eq!(rig.fill(A, 0), 2);
    for n in 1..=MAX_CLOSING as u64 {
        assert_eq!(rig.open(A, n * 1_000), Ok(Some(A)), "{n}");
    }
    assert_eq!(rig.open(A, 10_000_000), Err(Refusal::SourceShare));
    assert_eq!(rig.slots.open(), MAX_CLOSING + 2);
    rig.open.remove(0);
    assert_eq!(rig.open(A, 10_000_000), Ok(Some(A)));
}

/// At 4,096 connections of as many sources each search looks at a few of them only.
#[test]
fn admit_of_many_sources_evicts_the_oldest_of_the_largest() {
    let mut rig = Rig::new(4_096, false);
    let share = rig.fill(A, 0);
    assert_eq!(share, 2_048);
    for uid in 100..100 + 2_048 {
        assert_eq!(rig.open(Source::User(uid), 1), Ok(None), "{uid}");
    }
    for uid in 5_000..5_100 {
        assert_eq!(rig.open(Source::User(uid), 1_000), Ok(Some(A)), "{uid}");
    }
}
