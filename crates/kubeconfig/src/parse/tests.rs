use std::path::Path;

use serde_json::json;

use super::*;
use crate::context::{ContextError, ResolvedContext};
use crate::file::KubeconfigFile;

fn read(text: &str) -> Value {
    serde_json::to_value(parse(text).map_err(|error| error.to_string()).unwrap().config).unwrap()
}

/// A kubeconfig whose current context uses the first user of `users`.
fn with_users(users: &str) -> String {
    format!(
        "clusters: [{{name: k, cluster: {{server: 'https://h'}}}}]\n\
         contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\ncurrent-context: c\n\
         users:\n- name: u\n  user: {users}\n"
    )
}

#[test]
fn parse_null_value_is_absent_or_the_zero_value_of_go() {
    let exec = "{exec: {command: a, env: [{name: A, value: null}], args: [null, b], \
                provideClusterInfo: null, interactiveMode: '', installHint: ~}, token: null, tokenFile: }";
    let config = read(&with_users(exec));
    assert_eq!(
        config["users"][0]["user"],
        json!({"exec": {
            "command": "a", "args": ["", "b"], "env": [{"name": "A", "value": ""}], "provideClusterInfo": false
        }})
    );
    let provider = "{auth-provider: {config: {client-secret: null, a: b}}, as-user-extra: {a: null, b: [null]}}";
    let config = read(&with_users(provider));
    assert_eq!(
        config["users"][0]["user"],
        json!({
            "auth-provider": {"name": "", "config": {"client-secret": "", "a": "b"}},
            "as-user-extra": {"a": [], "b": [""]}
        })
    );
    let text = "kind: null\napiVersion: ~\npreferences: null\nextensions:\ncurrent-context:\nclusters:\n\
                users: [null, {name: null, user: null}]\n\
                contexts: [{name: z}, {name: y, context: null}, {name: x, context: {cluster: null, user: null}}]\n";
    let config = parse(text).map_err(|error| error.to_string()).unwrap().config;
    assert_eq!((config.auth_infos.len(), config.contexts.len()), (2, 3));
    assert!(config.clusters.is_empty() && config.current_context.is_none());
    let cluster = "clusters: [{name: k, cluster: {insecure-skip-tls-verify: null, server: null, \
                   extensions: [{name: a, extension: {b: null}}, {name: c}, null], unknown: null}}]\n";
    assert_eq!(
        read(cluster)["clusters"][0]["cluster"],
        json!({
            "extensions": [
                {"name": "a", "extension": {"b": null}}, {"name": "c", "extension": null},
                {"name": "", "extension": null}
            ],
            "unknown": null
        })
    );
}

#[test]
fn parse_takes_the_first_document_and_the_last_of_repeated_keys() {
    let token = |text: &str| read(text)["users"][0]["user"]["token"].clone();
    let user = with_users("{token: a, token: b}");
    for text in [
        user.clone(),
        format!("---\n{user}"),
        format!("# a comment\n%YAML 1.1\n---\n{user}...\n"),
        format!("{user}---\n"),
        format!("{user}---\nusers: []\n---\nx: [\n"),
        user.replace('\n', "\r\n"),
        with_users("{<<: {token: x, a: b}, token: b}"),
        with_users("{token: b, <<: {token: x}}"),
        format!("x: &user {{token: b}}\n{}", with_users("*user")),
    ] {
        assert_eq!(token(&text), "b", "{text}");
    }
    let parsed = parse(&format!("{user}---\nx: y\n")).map_err(|error| error.to_string()).unwrap();
    assert!(parsed.has_more_documents);
    assert_eq!(read("")["users"], json!([]));
    assert_eq!(read("---\n---\nusers: [{name: a}]\n")["users"], json!([]));
}

