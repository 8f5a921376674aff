//! `jackstay kubeconfig --local-ca` for users of a running listener that terminates TLS.

use super::*;

const NAME: &str = "kubernetes.default.svc";

/// jackstay in front of a demo apiserver, with the user `admin` as its identity, that passes connections with one of
/// `names` through.
fn start(names: &[&str]) -> RunningProxy {
    RunningProxy::start("terminate", |dir| {
        let file = dir.join("jackstay.yaml");
        let text = fs::read_to_string(&file).unwrap();
        let mut tree: Value = serde_saphyr::from_str(&text).unwrap();
        tree["listeners"][0]["passthrough_server_names"] = json!(names);
        fs::write(&file, tree.to_string()).unwrap();
    })
}

impl RunningProxy {
    /// Runs `jackstay kubeconfig` with `options`. The kubeconfig that it reads has `user` as its user.
    fn kubeconfig_for(&self, user: &Value, options: &[&str]) -> Output {
        let mut tree = self.home.tree(".kube/config");
        tree["users"][0]["user"] = user.clone();
        self.home.write("other/config", &tree.to_string());
        let (server, admin) = (self.addr.to_string(), self.admin.to_string());
        let ca = self.home.path(".kube/jackstay/local-ca.crt");
        let input = self.home.path("other/config");
        let fixed = [
            "kubeconfig",
            "--force",
            "--kubeconfig",
            input.to_str().unwrap(),
            "--listen",
            &server,
            "--admin",
            &admin,
            "--local-ca",
            ca.to_str().unwrap(),
        ];
        self.home.run(&[&fixed[..], options].concat())
    }

    /// The cluster of the kubeconfig that is written for a user, and the output.
    fn written_for(&self, user: &Value, options: &[&str]) -> (Value, String) {
        let output = self.kubeconfig_for(user, options);
        assert!(output.status.success(), "{output:?}");
        (
            cluster(&self.home.tree("other/jackstay.kubeconfig")),
            String::from_utf8(output.stdout).unwrap(),
        )
    }
}

/// A user with a client certificate.
fn certificate_user(issued: &Issued) -> Value {
    json!({
        "client-certificate-data": STANDARD.encode(&issued.cert_pem),
        "client-key-data": STANDARD.encode(&issued.key_pem),
    })
}

#[test]
fn kubeconfig_local_ca_passes_users_through_who_have_no_identity() {
    let running = start(&["elsewhere.example", NAME]);
    running.wait_for_response();
    let alice = running.home.pki.client(&Subject::new("alice", &[])).unwrap();
    let (written, output) = running.written_for(&certificate_user(&alice), &[]);
    assert_eq!(written["tls-server-name"], NAME, "{output}");
    let ca = String::from_utf8(decode(&written["certificate-authority-data"])).unwrap();
    assert_eq!(ca, running.home.pki.ca_pem(), "the CA of the apiservers");
    assert!(output.contains("no identity for CN=alice"), "{output}");
    let credentials = Credentials::anonymous(&ca).certificate(&alice).expecting(NAME);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reply = runtime.block_on(async {
        Client::connect(running.addr, &credentials).await?.get("/api/v1/namespaces").await
    });
    assert_eq!(reply.unwrap().status, 200);

    // An identity and a token stay with jackstay's certificate.
    let admin = certificate_user(&running.home.admin);
    for user in [admin, json!({"token": "t"})] {
        let (written, output) = running.written_for(&user, &[]);
        assert_eq!(written.get("tls-server-name"), None, "{output}");
        let ca = decode(&written["certificate-authority-data"]);
        assert_eq!(ca, fs::read(running.home.path(".kube/jackstay/local-ca.crt")).unwrap());
    }
    // Of an exec plugin it is not known what it returns.
    let exec =
        json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "plugin"}});
    let (written, output) = running.written_for(&exec, &[]);
    assert_eq!(written.get("tls-server-name"), None);
    assert!(output.contains("run this command again with --tls-server-name"), "{output}");
    let (written, _) = running.written_for(&exec, &["--tls-server-name", NAME]);
    assert_eq!(written["tls-server-name"], NAME);
    assert!(running.proxy.stop());
}

#[test]
fn kubeconfig_local_ca_without_a_usable_name_is_refused() {
    for (names, parts) in [
        (&[][..], ["no identity for CN=alice", "set passthrough_server_names"]),
        (
            &["elsewhere.example"],
            ["elsewhere.example", "no certificate of the apiservers has a name"],
        ),
    ] {
        let running = start(names);
        running.wait_for_response();
        let alice = running.home.pki.client(&Subject::new("alice", &[])).unwrap();
        let output = running.kubeconfig_for(&certificate_user(&alice), &[]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        for part in parts {
            assert!(error.contains(part), "no {part:?} in {error}");
        }
        assert!(!running.home.path("other/jackstay.kubeconfig").exists());
        assert!(running.proxy.stop());
    }
}

#[test]
fn kubeconfig_local_ca_without_a_running_jackstay_says_what_is_not_known() {
    let home = Home::new();
    home.write_kubeconfig();
    let ca = home.write("ca.crt", &home.pki.ca_pem());
    let options = ["--local-ca", ca.to_str().unwrap(), "--admin", "127.0.0.1:1"];
    let output = home.run_online(&options);
    assert!(
        output
            .contains("the identities and passthrough_server_names of the listener are not known"),
        "{output}"
    );
    assert_eq!(cluster(&home.tree(".kube/jackstay.kubeconfig")).get("tls-server-name"), None);
}

#[test]
fn kubeconfig_terminate_passes_exec_plugins_through_by_a_shared_name() {
    let home = Home::new();
    let text = kubeconfig(SERVER, &home.pki.ca_pem(), None, None);
    let mut tree: Value = serde_saphyr::from_str(&text).unwrap();
    tree["users"][0]["user"] =
        json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "plugin"}});
    home.write(".kube/config", &tree.to_string());
    for (options, names, part) in [
        (
            &["--tls-server-name", NAME][..],
            json!([NAME]),
            "local-ca.crt --tls-server-name kubernetes.default.svc",
        ),
        (&[], Value::Null, "set listeners[0].passthrough_server_names"),
    ] {
        let output = home.run_offline(&[&["--mode", "terminate", "--force"], options].concat());
        let config = home.tree(".kube/jackstay/jackstay.yaml");
        assert_eq!(config["listeners"][0]["passthrough_server_names"], names, "{output}");
        assert!(output.contains(part), "no {part:?} in {output}");
    }
}
