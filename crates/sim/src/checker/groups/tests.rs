//! Tables of traffic of the group that keeps and that breaks a rule.

use super::*;

const MS: Duration = Duration::from_millis(1);
const CUT_AT: u32 = 1_000;

fn arrival(at: u32, server: usize, id: usize) -> GroupArrival {
    GroupArrival { at: MS * at, server, id: format!("r{id}"), is_write: false }
}

fn write(at: u32, server: usize, id: usize) -> GroupArrival {
    GroupArrival { is_write: true, ..arrival(at, server, id) }
}

fn cut(server: usize) -> CutPath {
    CutPath { server, time: MS * CUT_AT..MS * 100_000 }
}

fn broken(arrivals: Vec<GroupArrival>, cuts: &[usize]) -> Vec<String> {
    let cuts = cuts.iter().copied().map(cut).collect();
    let traffic = GroupTraffic { arrivals, servers: 3, cuts, unavailable: Vec::new() };
    let mut findings = Findings::default();
    traffic.check(&mut findings);
    findings.violations
}

#[test]
fn write_that_arrives_twice_breaks_a_rule_and_a_read_does_not() {
    assert_eq!(broken(vec![arrival(1, 0, 1), arrival(2, 1, 1)], &[]), [""; 0]);
    let twice = broken(vec![write(1, 0, 1), write(2, 1, 1), write(3, 1, 2)], &[]);
    assert_eq!(twice, ["write r1 of the group arrived 2 times"]);
}

#[test]
fn failing_apiserver_receives_probes_after_pauses_that_double() {
    // The first failure, others before it is noticed, and probes 1, 3, 7 and 15 s later.
    let probes = [1_500, 1_600, 2_500, 2_600, 4_600, 8_600, 16_600];
    let arrivals: Vec<_> = probes.map(|at| arrival(at, 0, at as usize)).into();
    assert_eq!(broken(arrivals.clone(), &[0]), [""; 0]);
    let with = |more: GroupArrival| {
        let mut arrivals = arrivals.clone();
        arrivals.push(more);
        arrivals.sort_by_key(|arrival| arrival.at);
        broken(arrivals, &[0])
    };
    assert_eq!(with(arrival(20_000, 1, 0)), [""; 0], "another apiserver");
    assert_eq!(with(write(2_000, 0, 0)), [""; 0], "before it is noticed");
    assert!(with(write(9_000, 0, 0))[0].starts_with("1 writes of the group"));
    assert!(with(arrival(9_000, 0, 0))[0].contains("at most 4 allowed"));
}

#[test]
fn failure_at_two_apiservers_is_judged_by_no_rule_of_one() {
    let arrivals: Vec<_> = (0..50).map(|n| arrival(2_000 + 100 * n, 0, n as usize)).collect();
    assert!(!broken(arrivals.clone(), &[0]).is_empty());
    assert_eq!(broken(arrivals, &[0, 1]), [""; 0]);
}

#[test]
fn failure_everywhere_costs_a_tenth_more_requests() {
    let requests = |more: usize| {
        let once = (0..200).map(|n| arrival(2_000 + n, 0, n as usize));
        let again = (0..more).map(|n| arrival(5_000, 1, n));
        broken(once.chain(again).collect(), &[0, 1, 2])
    };
    assert_eq!(requests(20), [""; 0]);
    let text = "221 requests of the group arrived for 200 of clients, and all apiservers fail";
    assert_eq!(requests(21), [text]);
}
