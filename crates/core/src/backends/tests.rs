use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn observed(certificate: u64, address: &str) -> ObservedBackend {
    let address = (!address.is_empty()).then(|| address.into());
    ObservedBackend { certificate, address }
}

fn known(shown: &[(u64, &str)], now: Instant) -> KnownBackends {
    let mut known = KnownBackends::default();
    known.begin_survey(now);
    for (certificate, address) in shown {
        known.observe(observed(*certificate, address), now);
    }
    known
}

#[test]
fn backends_are_told_apart_by_what_differs() {
    let now = Instant::now();
    let (certificate, address) =
        (BackendId::Certificate, |text: &str| BackendId::Address(text.into()));
    for (shown, kind, ids) in [
        (&[][..], Kind::Unknown, vec![]),
        (&[(1, "a")], Kind::One, vec![certificate(1)]),
        (&[(1, "a"), (1, "a"), (1, "a")], Kind::One, vec![certificate(1)]),
        (&[(1, "a"), (2, "b")], Kind::Several(2), vec![certificate(1), certificate(2)]),
        // One certificate for all.
        (&[(1, "a"), (1, "b"), (1, "a")], Kind::Several(2), vec![address("a"), address("b")]),
        // One address for all.
        (&[(1, "lb"), (2, "lb")], Kind::Several(2), vec![certificate(1), certificate(2)]),
        // Two apiservers of three share a certificate.
        (
            &[(1, "a"), (1, "b"), (2, "c")],
            Kind::Several(3),
            vec![address("a"), address("b"), address("c")],
        ),
        // Some connections have no credential.
        (&[(1, ""), (2, "")], Kind::Several(2), vec![certificate(1), certificate(2)]),
        (&[(1, ""), (1, "a")], Kind::One, vec![certificate(1)]),
        (&[(1, ""), (1, "a"), (1, "b")], Kind::Several(2), vec![address("a"), address("b")]),
    ] {
        let known = known(shown, now);
        assert_eq!(known.kind(), kind, "{shown:?}");
        let found: Vec<_> = known.present().into_iter().map(|backend| backend.id).collect();
        assert_eq!(found, ids, "{shown:?}");
    }
    // An address that several certificates share names none.
    for (shown, expected) in [
        (
            &[(1 << 32, ""), (1 << 32, "10.0.0.1:6443"), (2 << 32, "10.0.0.2:6443")][..],
            ["10.0.0.1:6443", "10.0.0.2:6443"],
        ),
        (&[(1 << 32, "lb"), (2 << 32, "lb")], ["certificate-00000001", "certificate-00000002"]),
    ] {
        let names = known(shown, now).present();
        let names: Vec<_> = names.iter().map(|backend| &*backend.name).collect();
        assert_eq!(names, expected);
    }
}

#[test]
fn connection_is_of_a_backend_by_its_feature() {
    let address = BackendId::Address("a".into());
    assert_eq!(address.is(&observed(1, "a")), Some(true));
    assert_eq!(address.is(&observed(1, "b")), Some(false));
    assert_eq!(address.is(&observed(1, "")), None);
    assert_eq!(BackendId::Certificate(1).is(&observed(1, "b")), Some(true));
    assert_eq!(BackendId::Certificate(1).is(&observed(2, "")), Some(false));
}

#[test]
fn feature_is_chosen_by_all_that_was_seen() {
    let start = Instant::now();
    let ids = |known: &KnownBackends| -> Vec<_> {
        let mut backends = known.present();
        backends.sort_by(|one, other| one.name.cmp(&other.name));
        backends.into_iter().map(|backend| backend.id).collect()
    };
    let address = |text: &str| BackendId::Address(text.into());
    let mut shared = known(&[(1, "a"), (1, "b")], start);
    // One is dark, and then the shared certificate is renewed on one after another.
    let surveys = [
        (&[(1, "a")][..], vec![address("a")]),
        (&[(1, "a"), (2, "b")], vec![address("a"), address("b")]),
        (&[(2, "a"), (2, "b")], vec![address("a"), address("b")]),
        // Neither has answered.
        (&[(2, "")], vec![]),
    ];
    for (survey, expected) in surveys {
        let now = shared.surveyed_at.unwrap() + SECOND;
        shared.begin_survey(now);
        for (certificate, address) in survey {
            shared.observe(observed(*certificate, address), now);
        }
        assert_eq!(ids(&shared), expected, "{survey:?}");
    }
    // An answer that is missing makes no other backend.
    let own = known(&[(1, "a"), (1, ""), (2, "b"), (1, "")], start);
    assert_eq!(own.observed.len(), 2);
    assert_eq!(ids(&own), [BackendId::Certificate(1), BackendId::Certificate(2)]);
}

