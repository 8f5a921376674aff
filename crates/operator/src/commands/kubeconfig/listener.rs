//! How the running jackstay serves the user of `jackstay kubeconfig --local-ca`.
//!
//! A listener in mode `terminate` serves tokens, and the certificates of its identities. A user with another
//! certificate must connect with a server name of a connection that the listener passes through
//! (`passthrough_server_names`). The status of the process has both lists.
//!
//! | user | server name is configured | result |
//! |---|---|---|
//! | `--tls-server-name` is one of the configured names | yes | passed through |
//! | certificate of an identity, token, or no credential | any | terminated |
//! | any other certificate | yes | passed through |
//! | any other certificate | no | an error |
//! | exec plugin | any | terminated, and a note what to do if it returns certificates |
//! | certificate, and the process does not answer | unknown | terminated, and a note |

use jackstay_config::server_name_matches;
use jackstay_kubeconfig::{Credential, PemSource, ResolvedContext, ServerUrl};
use jackstay_net::tls::certificate::Subject;
use jackstay_net::tls::pem_files::valid_certificates;
use serde_json::Value;

use super::args::KubeconfigArgs;
use super::output::Failure;
use crate::admin_client::{explain_no_status, fetch_status};

/// How the connections of the user are served.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UserPath {
    /// jackstay terminates TLS, or all connections are passed through.
    AsConfigured {
        /// Messages to the user.
        notes: Vec<String>,
    },
    /// Connections with one of these server names are passed through.
    ByServerName {
        /// The names that jackstay accepts.
        names: Vec<String>,
        /// A message to the user: why.
        reason: String,
    },
}

/// What the status says of a listener.
#[derive(Debug, Default)]
struct ListenerFacts {
    name: String,
    /// The subjects of its identities.
    identities: Vec<String>,
    passthrough_names: Vec<String>,
}

/// Decides how the user of `context` is served by the listener at `address`.
pub(super) fn user_path(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    address: &ServerUrl,
) -> Result<UserPath, Failure> {
    let as_configured = |notes| Ok(UserPath::AsConfigured { notes });
    let needs_status = args.tls_server_name.is_some()
        || matches!(context.credential, Credential::Certificate(..) | Credential::Exec(_));
    if args.local_ca.is_none() || !needs_status {
        return as_configured(Vec::new());
    }
    let unknown = |why: &str| {
        format!(
            "the identities and passthrough_server_names of the listener are not known ({why}): if it has no \
             identity for the certificate of user {:?}, it refuses its requests",
            context.user
        )
    };
    if args.offline {
        return as_configured(vec![unknown("--offline")]);
    }
    match fetch_status(args.admin) {
        Err(error) => as_configured(vec![unknown(&explain_no_status(args.admin, &error))]),
        Ok(status) => match ListenerFacts::of(&status, address) {
            Some(listener) => listener.path_of(context, args.tls_server_name.as_deref()),
            None => as_configured(vec![unknown(&format!(
                "the jackstay at {} has no listener at {}",
                args.admin,
                address.address()
            ))]),
        },
    }
}

impl ListenerFacts {
    /// The listener at `address` in the body of `/status`.
    fn of(status: &Value, address: &ServerUrl) -> Option<Self> {
        let listener = status["listeners"].as_array()?.iter().find(|listener| {
            let mut bind = listener["bind"].as_array().into_iter().flatten();
            bind.any(|bind| bind.as_str().is_some_and(|bind| is_bound_at(bind, address)))
        })?;
        let texts = |list: &Value, key: Option<&str>| {
            let items = list.as_array().into_iter().flatten();
            let texts = items.filter_map(|item| key.map_or(item, |key| &item[key]).as_str());
            texts.map(ToOwned::to_owned).collect()
        };
        Some(Self {
            name: listener["name"].as_str().unwrap_or_default().to_owned(),
            identities: texts(&listener["identities"], Some("subject")),
            passthrough_names: texts(&listener["passthrough_server_names"], None),
        })
    }