#[test]
fn parse_text_keeps_the_spelling_of_numbers_and_booleans() {
    for spelling in
        ["0123", "0x1F", "1e3", "1_000", "yes", "y", "TRUE", "1:30", "2001-01-01", ".5", "a%b@c=="]
    {
        let config = read(&with_users(&format!("{{token: {spelling}}}")));
        assert_eq!(config["users"][0]["user"]["token"], spelling);
    }
    let config = read("x: &t 0123\nusers: [{name: 12, user: {token: *t, password: !!str 1}}]\n");
    assert_eq!(
        config["users"],
        json!([{"name": "12", "user": {"token": "0123", "password": "1"}}])
    );
    let cluster = "clusters: [{name: k, cluster: {insecure-skip-tls-verify: on, disable-compression: 'true'}}]\n";
    assert_eq!(
        read(cluster)["clusters"][0]["cluster"],
        json!({"insecure-skip-tls-verify": true, "disable-compression": true})
    );
}

#[test]
fn parse_broken_entry_is_kept_and_refused_only_when_a_context_uses_it() {
    for (user, expected) in [
        ("{token: [s3cret]}", "line 6: users[0].user.token: expected text"),
        ("[s3cret]", "line 6: users[0].user: expected a map of keys"),
        ("{as-groups: s3cret}", "line 6: users[0].user.as-groups: expected a list"),
        ("\n    exec:\n      env: {A: s3cret}", "line 8: users[0].user.exec.env: expected a list"),
        (
            "{exec: {interactiveMode: s3cret}}",
            "line 6: users[0].user.exec.interactiveMode: expected one of Never, IfAvailable, Always",
        ),
    ] {
        let text = with_users(user) + "- name: other\n  user: {token: ok}\n";
        let file = KubeconfigFile::parse(Path::new("/k"), text.as_bytes()).unwrap();
        let error = ResolvedContext::resolve(file.config(), None).unwrap_err();
        let broken = ContextError::Broken { list: "users", name: "u".to_owned() };
        assert_eq!(error, broken, "{user}");
        let mistake = file.mistake("users", "u").unwrap().to_string();
        assert_eq!(mistake, expected);
        // The entry is written as it was read, and another context is not affected.
        let raw = &read(&text)["users"][0]["user"];
        let expected: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(*raw, expected["users"][0]["user"]);
        let mut config = file.config().clone();
        config.contexts[0].context.as_mut().unwrap().user = Some("other".to_owned());
        assert!(ResolvedContext::resolve(&config, None).is_ok());
    }
}

#[test]
fn parse_line_breaks_of_yaml_1_1_are_refused() {
    for line_break in ['\u{85}', '\u{2028}'] {
        let text = format!("kind: Config{line_break}current-context: c\n");
        let config = parse(&text).map(|parsed| parsed.config);
        // U+2028 is a character of the value in YAML 1.2, so that the kind is wrong.
        assert!(config.map_or(true, |config| config.kind.as_deref() != Some("Config")), "{text:?}");
    }
}

#[test]
fn decode_reads_the_encodings_of_kubectl() {
    let text = "users: [{name: \u{fc}}]\n";
    let wide = |order: fn(u16) -> [u8; 2]| -> Vec<u8> {
        format!("\u{feff}{text}").encode_utf16().flat_map(order).collect()
    };
    for bytes in [
        text.as_bytes().to_vec(),
        format!("\u{feff}{text}").into_bytes(),
        wide(u16::to_le_bytes),
        wide(u16::to_be_bytes),
    ] {
        assert_eq!(read(&decode(&bytes).unwrap())["users"][0]["name"], "\u{fc}");
    }
    let json = r#"{"users": [{"name": "a\/b", "user": {"token": "t"}}],
"clusters": []}"#;
    assert_eq!(read(&json.replace('\n', "\n\t"))["users"][0]["name"], "a/b");
    let without_mark: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for bytes in [&without_mark[..], b"name: \xfc", b"a: \0", b"\xff\xfea", b"\xff\xfe\x00\xd8"] {
        assert_eq!(decode(bytes), Err(ContentError::NotText), "{bytes:?}");
    }
}
