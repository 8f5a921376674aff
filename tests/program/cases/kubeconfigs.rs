//! kubeconfigs that kubectl reads, and what the environment decides.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use jackstay_apiserver::pki::Pki;
use serde_json::Value;

/// A home directory with the CA of a cluster.
pub(crate) struct Home {
    pub(crate) dir: tempfile::TempDir,
}

impl Home {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.crt"), Pki::new("kubernetes").unwrap().ca_pem()).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(["kubeconfig"]).args(args).current_dir(self.dir.path());
        command.env_clear().env("HOME", self.dir.path());
        command
    }

    /// Runs `jackstay kubeconfig --offline`.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(&[&["--offline"], args].concat()).output().unwrap()
    }

    /// Runs it, asserts success and returns its output.
    pub(crate) fn succeed(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs it, asserts an exit code other than 0 and returns its error and the code.
    pub(crate) fn fail(&self, args: &[&str]) -> (String, i32) {
        let output = self.run(args);
        assert!(!output.status.success(), "{args:?}: {output:?}");
        (String::from_utf8(output.stderr).unwrap(), output.status.code().unwrap())
    }

    /// Parses a YAML file.
    pub(crate) fn tree(&self, name: &str) -> Value {
        serde_saphyr::from_str(&fs::read_to_string(self.path(name)).unwrap()).unwrap()
    }
}

/// A kubeconfig whose current context has this cluster and this user.
pub(crate) fn kubeconfig(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: k\n  cluster: {cluster}\ncontexts:\n- name: c\n  context: \
         {{cluster: k, user: u}}\ncurrent-context: c\nusers:\n- name: u\n  user: {user}\n"
    )
}

pub(crate) const CLUSTER: &str = "{server: 'https://10.0.0.1:6443', certificate-authority: ca.crt}";
const TOKEN: &str = "{token: abc}";

/// kubeconfigs that kubectl reads.
fn accepted() -> Vec<(&'static str, Vec<u8>)> {
    let plain = kubeconfig(CLUSTER, TOKEN);
    let wide = |order: fn(u16) -> [u8; 2]| {
        format!("\u{feff}{plain}").encode_utf16().flat_map(order).collect::<Vec<u8>>()
    };
    let exec = |rest: &str| {
        let exec =
            format!("{{apiVersion: client.authentication.k8s.io/v1beta1, command: aws, {rest}}}");
        kubeconfig(CLUSTER, &format!("{{exec: {exec}}}"))
    };
    let tree: Value = serde_saphyr::from_str(&plain).unwrap();
    let texts = [
        ("plain", plain.clone()),
        ("null env value", exec("env: [{name: A, value: null}, {name: B}]")),
        ("null lists", exec("env: null, args: null")),
        ("null argument", exec("args: [null, a]")),
        ("null boolean", exec("provideClusterInfo: null")),
        ("empty interactiveMode", exec("interactiveMode: ''")),
        (
            "null in another user",
            format!(
                "{plain}- name: v\n  user: {{auth-provider: {{name: oidc, config: {{client-secret: null}}}}}}\n"
            ),
        ),
        (
            "broken base64 in another user",
            format!("{plain}- name: v\n  user: {{client-key-data: '%'}}\n"),
        ),
        (
            "wrong mode in another user",
            format!("{plain}- name: v\n  user: {{exec: {{interactiveMode: Sometimes}}}}\n"),
        ),
        ("null entries", plain.replace("users:\n", "users:\n- null\n- {name: v, user: null}\n")),
        ("null context", plain.replace("contexts:\n", "contexts:\n- name: v\n  context: null\n")),
        ("null preferences", format!("preferences: null\nextensions: ~\n{plain}")),
        ("no kind", plain.replace("kind: Config\n", "kind: ''\n")),
        (
            "an extension without content",
            plain.replace("{server", "{extensions: [{name: a}], server"),
        ),
        ("repeated keys", plain.replace("{token: abc}", "{token: x, token: abc}")),
        (
            "merge key",
            format!("x: &u {{token: abc}}\n{}", plain.replace("{token: abc}", "{<<: *u}")),
        ),
        ("comments and a second document", format!("# a\n---\n{plain}---\na: b\n")),
        ("CRLF", plain.replace('\n', "\r\n")),
        ("byte order mark", format!("\u{feff}{plain}")),
        ("JSON with tabs", serde_json::to_string_pretty(&tree).unwrap().replace("  ", "\t")),
    ];
    let mut inputs: Vec<_> =
        texts.into_iter().map(|(name, text)| (name, text.into_bytes())).collect();
    inputs.push(("UTF-16LE", wide(u16::to_le_bytes)));
    inputs.push(("UTF-16BE", wide(u16::to_be_bytes)));
    inputs
}