    fn path_of(self, context: &ResolvedContext, given: Option<&str>) -> Result<UserPath, Failure> {
        let Self { name: listener, identities, passthrough_names } = self;
        let is_passed_through =
            |name: &str| passthrough_names.iter().any(|p| server_name_matches(p, name));
        let wanted = given.map(str::to_ascii_lowercase);
        let given = wanted.clone().filter(|name| is_passed_through(name));
        let user = &context.user;
        let reason = match (&given, &context.credential) {
            (Some(_), _) => {
                "the name of --tls-server-name is one of its passthrough_server_names".to_owned()
            }
            (None, Credential::Certificate(certificate, _)) => {
                let subject = subject_of(user, certificate)?;
                if identities.contains(&subject) {
                    return Ok(UserPath::AsConfigured { notes: Vec::new() });
                }
                if let Some(name) = wanted {
                    return Err(Failure::Input(format!(
                        "--tls-server-name {name}: listener {listener:?} has no identity for {subject}, and the name is \
                         none of its passthrough_server_names ({})",
                        passthrough_names.join(", ")
                    )));
                }
                format!("it has no identity for {subject}")
            }
            (None, Credential::Exec(plugin)) => {
                let notes = vec![exec_note(&plugin.command, &listener, &passthrough_names)];
                return Ok(UserPath::AsConfigured { notes });
            }
            (None, _) => return Ok(UserPath::AsConfigured { notes: Vec::new() }),
        };
        if passthrough_names.is_empty() {
            return Err(Failure::Input(format!(
                "listener {listener:?} cannot serve user {user:?}: {reason}, and no passthrough_server_names; add \
                 the certificate to `identities`, or set passthrough_server_names to a name in the apiservers' \
                 certificates, such as kubernetes.default.svc"
            )));
        }
        let reason = format!(
            "listener {listener:?} passes the connections of user {user:?} through, because {reason}: the apiservers \
             see the user's own certificate"
        );
        Ok(UserPath::ByServerName {
            names: given.map_or(passthrough_names, |name| vec![name]),
            reason,
        })
    }
}

/// Whether a listening address accepts connections to the host and port of `address`.
fn is_bound_at(bind: &str, address: &ServerUrl) -> bool {
    let Ok(bind) = bind.parse::<std::net::SocketAddr>() else { return false };
    let is_host = match address.host.parse::<std::net::IpAddr>() {
        Ok(ip) => bind.ip() == ip || bind.ip().is_unspecified(),
        // A name is resolved by the client.
        Err(_) => true,
    };
    bind.port() == address.port && is_host
}

fn subject_of(user: &str, certificate: &PemSource) -> Result<String, Failure> {
    let chain = valid_certificates(&certificate.read()?);
    let unreadable =
        |why: String| Failure::Input(format!("user {user:?}: client-certificate: {why}"));
    let leaf = chain.first().ok_or_else(|| unreadable("holds no certificate".to_owned()))?;
    Subject::from_der(leaf)
        .map(|subject| subject.to_string())
        .map_err(|error| unreadable(error.to_string()))
}