#[test]
fn balancer_has_indistinct_backends_only_if_none_can_be_recognised() {
    let start = Instant::now();
    let expecting = |mut known: KnownBackends| {
        known.expect_several(true);
        known
    };
    let many: Vec<_> = (0..20).map(|number| (number, "a")).collect();
    for (shown, kind) in [
        (&[][..], Kind::Unknown),
        (&[(1, "a"), (1, "a")], Kind::Indistinct),
        (&[(1, ""), (1, "")], Kind::Indistinct),
        (&[(1, "a"), (2, "b")], Kind::Several(2)),
        (&many, Kind::Indistinct),
    ] {
        assert_eq!(expecting(known(shown, start)).kind(), kind, "{shown:?}");
    }
    let mut known = expecting(known(&[(1, "a"), (2, "b")], start));
    known.begin_survey(start + SECOND);
    known.observe(observed(1, "a"), start + SECOND);
    assert_eq!(known.kind(), Kind::One, "the other one does not answer now");
    known.begin_survey(start + MEMORY);
    known.observe(observed(1, "a"), start + MEMORY);
    assert_eq!(known.kind(), Kind::Indistinct, "nor for an hour");

    let now = start + MEMORY;
    let indistinct: Vec<_> = known.present();
    assert_eq!(indistinct.len(), MOST);
    assert!(indistinct.iter().all(Backend::is_indistinct));
    assert_eq!(next_change(&known, &[], now), Some(MemberChange::Add(indistinct[0].clone())));
    let members = indistinct[..WANTED].iter().map(|backend| Member {
        backend: backend.clone(),
        condition: MemberCondition::Serves(now),
    });
    let members: Vec<_> = members.collect();
    assert_eq!(next_change(&known, &members, now), None);
    // A second one shows itself, or the address is no balancer any more.
    let removed = Some(MemberChange::Remove(indistinct[0].clone()));
    known.observe(observed(2, "b"), now);
    assert_eq!(next_change(&known, &members, now), removed);
    known.begin_survey(now + SECOND);
    known.observe(observed(1, "a"), now + SECOND);
    known.expect_several(false);
    assert_eq!(next_change(&known, &members, now), removed);
}

#[test]
fn certificates_that_differ_on_each_connection_mean_nothing() {
    let now = Instant::now();
    let mut known = KnownBackends::default();
    known.begin_survey(now);
    let member = |number: u64| Member {
        backend: Backend { id: BackendId::Certificate(number), name: "a".into() },
        condition: MemberCondition::Serves(now),
    };
    for certificate in 0..1_000 {
        known.observe(observed(certificate, "a"), now);
    }
    assert_eq!(known.kind(), Kind::Unreliable);
    assert!(known.observed.len() <= MAX_BACKENDS);
    assert_eq!(next_change(&known, &[], now), None);
    let removed = next_change(&known, &[member(1)], now);
    assert_eq!(removed, Some(MemberChange::Remove(member(1).backend)), "no endpoint stays");
    known.begin_survey(now + MEMORY);
    known.observe(observed(1, "a"), now + MEMORY);
    assert_eq!(known.kind(), Kind::One, "an hour later");
}

#[test]
fn only_the_last_survey_counts() {
    let start = Instant::now();
    let mut known = known(&[(1, "a")], start);
    // A virtual IP address has moved.
    known.begin_survey(start + SECOND);
    known.observe(observed(2, "b"), start + SECOND);
    assert_eq!(known.kind(), Kind::One);
    assert_eq!(next_change(&known, &[], start + SECOND), None);
}

#[test]
fn members_follow_the_table() {
    let start = Instant::now();
    let now = start + 100 * SECOND;
    let three = known(&[(1, "a"), (2, "b"), (3, "c")], now);
    let four = known(&[(1, "a"), (2, "b"), (3, "c"), (4, "d")], now);
    let two = known(&[(1, "a"), (2, "b")], now);
    let one = known(&[(1, "a")], now);
    let old = known(&[(1, "a"), (2, "b"), (3, "c")], start);
    let backend = |number: usize| three.present()[number].clone();
    // Serves or fails for this number of seconds.
    let member = |(number, seconds): &(usize, i32)| {
        let since = now.checked_sub(seconds.unsigned_abs() * SECOND).unwrap();
        let condition = if *seconds > 0 {
            MemberCondition::Serves(since)
        } else {
            MemberCondition::Fails(since)
        };
        Member { backend: backend(*number), condition }
    };
    let add = |number| Some(MemberChange::Add(backend(number)));
    let remove = |number| Some(MemberChange::Remove(backend(number)));
    let survey = Some(MemberChange::Survey);
    for (known, members, expected) in [
        (&one, &[][..], None),
        (&two, &[], add(0)),
        (&two, &[(0, 5)], add(1)),
        (&three, &[(0, 5), (1, 5)], None),
        // One fails.
        (&three, &[(0, 5), (1, 0)], None),
        (&three, &[(0, 5), (1, -1)], add(2)),
        // No survey has begun since: what it has found may have another certificate by now.
        (&old, &[(0, 5), (1, -1)], survey.clone()),
        (&two, &[(0, 5), (1, -1)], survey.clone()),
        (&three, &[(0, 5), (1, -9), (2, 5)], None),
        (&three, &[(0, 5), (1, -10), (2, 5)], remove(1)),
        // All fail, and the last survey has found them, or was before that.
        (&old, &[(0, -20), (1, -20), (2, -20)], survey.clone()),
        // The same, and there is a fourth one.
        (&four, &[(0, -20), (1, -9), (2, -20)], remove(0)),
        (&four, &[(0, -9), (1, -9), (2, -9)], None),
        (&four, &[(1, -9), (2, -9)], add(0)),
        // The last survey has not found it.
        (&one, &[(0, 5), (1, -10)], remove(1)),
        (&one, &[(1, -10)], remove(1)),
        (&one, &[(0, 5)], survey.clone()),
        // A third one is not needed any more.
        (&three, &[(0, 90), (1, 59), (2, 60)], None),
        (&three, &[(0, 90), (1, 60), (2, 60)], remove(2)),
    ] {
        let members: Vec<_> = members.iter().map(member).collect();
        assert_eq!(next_change(known, &members, now), expected, "{members:?}");
    }
}

