//! The forms of a `server` and of addresses that kubectl takes, and what is written.

use crate::cases::kubeconfigs::{Home, kubeconfig};

const OTHER: &str = "second.example.com:443";

/// Writes a configuration for this server. The error, if it is refused.
fn set_up(home: &Home, server: &str, args: &[&str]) -> Result<(), String> {
    let cluster =
        serde_json::json!({"server": server, "certificate-authority": "ca.crt"}).to_string();
    home.write("config", kubeconfig(&cluster, "{token: abc}"));
    let all = [
        &[
            "--kubeconfig",
            "config",
            "--out",
            "out",
            "--config-out",
            "js/jackstay.yaml",
            "--mode",
            "passthrough",
            "--force",
        ],
        args,
    ];
    let output = home.run(&all.concat());
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    if output.status.success() { Ok(()) } else { Err(error) }
}

#[test]
fn server_forms_of_kubectl_are_accepted_and_written_as_they_are() {
    for (server, endpoint, written) in [
        ("https://127.0.0.1:", "127.0.0.1:443", ""),
        ("HTTPS://127.0.0.1:16443", "127.0.0.1:16443", ""),
        ("Https://localhost.:16443/", "localhost:16443", ""),
        ("https://127.0.0.1:016443", "127.0.0.1:16443", ""),
        ("https://[fe80::1%25eth0]:16443", "[fe80::1%eth0]:16443", ""),
        ("https://[::ffff:127.0.0.1]:16443", "127.0.0.1:16443", ""),
        ("https://0.0.0.0:16443", "127.0.0.1:16443", ""),
        ("https://API.Example.com.", "api.example.com.:443", ""),
        ("https://h/K8s/a%2Fb//c/?watch#x", "h:443", "/K8s/a%2Fb//c"),
    ] {
        let home = Home::new();
        set_up(&home, server, &[]).unwrap();
        let config = home.tree("js/jackstay.yaml");
        assert_eq!(config["upstreams"][0]["endpoints"], serde_json::json!([endpoint]), "{server}");
        let cluster = home.tree("out")["clusters"][0]["cluster"].clone();
        assert_eq!(cluster["server"], format!("https://127.0.0.1:7443{written}"), "{server}");
        let original = &cluster["extensions"][0]["extension"]["original"]["server"];
        assert_eq!(original, server);
        // The first run's endpoint is found again.
        set_up(&home, server, &["--endpoint", OTHER]).unwrap();
        set_up(&home, server, &[]).unwrap();
        let endpoints = home.tree("js/jackstay.yaml")["upstreams"][0]["endpoints"].clone();
        assert_eq!(endpoints, serde_json::json!([endpoint, OTHER]), "{server}");
    }
}

#[test]
fn server_with_a_user_keeps_it_for_clients_and_prints_no_password() {
    let home = Home::new();
    let cluster = "{server: 'https://u:s3cret@h:1', certificate-authority: ca.crt}";
    home.write("config", kubeconfig(cluster, "{token: abc}"));
    let output = home.succeed(&["--kubeconfig", "config", "--out", "out"]);
    assert!(
        output.contains("https://h:1 -> https://127.0.0.1:7443") && !output.contains("s3cret"),
        "{output}"
    );
    let server = home.tree("out")["clusters"][0]["cluster"]["server"].clone();
    assert_eq!(server, "https://u:s3cret@127.0.0.1:7443");
}

#[test]
fn server_that_cannot_be_used_is_refused_with_the_remedy() {
    let home = Home::new();
    for (server, expected) in [
        ("http://10.0.0.1", "is not encrypted: jackstay connects with TLS only"),
        ("wss://10.0.0.1", "has a scheme other than https: write it as https://10.0.0.1:6443"),
        ("https:/10.0.0.1", "has no // after its scheme"),
        ("https://", "has no host"),
        ("https://h:0", "has a port that is not a number from 1 to 65535"),
        ("https://h:65536", "has a port that is not a number from 1 to 65535"),
        ("https://h:1 ", "has a space or a control character"),
        ("https://h:1\n", "has a space or a control character"),
        (
            "https://fd00::1:6443",
            "has an IPv6 address without brackets: write it as https://[fd00::1]:6443",
        ),
        ("https://[fe80::1%eth0]:1", "write it as https://[fe80::1%25eth0]:6443"),
        (
            "https://b\u{fc}cher.example",
            "write the name as DNS has it, with labels that begin with xn--",
        ),
        (
            "https://u:s3cret@256.1.1.1",
            "server \"https://256.1.1.1\" has a host that is neither an IP address nor",
        ),
    ] {
        let error = set_up(&home, server, &[]).unwrap_err();
        assert!(
            error.starts_with("cluster \"k\": server ") && error.contains(expected),
            "{server}: {error}"
        );
        assert!(!error.contains("s3cret") && !home.path("js").exists(), "{error}");
    }
}

#[test]
fn upstreams_are_compared_in_their_normal_form() {
    for (server, same) in [
        ("https://0A1B.gr7.eu-west-1.eks.example.com", "0a1b.GR7.eu-west-1.eks.example.com:443"),
        ("https://api.example.com.:6443", "api.example.com:6443"),
        ("https://[2001:0db8:0:0::10]:6443", "[2001:db8::10]:6443"),
        ("https://[::ffff:10.0.0.1]:6443", "10.0.0.1:6443"),
        ("https://LOCALHOST:6443", "localhost.:6443"),
        ("https://[fe80::1%25eth0]:6443", "[FE80:0::1%eth0]:6443"),
    ] {
        let home = Home::new();
        let more =
            ["--endpoint", same, "--endpoint", OTHER, "--endpoint", "Second.Example.com.:443"];
        set_up(&home, server, &more).unwrap();
        set_up(&home, server, &[]).unwrap();
        let endpoints = home.tree("js/jackstay.yaml")["upstreams"][0]["endpoints"].clone();
        assert_eq!(endpoints.as_array().unwrap().len(), 2, "{server}: {endpoints}");
        assert_eq!(endpoints[1], OTHER, "{server}");
    }
}
