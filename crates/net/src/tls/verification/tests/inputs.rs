//! The inputs, with what Go and this verifier do.

use super::*;

fn pinned_cases() -> Vec<Case> {
    let own_ca = self_signed(|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
    let own = self_signed(|params| params.is_ca = IsCa::ExplicitNoCa);
    let (ca, other) = (Ca::plain(), Ca::plain());
    let leaf = ca.leaf(|_| ());
    let expired = self_signed(|params| params.not_after = rcgen::date_time_ymd(2026, 12, 1));
    let for_clients = self_signed(|params| params.extended_key_usages = vec![CLIENT_AUTH]);
    let critical = self_signed(|params| {
        params.custom_extensions = vec![extension(&[1, 2, 3], &[5, 0], true)];
    });
    let sub = ca.sub(|_| ());
    let below = sub.leaf(|_| ());
    let ca_leaf = ca.leaf(|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
    let not_ca = Ca::root(|params| params.is_ca = IsCa::ExplicitNoCa);
    let of_leaf = not_ca.leaf(|_| ());
    let wrong_name = Some("127.0.0.2");
    vec![
        server("self-signed, CA:TRUE, is its own CA", &[&own_ca], &[&own_ca], Accepted),
        server("self-signed, CA:FALSE, is its own CA", &[&own], &[&own], Accepted),
        server("signed by another CA, itself in the bundle", &[&leaf], &[&leaf], Accepted),
        server(
            "itself in the bundle with others",
            &[&other.der, &leaf],
            &[&leaf, &ca.der],
            Accepted,
        ),
        client("client certificate itself in the bundle", &[&own], &[&own], Accepted),
        Case {
            server: wrong_name,
            ..server(
                "own CA, other name",
                &[&own],
                &[&own],
                Refused("is not valid for 127.0.0.2, only for 127.0.0.1"),
            )
        },
        server("own CA, expired", &[&expired], &[&expired], Refused("expired on 2026-12-01")),
        server(
            "own CA, for clients only",
            &[&for_clients],
            &[&for_clients],
            Refused("does not permit server authentication, only clientAuth (extendedKeyUsage)"),
        ),
        server(
            "own CA, unknown critical extension",
            &[&critical],
            &[&critical],
            Refused("has the critical extension 1.2.3"),
        ),
        server("intermediate CA in the bundle, root absent", &[&sub.der], &[&below], Accepted),
        server(
            "CA:TRUE, signed by a CA of the bundle",
            &[&ca.der],
            &[&ca_leaf],
            OnlyGo("is that of a CA (basicConstraints CA:TRUE)"),
        ),
        server(
            "signed by a leaf of the bundle",
            &[&not_ca.der],
            &[&of_leaf],
            Refused("is not that of a CA"),
        ),
    ]
}

fn usage_cases() -> Vec<Case> {
    let ca = Ca::plain();
    let usages = |usages: &[ExtendedKeyUsagePurpose]| {
        ca.leaf(|params| params.extended_key_usages = usages.to_vec())
    };
    let below = |usages: &[ExtendedKeyUsagePurpose]| {
        let sub = ca.sub(|params| params.extended_key_usages = usages.to_vec());
        (sub.der.clone(), sub.leaf(|params| params.extended_key_usages = vec![SERVER_AUTH]))
    };
    let (any_sub, below_any) = below(&[ANY]);
    let (code_sub, below_code) = below(&[ExtendedKeyUsagePurpose::CodeSigning]);
    let client_root = Ca::root(|params| params.extended_key_usages = vec![CLIENT_AUTH]);
    let below_client_root = client_root.leaf(|_| ());
    let sgc = ca.leaf(|params| {
        let netscape = ExtendedKeyUsagePurpose::Other(vec![2, 16, 840, 1, 113_730, 4, 1]);
        params.extended_key_usages = vec![netscape];
    });
    let empty = ca.leaf(|params| {
        params.custom_extensions = vec![extension(&[2, 5, 29, 37], &[0x30, 0], false)];
    });
    let root = &[&ca.der];
    let (server_only, client_only) = (usages(&[SERVER_AUTH]), usages(&[CLIENT_AUTH]));
    vec![
        server("no extended key usage", root, &[&usages(&[])], Accepted),
        server("anyExtendedKeyUsage", root, &[&usages(&[ANY])], Accepted),
        client("client with anyExtendedKeyUsage", root, &[&usages(&[ANY])], Accepted),
        server("for servers", root, &[&server_only], Accepted),
        client(
            "client with serverAuth",
            root,
            &[&server_only],
            Refused("does not permit client authentication, only serverAuth"),
        ),
        server(
            "server with clientAuth",
            root,
            &[&client_only],
            Refused("reissue it with extendedKeyUsage serverAuth"),
        ),
        server("intermediate CA with anyExtendedKeyUsage", root, &[&below_any, &any_sub], Accepted),
        server(
            "intermediate CA for code signing",
            root,
            &[&below_code, &code_sub],
            Refused("CN=sub in its chain does not permit server authentication, only codeSigning"),
        ),
        server(
            "root for clients, server",
            &[&client_root.der],
            &[&below_client_root],
            Refused("CN=root in ca.crt does not permit server authentication"),
        ),
        client("root for clients, client", &[&client_root.der], &[&below_client_root], Accepted),
        server(
            "Netscape server gated crypto",
            root,
            &[&sgc],
            Refused("only 2.16.840.1.113730.4.1"),
        ),
        server(
            "empty extended key usage",
            root,
            &[&empty],
            OnlyGo("has an empty extendedKeyUsage"),
        ),
    ]
}

fn extension_cases() -> Vec<Case> {
    let policies: &[u8] = &[0x30, 8, 0x30, 6, 6, 4, 0x55, 0x1d, 0x20, 0];
    let policy = |critical| extension(&[2, 5, 29, 32], policies, critical);
    let with = |extensions: Vec<CustomExtension>| {
        let ca = Ca::plain();
        let leaf = ca.leaf(|params| params.custom_extensions = extensions);
        (ca.der, leaf)
    };
    let (unknown_ca, unknown) = with(vec![extension(&[1, 2, 3], &[5, 0], true)]);
    let (policy_ca, policy_leaf) = with(vec![policy(true)]);
    let (plain_ca, plain_policy) = with(vec![policy(false)]);
    let (twice_ca, twice) = with(vec![extension(&[1, 2, 3], &[5, 0], false); 2]);
    let must_staple = extension(&[1, 3, 6, 1, 5, 5, 7, 1, 24], &[0x30, 3, 2, 1, 5], false);
    let (staple_ca, staple) = with(vec![must_staple]);
    let root_with = |extension: CustomExtension| {
        let ca = Ca::root(|params| params.custom_extensions = vec![extension]);
        let leaf = ca.leaf(|_| ());
        (ca.der, leaf)
    };
    let (unknown_root, of_unknown_root) = root_with(extension(&[1, 2, 3], &[5, 0], true));
    let (policy_root, of_policy_root) = root_with(policy(true));
    vec![
        server(
            "unknown critical extension",
            &[&unknown_ca],
            &[&unknown],
            Refused(
                "has the critical extension 1.2.3, which is not evaluated: reissue it without `critical`",
            ),
        ),
        server(
            "critical certificatePolicies",
            &[&policy_ca],
            &[&policy_leaf],
            OnlyGo("has the critical extension certificatePolicies (2.5.29.32)"),
        ),
        server("certificatePolicies", &[&plain_ca], &[&plain_policy], Accepted),
        server("an extension twice", &[&twice_ca], &[&twice], Refused("has an extension twice")),
        server("OCSP must-staple without a response", &[&staple_ca], &[&staple], Accepted),
        server(
            "root with an unknown critical extension",
            &[&unknown_root],
            &[&of_unknown_root],
            Refused("CN=root in ca.crt has the critical extension 1.2.3"),
        ),
        server(
            "root with critical certificatePolicies",
            &[&policy_root],
            &[&of_policy_root],
            Accepted,
        ),
    ]
}

fn constraint_cases() -> Vec<Case> {
    let dns_tree = |name: &str| GeneralSubtree::DnsName(name.to_owned());
    let mail = || SanType::Rfc822Name("a@a.example".try_into().unwrap());
    let ip = |address: &str| SanType::IpAddress(address.parse().unwrap());
    let ips = || GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([10, 0, 0, 0], 8));
    let directory = || {
        let mut name = DistinguishedName::new();
        name.push(DnType::OrganizationName, "other");
        GeneralSubtree::DirectoryName(name)
    };
    let refused = "has names that one of its CAs does not permit (nameConstraints";
    vec![
        constrained(
            "root permits the DNS name",
            (vec![dns_tree("example")], vec![]),
            vec![],
            Accepted,
        ),
        constrained(
            "root permits another DNS name",
            (vec![dns_tree("other")], vec![]),
            vec![],
            Refused(refused),
        ),
        constrained(
            "root permits `.example`",
            (vec![dns_tree(".example")], vec![]),
            vec![],
            Accepted,
        ),
        constrained(
            "root permits `.a.example`, not the name itself",
            (vec![dns_tree(".a.example")], vec![]),
            vec![],
            Refused(refused),
        ),
        constrained(
            "root excludes the DNS name",
            (vec![], vec![dns_tree("a.example")]),
            vec![],
            Refused(refused),
        ),
        constrained(
            "root permits the IP address",
            (vec![ips()], vec![]),
            vec![ip("10.1.2.3")],
            Accepted,
        ),
        constrained(
            "root permits other IP addresses",
            (vec![ips()], vec![]),
            vec![ip("192.0.2.1")],
            Refused(refused),
        ),
        constrained(
            "root excludes the IP address",
            (vec![], vec![ips()]),
            vec![ip("10.1.2.3")],
            Refused(refused),
        ),
        constrained(
            "root permits an e-mail domain, no e-mail address",
            (vec![GeneralSubtree::Rfc822Name("a.example".into())], vec![]),
            vec![],
            Accepted,
        ),
        constrained(
            "root permits the e-mail domain",
            (vec![GeneralSubtree::Rfc822Name("a.example".into())], vec![]),
            vec![mail()],
            OnlyGo(refused),
        ),
        constrained(
            "root permits directory names, critical",
            (vec![directory()], vec![]),
            vec![],
            Refused(refused),
        ),
    ]
}

fn name_cases() -> Vec<Case> {
    let ip = |address: &str| SanType::IpAddress(address.parse().unwrap());
    let ca = Ca::plain();
    let root = &[&ca.der];
    let cn_only = ca.leaf(|params| {
        params.subject_alt_names.clear();
        params.distinguished_name.push(DnType::CommonName, "127.0.0.1");
    });
    let no_subject = ca.leaf(|params| params.distinguished_name = DistinguishedName::new());
    let typed = |value: DnValue| {
        ca.leaf(|params| params.distinguished_name.push(DnType::OrganizationName, value))
    };
    let teletex = typed(DnValue::TeletexString("org".try_into().unwrap()));
    let bmp = typed(DnValue::BmpString("org".try_into().unwrap()));
    let universal = typed(DnValue::UniversalString("org".try_into().unwrap()));
    let odd_printable = patched(&ca, |_| (), (b"\x0c\x04leaf", b"\x13\x04le@f"));
    vec![
        server(
            "common name only",
            root,
            &[&cn_only],
            Refused("it has no subject alternative name"),
        ),
        server("empty subject", root, &[&no_subject], Accepted),
        server("Teletex string in the subject", root, &[&teletex], Accepted),
        server("BMP string in the subject", root, &[&bmp], Accepted),
        server("Universal string in the subject", root, &[&universal], NotAllGo),
        server(
            "`@` in a PrintableString",
            root,
            &[&odd_printable],
            Refused("cannot be read (a name in it is not valid text of its type)"),
        ),
        names("wildcard", vec![dns("*.k8s.example")], "a.k8s.example", Accepted),
        names(
            "wildcard for two labels",
            vec![dns("*.example")],
            "a.b.example",
            Refused("is not valid for a.b.example, only for *.example"),
        ),
        names(
            "wildcard directly below a top-level domain",
            vec![dns("*.example")],
            "a.example",
            OnlyGo("is not valid for a.example, only for *.example"),
        ),
        names("upper case", vec![dns("A.Example")], "a.example", Accepted),
        names("underscore", vec![dns("a_b.example")], "a_b.example", Accepted),
        names(
            "trailing dot in the certificate",
            vec![dns("a.example.")],
            "a.example",
            Refused("is not valid for a.example"),
        ),
        names(
            "a name that is not one beside the right one",
            vec![dns("a b"), dns("a.example")],
            "a.example",
            Accepted,
        ),
        names(
            "address as a DNS name",
            vec![dns("127.0.0.1")],
            "127.0.0.1",
            Refused("only for 127.0.0.1 as a DNS name"),
        ),
        names(
            "IPv4-mapped address in the certificate",
            vec![ip("::ffff:127.0.0.1")],
            "127.0.0.1",
            NotAllGo,
        ),
        names(
            "IPv4-mapped address of the server",
            vec![ip("127.0.0.1")],
            "::ffff:127.0.0.1",
            Accepted,
        ),
    ]
}

fn chain_cases() -> Vec<Case> {
    let (ca, other) = (Ca::plain(), Ca::plain());
    let (early, late) = (rcgen::date_time_ymd(2026, 12, 1), rcgen::date_time_ymd(2027, 2, 1));
    let root = |change: fn(&mut CertificateParams)| Ca::root(change);
    let expired = Ca::root(|params| params.not_after = early);
    let future = Ca::root(|params| params.not_before = late);
    let no_constraints = root(|params| params.is_ca = IsCa::NoCa);
    let no_cert_sign = root(|params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]);
    let short = root(|params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let (sub, of_short) = (ca.sub(|_| ()), short.sub(|_| ()));
    let sub_no_sign = ca.sub(|params| params.key_usages = vec![KeyUsagePurpose::CrlSign]);
    let sub_expired = ca.sub(|params| params.not_after = early);
    let leaf = |issuer: &Ca| issuer.leaf(|_| ());
    let leaf_expired = ca.leaf(|params| params.not_after = early);
    let leaf_future = ca.leaf(|params| params.not_before = late);
    let long_serial = ca.leaf(|params| params.serial_number = Some(vec![0x7f; 21].into()));
    let one = ca.leaf(|params| params.serial_number = Some(vec![1].into()));
    let zero_serial = resigned(&one, ca.issuer.key(), (&[2, 1, 1, 0x30], &[2, 1, 0, 0x30]));
    let negative = patched(&ca, |_| (), (&[2, 2, 1, 2], &[2, 2, 0x81, 2]));
    // The CA `sub` is signed by two roots.
    let cross = Ca::params("sub").signed_by(sub.issuer.key(), &other.issuer).unwrap().der().clone();
    // A renewed root with the same key, beside the expired one.
    let renewed = Ca::params("root").self_signed(expired.issuer.key()).unwrap().der().clone();
    vec![
        server("signed by a CA of the bundle", &[&ca.der], &[&leaf(&ca)], Accepted),
        server(
            "signed by another CA with the same name",
            &[&other.der],
            &[&leaf(&ca)],
            Refused("has the name of a CA in ca.crt and another key"),
        ),
        server(
            "signed by an absent CA",
            &[&leaf(&sub)],
            &[&leaf(&sub)],
            Refused("its issuer, CN=sub, is not in ca.crt"),
        ),
        server(
            "expired",
            &[&ca.der],
            &[&leaf_expired],
            Refused(
                "CN=leaf expired on 2026-12-01T00:00:00Z; the clock here says 2027-01-01T00:00:00Z",
            ),
        ),
        server(
            "not yet valid",
            &[&ca.der],
            &[&leaf_future],
            Refused("CN=leaf is not valid before 2027-02-01T00:00:00Z"),
        ),
        server(
            "root expired",
            &[&expired.der],
            &[&leaf(&expired)],
            Refused("the CA certificate of CN=root in ca.crt expired on 2026-12-01T00:00:00Z"),
        ),
        client(
            "client, root expired",
            &[&expired.der],
            &[&leaf(&expired)],
            Refused("the CA certificate of CN=root in ca.crt expired on"),
        ),
        server(
            "root expired, renewed one with its key beside it",
            &[&expired.der, &renewed],
            &[&leaf(&expired)],
            Accepted,
        ),
        server(
            "root not yet valid",
            &[&future.der],
            &[&leaf(&future)],
            Refused("CN=root in ca.crt is not valid before"),
        ),
        server(
            "intermediate CA expired",
            &[&ca.der],
            &[&leaf(&sub_expired), &sub_expired.der],
            Refused("the CA certificate of CN=sub in its chain expired on"),
        ),
        server(
            "root without basicConstraints",
            &[&no_constraints.der],
            &[&leaf(&no_constraints)],
            Refused("CN=root in ca.crt signs another one and is not that of a CA"),
        ),
        server(
            "root without keyCertSign",
            &[&no_cert_sign.der],
            &[&leaf(&no_cert_sign)],
            Refused("CN=root in ca.crt may not sign certificates (keyUsage lacks keyCertSign)"),
        ),
        server(
            "intermediate CA without keyCertSign",
            &[&ca.der],
            &[&leaf(&sub_no_sign), &sub_no_sign.der],
            Refused("CN=sub in its chain may not sign"),
        ),
        server("path length 0, no intermediate CA", &[&short.der], &[&leaf(&short)], Accepted),
        server(
            "path length 0, one intermediate CA",
            &[&short.der],
            &[&leaf(&of_short), &of_short.der],
            Refused("CN=root in ca.crt has more CAs below it than its path length permits"),
        ),
        server(
            "order and unneeded certificates of the chain",
            &[&ca.der],
            &[&leaf(&sub), &other.der, &ca.der, &sub.der],
            Accepted,
        ),
        server(
            "intermediate CA not sent",
            &[&ca.der],
            &[&leaf(&sub)],
            Refused("or an intermediate CA was not sent"),
        ),
        server(
            "cross-signed CA, the other root trusted",
            &[&other.der],
            &[&leaf(&sub), &sub.der, &cross],
            Accepted,
        ),
        server("serial number of 21 bytes", &[&ca.der], &[&long_serial], Accepted),
        server("serial number 0", &[&ca.der], &[&zero_serial], Accepted),
        server("negative serial number", &[&ca.der], &[&negative], NotAllGo),
    ]
}

/// The pairs of a CA and a leaf in `certificates.pem`, made with OpenSSL 3.0: rcgen cannot make them.
fn fixture_cases() -> Vec<Case> {
    let weak = "which is not supported with the key of its CA";
    let decision = |name: &str| match name {
        "SHA-1 signature" => Refused("is signed with SHA-1 with ECDSA"),
        "MD5 signature" => Refused("is signed with MD5 with RSA"),
        "RSA-PSS signature" | "P-521 keys" | "version 1 root" => Accepted,
        "RSA key of 1024 bits" => OnlyGo("has an RSA key of 1024 bits, which is not supported"),
        "RSA CA of 1024 bits" => OnlyGo("is signed by a CA with an RSA key of 1024 bits"),
        "P-224 key" => OnlyGo("has a P-224 key"),
        "P-224 CA" => OnlyGo(weak),
        "version 1" => OnlyGo("is X.509 version 1: reissue it as version 3"),
        other => panic!("{other}"),
    };
    let mut cases = Vec::new();
    for section in include_str!("certificates.pem").split("# ").skip(1) {
        let (name, pem) = section.split_once('\n').unwrap();
        let pair: Vec<_> =
            CertificateDer::pem_slice_iter(pem.as_bytes()).map(Result::unwrap).collect();
        let [ca, leaf] = pair.try_into().unwrap();
        if name == "version 1" {
            cases.push(client("version 1, itself in the bundle", &[&leaf], &[&leaf], Accepted));
            cases.push(client(name, &[&ca], &[&leaf], decision(name)));
        } else {
            cases.push(server(name, &[&ca], &[&leaf], decision(name)));
        }
    }
    cases
}

/// Every input.
pub(super) fn cases() -> Vec<Case> {
    [
        pinned_cases(),
        usage_cases(),
        extension_cases(),
        constraint_cases(),
        name_cases(),
        chain_cases(),
        fixture_cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