#[test]
fn whole_address_is_an_endpoint_while_no_backend_serves() {
    let now = Instant::now() + 100 * SECOND;
    let member = |seconds: i32| {
        let since = now.checked_sub(seconds.unsigned_abs() * SECOND).unwrap();
        let condition = if seconds > 0 {
            MemberCondition::Serves(since)
        } else {
            MemberCondition::Fails(since)
        };
        Member { backend: Backend::indistinct(1), condition }
    };
    for (is_whole, members, expected) in [
        (true, &[][..], true),
        (false, &[], true),
        // They have just been found.
        (true, &[0, 0], true),
        (true, &[0, 1], false),
        // None serves.
        (false, &[0, 0], true),
        (false, &[-1, 0], true),
        (true, &[-1, -1], true),
        (false, &[-1, 5], false),
    ] {
        let members: Vec<_> = members.iter().copied().map(member).collect();
        assert_eq!(keeps_whole(is_whole, &members, now), expected, "{is_whole} {members:?}");
    }
}

/// Three apiservers renew their certificates one after another.
#[test]
fn backend_with_a_new_certificate_replaces_the_one_of_its_name() {
    let now = Instant::now() + 100 * SECOND;
    let renewed = known(&[(11, "a"), (12, "b"), (13, "c")], now);
    let member = |certificate, name: &str, condition| Member {
        backend: Backend { id: BackendId::Certificate(certificate), name: name.into() },
        condition,
    };
    let since = now.checked_sub(50 * SECOND).unwrap();
    let (serves, fails) = (MemberCondition::Serves(since), MemberCondition::Fails(now));
    // New connections would not reach it, although its old ones work.
    for condition in [serves, fails] {
        let members = [member(1, "a", condition), member(2, "b", serves)];
        for (left, old) in [(&members[..], 0), (&members[1..], 1)] {
            let removed = next_change(&renewed, left, now);
            assert_eq!(removed, Some(MemberChange::Remove(members[old].backend.clone())));
        }
    }
    let added = next_change(&renewed, &[], now);
    assert_eq!(added, Some(MemberChange::Add(renewed.present()[0].clone())));
}

#[test]
fn search_budget_has_a_burst_and_a_pace() {
    let (mut budget, start) = (SearchBudget::new(), Instant::now());
    let mut taken = |now| (0..1_000).filter(|_| budget.take(now)).count();
    assert_eq!(taken(start), SEARCH_BURST as usize);
    assert_eq!(taken(start + 10 * SEARCH_INTERVAL), 10);
    assert_eq!(taken(start + 1_000 * SEARCH_INTERVAL), SEARCH_BURST as usize);
}

#[test]
fn rounds_of_probes_are_rarer_while_failures_go_on() {
    let start = Instant::now();
    let mut rounds = ProbeRounds::default();
    let mut begun = Vec::new();
    for tick in 0..1_000 {
        if rounds.begin(start + tick * SECOND / 10) {
            begun.push(f64::from(tick) / 10.0);
        }
    }
    assert_eq!(begun, [0.0, 2.0, 6.0, 14.0, 30.0, 62.0]);
    assert!(rounds.begin(start + 1_000 * SECOND), "the first one of another fault");
    assert!(rounds.begin(start + 1_002 * SECOND));
}

#[test]
fn advertised_address_is_read_from_api_versions() {
    let body = |address: &str| {
        format!(
            r#"{{"kind":"APIVersions","versions":["v1"],"serverAddressByClientCIDRs":[{{"clientCIDR":"0.0.0.0/0","serverAddress":"{address}"}}]}}"#
        )
    };
    for address in ["10.0.0.1:6443", "[fd00::1]:6443", "ip-10-0-0-1.ec2.internal:443"] {
        assert_eq!(advertised_address(body(address).as_bytes()).as_deref(), Some(address));
    }
    for bad in [&*body(""), &*body("a b"), &*body(&"a".repeat(300)), "{}", "no", "[]", ""] {
        assert_eq!(advertised_address(bad.as_bytes()), None, "{bad}");
    }
}