#[test]
fn kubeconfig_that_kubectl_reads_is_accepted_and_reverted() {
    let home = Home::new();
    for (name, content) in accepted() {
        home.write("config", &content);
        let output = home.succeed(&["--kubeconfig", "config", "--in-place"]);
        assert!(output.contains("-> https://127.0.0.1:7443"), "{name}: {output}");
        assert_eq!(
            home.tree("config")["clusters"][0]["cluster"]["server"],
            "https://127.0.0.1:7443"
        );
        let output = home.succeed(&["--kubeconfig", "config", "--revert"]);
        assert!(output.contains("-> https://10.0.0.1:6443"), "{name}: {output}");
    }
}

/// The control: kubectl reads each of these files, and what jackstay writes for it.
#[test]
#[ignore = "needs KUBECTL"]
fn kubectl_reads_the_accepted_kubeconfigs_and_what_is_written() {
    let home = Home::new();
    let kubectl = std::env::var("KUBECTL").unwrap_or("kubectl".to_owned());
    let view = || {
        let arguments =
            ["config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"];
        let mut command = Command::new(&kubectl);
        let output = command
            .args(["--kubeconfig", "config"])
            .args(arguments)
            .current_dir(home.dir.path())
            .output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    for (name, content) in accepted().into_iter().filter(|(name, _)| {
        // kubectl refuses the whole file for these.
        *name != "broken base64 in another user"
    }) {
        home.write("config", &content);
        assert_eq!(view(), "https://10.0.0.1:6443", "{name}");
        home.succeed(&["--kubeconfig", "config", "--in-place"]);
        assert_eq!(view(), "https://127.0.0.1:7443", "{name}");
    }
}

#[test]
fn kubeconfig_with_a_mistake_is_refused_with_file_line_key_and_reason() {
    let home = Home::new();
    let plain = kubeconfig(CLUSTER, TOKEN);
    for (content, expected) in [
        (
            kubeconfig(CLUSTER, "{token: [s3cret]}"),
            "config: line 12: users[0].user.token: expected text",
        ),
        (
            kubeconfig("{server: {}}", TOKEN),
            "config: line 5: clusters[0].cluster.server: expected text",
        ),
        (
            kubeconfig("{server: 'https://h', insecure-skip-tls-verify: 7}", TOKEN),
            "config: line 5: clusters[0].cluster.insecure-skip-tls-verify: expected true or false",
        ),
        (
            kubeconfig(
                "{server: 'https://h', insecure-skip-tls-verify: true, certificate-authority: ca.crt}",
                TOKEN,
            ),
            "cluster \"k\": has a certificate-authority and insecure-skip-tls-verify, and kubectl refuses both together",
        ),
        (
            plain.replace("users:\n- name: u\n  user:", "users:\n  u:"),
            "config: line 11: users: expected a list",
        ),
        (
            plain.replace("kind: Config", "kind: Pod"),
            "config: not a kubeconfig: its kind is \"Pod\"",
        ),
        (
            plain.replace("apiVersion: v1", "apiVersion: v2"),
            "config: its apiVersion is \"v2\": kubectl reads v1 only",
        ),
        (format!("{plain}- name: u\n"), "config: users[1]: the name \"u\" appears twice"),
        (
            plain.replace("  user: {token", "\tuser: {token"),
            "config: line 12: not valid YAML: a tab in the indentation",
        ),
        (plain.replace("user: u", "user: v"), "context \"c\": no user \"v\""),
        (
            plain.replace("current-context: c\n", ""),
            "no current-context: choose one with --context (contexts: c)",
        ),
        (String::new(), "no current-context: choose one with --context (there are no contexts)"),
        (plain.replace("abc", "a\u{1}c"), "config: line 12: "),
    ] {
        home.write("config", &content);
        let (error, code) = home.fail(&["--kubeconfig", "config", "--in-place"]);
        assert!(error.contains(expected) && code == 2, "{expected}: {error}");
        assert!(!error.contains("s3cret"), "{error}");
        assert_eq!(fs::read_to_string(home.path("config")).unwrap(), content, "nothing is written");
    }
    home.write("config", b"\xff\xfe\x00");
    let (error, _) = home.fail(&["--kubeconfig", "config"]);
    assert!(
        error.contains("config: not a text file in UTF-8, or in UTF-16 with a byte order mark"),
        "{error}"
    );
}

#[test]
fn kubeconfig_write_keeps_unknown_keys_and_broken_entries_and_says_what_is_lost() {
    let home = Home::new();
    let text = format!(
        "# a comment\nx-tool: {{a: null, b: [1, 1.5]}}\n{}- name: v\n  user: {{token: [kept]}}\n---\nlost: 1\n",
        kubeconfig("{server: 'https://h', unknown: {a: null}}", TOKEN)
    );
    home.write("config", &text);
    let output = home.succeed(&["--kubeconfig", "config", "--in-place"]);
    let lost = "the comments and YAML documents after the first one of the kubeconfig are lost, as with `kubectl config`";
    assert!(output.contains(lost), "{output}");
    let tree = home.tree("config");
    assert_eq!(tree["x-tool"], serde_json::json!({"a": null, "b": [1, 1.5]}));
    assert_eq!(tree["clusters"][0]["cluster"]["unknown"], serde_json::json!({"a": null}));
    assert_eq!(tree["users"][1]["user"]["token"][0], "kept");
}

#[test]
fn kubeconfig_notes_the_proxy_of_the_environment() {
    let home = Home::new();
    home.write("config", kubeconfig(CLUSTER, TOKEN));
    let run = |variables: &[(&str, &str)], server: &str| {
        let mut command = home.command(&[
            "--offline",
            "--force",
            "--kubeconfig",
            "config",
            "--out",
            "out",
            "--listen",
            server,
        ]);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let proxy = ("HTTPS_PROXY", "http://u:s3cret@proxy:3128");
    let note = "kubectl connects to 10.0.0.1:6443 through the proxy http://proxy:3128 (HTTPS_PROXY), and jackstay \
                connects directly";
    let output = run(&[proxy], "127.0.0.1:7443");
    assert!(output.contains(note) && !output.contains("s3cret"), "{output}");
    assert!(!output.contains("add "), "Go connects to loopback addresses directly: {output}");
    let output = run(&[proxy, ("NO_PROXY", "10.0.0.0/24")], "10.9.9.9:7443");
    assert!(!output.contains(note) && output.contains("add 10.9.9.9 to NO_PROXY"), "{output}");
    assert!(!run(&[], "10.9.9.9:7443").contains("proxy"));
}

#[test]
fn kubeconfig_given_by_descriptor_is_read_and_never_replaced() {
    let home = Home::new();
    let config = home.write("config", kubeconfig(CLUSTER, TOKEN).replace("ca.crt", "/none"));
    let run = |args: &[&str]| {
        let mut command =
            home.command(&[&["--offline", "--kubeconfig", "/dev/stdin"], args].concat());
        command.stdin(Stdio::from(fs::File::open(&config).unwrap())).output().unwrap()
    };
    let mut child = home.command(&["--offline", "--kubeconfig", "/dev/stdin", "--out", "out"]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &fs::read(&config).unwrap())
        .unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(home.tree("out")["clusters"][0]["cluster"]["server"], "https://127.0.0.1:7443");
    for (args, expected) in [
        (
            &["--in-place"][..],
            "--in-place: /dev/stdin is not a file that can be changed: --out FILE writes",
        ),
        (
            &[],
            "/dev/stdin is not in a directory of files: --out FILE names the kubeconfig to write",
        ),
    ] {
        let output = run(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected) && output.status.code() == Some(2), "{error}");
    }
    let (error, _) = home.fail(&["--kubeconfig", "-"]);
    assert!(
        error.contains("cannot read -: no such file; /dev/stdin names the standard input"),
        "{error}"
    );
    let output = home.command(&["--offline"]).env("SUDO_USER", "alice").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("sudo changes the home directory: name the kubeconfig with --kubeconfig"),
        "{error}"
    );
    let output = home.command(&["--offline"]).env_remove("HOME").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("no kubeconfig: name one with --kubeconfig, or set $KUBECONFIG or $HOME"),
        "{error}"
    );
}
