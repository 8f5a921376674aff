//! The identity for a client certificate that the kubeconfig holds as data: what renews the certificate, renews it.

use super::*;

/// The identities of the written configuration.
fn identities(home: &Home) -> Value {
    home.tree(".kube/jackstay/jackstay.yaml")["listeners"][0]["identities"].clone()
}

const ARGUMENTS: [&str; 4] = ["--mode", "terminate", "--node-name", "node-1"];

#[test]
fn kubeconfig_identity_is_the_certificate_that_kubelet_rotates() {
    let mut home = Home::new();
    let node = Subject { user: "system:node:n1".into(), groups: vec!["system:nodes".into()] };
    let lifetime = Duration::from_secs(48 * 3600);
    let usual = PkiValidity::usual();
    let later = PkiValidity { not_after: usual.not_after + lifetime, ..usual };
    home.admin = home.pki.client(&node).unwrap();
    let rotated = home.pki.client_valid(&node, later).unwrap();
    home.write_kubeconfig();
    let pem = home.write(".kube/pki/kubelet-client-1.pem", &(rotated.cert_pem + &rotated.key_pem));
    fs::set_permissions(&pem, fs::Permissions::from_mode(0o600)).unwrap();
    let current = home.path(".kube/pki/kubelet-client-current.pem");
    std::os::unix::fs::symlink("kubelet-client-1.pem", &current).unwrap();
    let output = home.run_offline(&ARGUMENTS);
    assert!(
        output.contains("the identity is ") && output.contains("which kubelet rotates"),
        "{output}"
    );
    assert_eq!(identities(&home), json!([{"cert_file": current, "key_file": current}]));

    // Also where the certificate in the kubeconfig has expired.
    home.admin = home.pki.client_valid(&node, PkiValidity::expired()).unwrap();
    home.write_kubeconfig();
    home.run_offline(&[&ARGUMENTS[..], &["--force"]].concat());
    assert_eq!(identities(&home), json!([{"cert_file": current, "key_file": current}]));
    fs::remove_file(&current).unwrap();
    let error = home.run_refused(&[&ARGUMENTS[..], &["--force"]].concat());
    assert!(error.contains("expired"), "{error}");
}

#[test]
fn kubeconfig_that_is_a_pipe_is_copied_with_a_warning_and_check_names_the_remedy() {
    let home = Home::new();
    let input = home.write_kubeconfig();
    let out = home.path("out");
    let config = home.path("etc/jackstay.yaml");
    let script = format!(
        "{} kubeconfig --offline --kubeconfig /dev/stdin --mode terminate --node-name n --out {} --config-out {} <{}",
        env!("CARGO_BIN_EXE_jackstay"),
        out.display(),
        config.display(),
        input.display()
    );
    let run = Command::new("sh").args(["-c", &script]).output().unwrap();
    let output = String::from_utf8(run.stdout).unwrap();
    assert!(
        run.status.success()
            && output.contains("warning: the client certificate of user \"demo\" is copied")
    );
    assert_eq!(mode(&home.path("etc/client.key")), 0o600);
    let check = home.run(&["check", "--config", config.to_str().unwrap()]);
    let output =
        String::from_utf8(check.stdout).unwrap() + &String::from_utf8(check.stderr).unwrap();
    assert!(check.status.success() && output.contains("client.crt (valid until 20"), "{output}");
    assert!(output.contains("is a copy of the certificate in a kubeconfig"), "{output}");
    // The same command with a file replaces the copy.
    let paths = [out.to_str().unwrap(), config.to_str().unwrap()];
    home.run_offline(
        &[&ARGUMENTS[..], &["--force", "--out", paths[0], "--config-out", paths[1]]].concat(),
    );
    let check = home.run(&["check", "--config", paths[1]]);
    let output =
        String::from_utf8(check.stdout).unwrap() + &String::from_utf8(check.stderr).unwrap();
    assert!(check.status.success() && !output.contains("copy"), "{output}");
}

/// `kubeadm certs renew` writes another certificate into the kubeconfig.
#[test]
fn kubeconfig_identity_follows_the_kubeconfig() {
    let running = RunningProxy::start("terminate", |_| {});
    let path = running.home.path(".kube/config");
    assert_eq!(identities(&running.home), json!([{"kubeconfig": path, "user": "demo"}]));
    running.wait_for_response();
    // Another subject shows which certificate is in use.
    let renewed = running
        .home
        .pki
        .client(&Subject { user: "renewed".into(), groups: vec!["system:masters".into()] });
    let renewed = renewed.unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let encode = |pem: &str| STANDARD.encode(pem);
    let old = &running.home.admin;
    let text = text
        .replace(&encode(&old.cert_pem), &encode(&renewed.cert_pem))
        .replace(&encode(&old.key_pem), &encode(&renewed.key_pem));
    fs::write(&path, text).unwrap();
    let home = Home { admin: renewed, ..running.home };
    RunningProxy { home, ..running }.wait_for_response();
}