fn exec_note(command: &str, listener: &str, names: &[String]) -> String {
    let remedy = match names.first() {
        Some(name) => format!("run this command again with --tls-server-name {name}"),
        None => format!(
            "set passthrough_server_names of listener {listener:?} to a name in the apiservers' certificates first"
        ),
    };
    format!(
        "jackstay forwards the tokens of the exec plugin {command:?}; if it returns client certificates, {remedy}"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PASSTHROUGH: &str = "kubernetes.default.svc";

    fn context(user: &str) -> ResolvedContext {
        let text = format!(
            "{{current-context: c, contexts: [{{name: c, context: {{cluster: k, user: u}}}}], \
             clusters: [{{name: k, cluster: {{server: 'https://10.0.0.1:6443'}}}}], users: [{{name: u, user: {user}}}]}}"
        );
        ResolvedContext::resolve(&serde_saphyr::from_str(&text).unwrap(), None).unwrap()
    }

    fn facts(status: &Value) -> ListenerFacts {
        let address = ServerUrl::parse("127.0.0.1:7443").unwrap();
        ListenerFacts::of(status, &address).unwrap()
    }

    fn status(names: &[&str]) -> Value {
        json!({"listeners": [
            {"name": "other", "bind": ["127.0.0.1:7444"]},
            {"name": "l", "bind": ["127.0.0.1:7443", "[::1]:7443"], "identities": [{"subject": "CN=node"}],
             "passthrough_server_names": names},
        ]})
    }

    fn certificate(dir: &tempfile::TempDir, name: &str) -> String {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = rcgen::KeyPair::generate().unwrap();
        let file = dir.path().join(name);
        std::fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
        format!("{{client-certificate: {0}, client-key: {0}}}", file.display())
    }

    fn path(names: &[&str], user: &str, given: Option<&str>) -> Result<UserPath, String> {
        facts(&status(names)).path_of(&context(user), given).map_err(|failure| match failure {
            Failure::Input(why) | Failure::Write(why) => why,
        })
    }

    #[test]
    fn path_of_a_certificate_depends_on_the_identities() {
        let dir = tempfile::tempdir().unwrap();
        let (node, alice) = (certificate(&dir, "node"), certificate(&dir, "alice"));
        let terminated = Ok(UserPath::AsConfigured { notes: Vec::new() });
        for user in [&node, "{token: a}", "{}"] {
            assert_eq!(path(&[PASSTHROUGH], user, None), terminated, "{user}");
        }
        match path(&[PASSTHROUGH], &alice, None).unwrap() {
            UserPath::ByServerName { names, reason } => {
                assert_eq!(names, [PASSTHROUGH]);
                assert!(reason.contains("no identity for CN=alice"), "{reason}");
            }
            other @ UserPath::AsConfigured { .. } => panic!("{other:?}"),
        }
        let error = path(&[PASSTHROUGH], &alice, Some("kubernetes")).unwrap_err();
        assert!(error.starts_with("--tls-server-name kubernetes: listener"), "{error}");
        let error = path(&[], &alice, None).unwrap_err();
        assert!(
            error.contains("listener \"l\"") && error.contains("passthrough_server_names"),
            "{error}"
        );
    }

    #[test]
    fn path_with_a_given_name_is_that_of_the_name() {
        let names = [PASSTHROUGH, "*.example.com"];
        for (given, expected) in [
            ("kubernetes.default.svc", Some("kubernetes.default.svc")),
            ("A.example.com", Some("a.example.com")),
            ("example.com", None),
        ] {
            let found = match path(&names, "{token: a}", Some(given)).unwrap() {
                UserPath::ByServerName { names, .. } => Some(names.concat()),
                UserPath::AsConfigured { .. } => None,
            };
            assert_eq!(found.as_deref(), expected, "{given}");
        }
    }

    #[test]
    fn path_of_an_exec_plugin_is_terminated_with_a_note() {
        for (names, part) in [
            (&[PASSTHROUGH][..], "with --tls-server-name kubernetes.default.svc"),
            (&[], "set passthrough_server_names of listener \"l\""),
        ] {
            let UserPath::AsConfigured { notes } =
                path(names, "{exec: {command: aws}}", None).unwrap()
            else {
                panic!("passed through")
            };
            assert!(notes[0].contains(part), "{notes:?}");
        }
    }

    #[test]
    fn is_bound_at_compares_hosts_and_ports() {
        for (bind, address, expected) in [
            ("127.0.0.1:7443", "127.0.0.1:7443", true),
            ("0.0.0.0:7443", "127.0.0.1:7443", true),
            ("[::1]:7443", "localhost:7443", true),
            ("[::1]:7443", "127.0.0.1:7443", false),
            ("127.0.0.1:7444", "127.0.0.1:7443", false),
        ] {
            let address = ServerUrl::parse(address).unwrap();
            assert_eq!(is_bound_at(bind, &address), expected, "{bind} {}", address.address());
        }
    }
}
