//! Tables of traffic that keeps and that breaks a rule.

use super::*;

const MS: Duration = Duration::from_millis(1);

fn arrival(at: u32, server: usize, id: &str) -> Arrival {
    Arrival { at: MS * at, server, id: id.to_owned(), is_watch: false, is_read: true, sent: None }
}

fn watch(at: u32, id: usize) -> Arrival {
    Arrival { is_watch: true, ..arrival(at, 0, &format!("w{id}")) }
}

fn failed(at: u32) -> Connect {
    Connect { at: MS * at, server: 0, established: false, closed: None }
}

fn broken(traffic: &Traffic) -> Vec<String> {
    let mut findings = Findings::default();
    traffic.check(0, &mut findings);
    findings.violations
}

#[test]
fn request_that_arrives_again_is_counted_as_retry_or_hedge() {
    let arrivals = vec![arrival(1, 0, "a"), arrival(2, 1, "a"), arrival(3, 1, "b")];
    for (retries, hedges, is_kept) in [(0, 0, false), (1, 0, true), (0, 1, true)] {
        let traffic = Traffic { arrivals: arrivals.clone(), retries, hedges, ..Traffic::default() };
        assert_eq!(broken(&traffic).is_empty(), is_kept, "{retries} {hedges}");
    }
}

#[test]
fn watch_that_continues_is_no_request_that_arrives_again() {
    let traffic = Traffic { arrivals: vec![watch(1, 0), watch(2, 0)], ..Traffic::default() };
    assert_eq!(broken(&traffic), [""; 0]);
}

#[test]
fn connects_are_the_most_within_ten_seconds() {
    let connects = |times: &[u32]| {
        let connects = times.iter().map(|&at| failed(at)).collect();
        let mut findings = Findings::default();
        Traffic { connects, is_balanced: true, ..Traffic::default() }.check(0, &mut findings);
        (findings.connects, findings.violations)
    };
    assert_eq!(connects(&[]), (0, vec![]));
    assert_eq!(connects(&[0, 9_999, 10_000, 19_998, 19_999, 20_001]), (3, vec![]));
    // The apiserver of a connect is not that of jackstay's choice, so connects to one have no pauses.
    assert_eq!(connects(&[0; 40]), (40, vec![]));
}

#[test]
fn hedges_keep_to_their_budget() {
    for (requests, hedges, is_kept) in
        [(0, 129, true), (0, 130, false), (100, 139, true), (100, 140, false)]
    {
        let traffic = Traffic { requests, hedges, ..Traffic::default() };
        assert_eq!(broken(&traffic).is_empty(), is_kept, "{requests} {hedges}");
    }
}

#[test]
fn hedges_that_were_not_counted_count_for_the_budget() {
    let pair = |id: u32| [arrival(id, 0, &id.to_string()), arrival(id, 1, &id.to_string())];
    let traffic = |count| Traffic {
        arrivals: (0..count).flat_map(pair).collect(),
        retries: 10,
        hedges: 70,
        ..Traffic::default()
    };
    assert_eq!(broken(&traffic(139)), [""; 0]);
    assert_eq!(broken(&traffic(140)).len(), 1);
}

#[test]
fn read_is_not_hedged_to_the_apiserver_that_hangs() {
    let hangs = vec![Hang { server: 0, from: 10 * MS, until: 20 * MS }];
    let to = |at, again| {
        let arrivals = vec![arrival(at, 0, "a"), arrival(at + 5, again, "a")];
        broken(&Traffic { arrivals, hedges: 1, hangs: hangs.clone(), ..Traffic::default() }).len()
    };
    assert_eq!((to(12, 0), to(12, 1), to(5, 0), to(25, 0)), (1, 0, 0, 0));
}

#[test]
fn pauses_between_failed_connects_grow() {
    let connects = |count: u32, pause: u32| (0..count).map(|at| failed(at * pause)).collect();
    for (count, pause, is_kept) in
        [(12, 0, true), (13, 0, false), (40, 400, true), (40, 100, false)]
    {
        let traffic = Traffic { connects: connects(count, pause), ..Traffic::default() };
        assert_eq!(broken(&traffic).is_empty(), is_kept, "{count} {pause}");
    }
    let mut with_success: Vec<_> = connects(20, 10);
    with_success[10].established = true;
    let traffic = Traffic { connects: with_success, ..Traffic::default() };
    assert_eq!(broken(&traffic), [""; 0]);
}

#[test]
fn watches_continue_at_different_times() {
    let first = (0..8).map(|id| watch(0, id));
    let again = |count: usize, pause: u32| {
        let again = (0..count).map(move |id| watch(1_000 + pause * id as u32, id));
        let arrivals = first.clone().chain(again).collect();
        broken(&Traffic { arrivals, ..Traffic::default() }).len()
    };
    assert_eq!((again(8, 0), again(6, 0), again(5, 0), again(8, 1)), (1, 1, 0, 0));
}

#[test]
fn connect_follows_the_loss_of_the_last_connection() {
    let connect = |at: u32, closed: Option<u32>| Connect {
        established: true,
        closed: closed.map(|at| MS * at),
        ..failed(at)
    };
    let check = |connects: Vec<Connect>| {
        let kept = (BTreeSet::from([0]), MS * 5_000);
        broken(&Traffic { connects, kept, ..Traffic::default() }).len()
    };
    assert_eq!(check(vec![connect(0, Some(100)), connect(400, None)]), 0);
    assert_eq!(check(vec![connect(0, Some(100)), connect(401, None)]), 1);
    assert_eq!(check(vec![connect(0, Some(100)), connect(50, None)]), 0);
    assert_eq!(check(vec![connect(0, Some(100))]), 1);
    assert_eq!(check(vec![connect(0, Some(4_900))]), 0);
}

#[test]
fn held_watch_continues_when_an_apiserver_is_ready() {
    let check = |at| {
        let arrivals = vec![watch(10, 0), watch(at, 0), watch(500, 1)];
        let not_ready = Some(MS * 400..MS * 600);
        broken(&Traffic { arrivals, not_ready, ..Traffic::default() }).len()
    };
    assert_eq!((check(300), check(400), check(599), check(600)), (0, 1, 1, 0));
}

#[test]
fn requests_that_share_a_stream_arrive_in_their_order() {
    let us = Duration::from_micros(1);
    // When the requests were sent that arrive one after the other, in microseconds.
    let table: [(&[u32], bool); 4] = [
        (&[100, 200, 300], true),
        (&[100, 151, 101, 300], true),
        (&[100, 152, 101, 300], false),
        (&[100, 200, 160, 140], false),
    ];
    for (sent, is_kept) in table {
        let arrivals = (0..).zip(sent).map(|(at, sent)| Arrival {
            sent: Some(us * *sent),
            ..arrival(at, 0, &at.to_string())
        });
        let traffic = Traffic { arrivals: arrivals.collect(), ..Traffic::default() };
        assert_eq!(broken(&traffic).is_empty(), is_kept, "{sent:?}");
    }
}
