//! Parses the text of a kubeconfig by the rules of kubectl.
//!
//! kubectl converts YAML to JSON (sigs.k8s.io/yaml) and decodes that into the types of `clientcmd/api/v1`. Hence a
//! null is an absent value, or the empty text in a list or map of texts; of a repeated key the last one counts; only
//! the first YAML document is read; and a byte order mark selects UTF-16. `config/compatibility.md` lists the
//! differences.
//!
//! An entry with a value of a wrong type does not refuse the file. Its content is kept for a write, in `other` of the
//! entry, and its mistake is reported when a context uses the entry.

use std::collections::BTreeMap;
use std::fmt;

use jackstay_config::describe_yaml_error;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::{Map, Value};
use serde_saphyr::options::DuplicateKeyPolicy;
use serde_saphyr::{Error as YamlError, Options, Spanned};

use super::error::ContentError;
use crate::model::{Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext};

/// Maximum number of YAML events to which all aliases of a file expand, so that aliases of aliases do not
/// exhaust the memory.
const MAX_ALIAS_EVENTS: usize = 200_000;

/// Maximum depth of nested lists and maps. The types of kubectl need 7; an extension may have more.
const MAX_DEPTH: usize = 32;

/// The content of a kubeconfig.
pub(super) struct ParsedKubeconfig {
    pub(super) config: Kubeconfig,
    /// The entries that have a value of a wrong type.
    pub(super) mistakes: Vec<EntryMistake>,
    /// Whether a document follows the first one.
    pub(super) has_more_documents: bool,
}

/// A value of a wrong type in an entry.
#[derive(Clone)]
pub(super) struct EntryMistake {
    /// The list of the entry.
    pub(super) list: &'static str,
    /// The name of the entry.
    pub(super) name: String,
    pub(super) error: ContentError,
}

/// Decodes the content of a file: UTF-8, or UTF-16 with a byte order mark (yaml.v2 `yaml_parser_determine_encoding`).
///
/// # Errors
/// It is not text.
pub(super) fn decode(bytes: &[u8]) -> Result<String, ContentError> {
    let wide = |rest: &[u8], unit: fn([u8; 2]) -> u16| {
        let (pairs, odd) = rest.as_chunks::<2>();
        let units: Vec<u16> = pairs.iter().map(|pair| unit(*pair)).collect();
        String::from_utf16(&units).ok().filter(|_| odd.is_empty())
    };
    let text = match bytes {
        [0xff, 0xfe, rest @ ..] => wide(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => wide(rest, u16::from_be_bytes),
        bytes => String::from_utf8(bytes.to_vec()).ok(),
    };
    text.filter(|text| !text.contains('\0')).ok_or(ContentError::NotText)
}

/// Parses the text of a file.
///
/// # Errors
/// It is not YAML, or a value outside of the entries has a wrong type.
pub(super) fn parse(text: &str) -> Result<ParsedKubeconfig, ContentError> {
    let (text, root, has_more_documents) = match parse_tree(text) {
        Ok(root) => (text, root, false),
        Err(error) => match first_document(text, &error) {
            Some(first) => (first, parse_tree(first).map_err(|error| syntax(text, &error))?, true),
            None => return Err(syntax(text, &error)),
        },
    };
    let mut reader = Reader { text, mistakes: Vec::new() };
    let config = reader.config(&root)?;
    Ok(ParsedKubeconfig { config, mistakes: reader.mistakes, has_more_documents })
}

fn parse_tree(text: &str) -> Result<Node, YamlError> {
    serde_saphyr::from_str_with_options(text, options())
}

/// kubectl reads YAML 1.1, in which the octal number `017` is 15.
fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: MAX_DEPTH },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_ALIAS_EVENTS },
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

/// The text before the second document, if `error` says that there is one.
fn first_document<'a>(text: &'a str, error: &YamlError) -> Option<&'a str> {
    let YamlError::MultipleDocuments { location, .. } = error else { return None };
    let lines = text.split_inclusive('\n').take(usize::try_from(location.line()).ok()?);
    let (mut offset, mut separator) = (0, None);
    for line in lines {
        if line.starts_with("---") {
            separator = Some(offset);
        }
        offset += line.len();
    }
    Some(&text[..separator.filter(|at| *at > 0)?])
}

fn syntax(text: &str, error: &YamlError) -> ContentError {
    let (line, mistake) = describe_yaml_error(text, error);
    ContentError::Value { line, key: String::new(), mistake }
}

/// A YAML node with its position.
struct Node {
    content: Content,
    /// The line of the node or of its alias, from 1.
    line: u64,
    /// The bytes of a plain scalar.
    bytes: std::ops::Range<usize>,
}

enum Content {
    /// A null, boolean or number.
    Scalar(Value),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value: content, referenced, defined } = Spanned::deserialize(deserializer)?;
        let span = defined.span();
        let offset = |at: Option<u64>| at.and_then(|at| usize::try_from(at).ok()).unwrap_or(0);
        let start = offset(span.byte_offset());
        Ok(Self { content, line: referenced.line(), bytes: start..start + offset(span.byte_len()) })
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
        Ok(Content::Scalar(Value::Null))
    }

    fn visit_none<E: de::Error>(self) -> Result<Content, E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Content, E> {
        Ok(Content::Text(value.to_owned()))
    }

    fn visit_bytes<E: de::Error>(self, value: &[u8]) -> Result<Content, E> {
        Ok(Content::Text(String::from_utf8_lossy(value).into_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Content::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
        let mut entries: Vec<(String, Node)> = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, Node>()? {
            match entries.iter_mut().find(|(known, _)| *known == key) {
                Some((_, known)) => *known = value,
                None => entries.push((key, value)),
            }
        }
        Ok(Content::Map(entries))
    }
}

/// The type that `clientcmd/api/v1` gives to a key.
#[derive(Clone, Copy)]
enum Expected {
    Text,
    Boolean,
    /// One of these texts; the empty one counts as absent.
    OneOf(&'static [&'static str]),
    List(&'static Expected),
    /// A map whose keys have any name.
    Values(&'static Expected),
    Object(Keys),
    /// Any value, which is preserved.
    Any,
}

/// The keys of an object. Others are preserved.
type Keys = &'static [(&'static str, Expected)];

/// The keys that are always written. In a file they may be missing.
const ALWAYS_WRITTEN: [&str; 4] = ["name", "value", "extension", "cluster"];

const TEXTS: Expected = Expected::List(&Expected::Text);
const EXTENSIONS: Expected =
    Expected::List(&Expected::Object(&[("name", Expected::Text), ("extension", Expected::Any)]));
const CLUSTER: Keys = &[
    ("server", Expected::Text),
    ("tls-server-name", Expected::Text),
    ("insecure-skip-tls-verify", Expected::Boolean),
    ("certificate-authority", Expected::Text),
    ("certificate-authority-data", Expected::Text),
    ("proxy-url", Expected::Text),
    ("disable-compression", Expected::Boolean),
    ("extensions", EXTENSIONS),
];
const CONTEXT: Keys = &[
    ("cluster", Expected::Text),
    ("user", Expected::Text),
    ("namespace", Expected::Text),
    ("extensions", EXTENSIONS),
];
const EXEC: Expected = Expected::Object(&[
    ("command", Expected::Text),
    ("args", TEXTS),
    (
        "env",
        Expected::List(&Expected::Object(&[("name", Expected::Text), ("value", Expected::Text)])),
    ),
    ("apiVersion", Expected::Text),
    ("installHint", Expected::Text),
    ("provideClusterInfo", Expected::Boolean),
    ("interactiveMode", Expected::OneOf(&["Never", "IfAvailable", "Always"])),
]);
const USER: Keys = &[
    ("client-certificate", Expected::Text),
    ("client-certificate-data", Expected::Text),
    ("client-key", Expected::Text),
    ("client-key-data", Expected::Text),
    ("token", Expected::Text),
    ("tokenFile", Expected::Text),
    ("as", Expected::Text),
    ("as-uid", Expected::Text),
    ("as-groups", TEXTS),
    ("as-user-extra", Expected::Values(&TEXTS)),
    ("username", Expected::Text),
    ("password", Expected::Text),
    (
        "auth-provider",
        Expected::Object(&[
            ("name", Expected::Text),
            ("config", Expected::Values(&Expected::Text)),
        ]),
    ),
    ("exec", EXEC),
    ("extensions", EXTENSIONS),
];
/// The keys of a file besides its lists of entries.
const TOP: Keys = &[
    ("kind", Expected::Text),
    ("apiVersion", Expected::Text),
    ("current-context", Expected::Text),
    ("preferences", Expected::Object(&[("colors", Expected::Boolean), ("extensions", EXTENSIONS)])),
    ("extensions", EXTENSIONS),
];

struct Reader<'a> {
    text: &'a str,
    mistakes: Vec<EntryMistake>,
}

impl Reader<'_> {
    fn config(&mut self, root: &Node) -> Result<Kubeconfig, ContentError> {
        let entries = match &root.content {
            Content::Map(entries) => entries,
            Content::Scalar(Value::Null) => return Ok(Kubeconfig::default()),
            _ => return Err(ContentError::NotMap),
        };
        let mut top = Map::new();
        let (mut clusters, mut users, mut contexts) = (Vec::new(), Vec::new(), Vec::new());
        for (key, node) in entries {
            match key.as_str() {
                "clusters" => clusters = self.entries(node, "clusters", ("cluster", CLUSTER))?,
                "users" => users = self.entries(node, "users", ("user", USER))?,
                "contexts" => contexts = self.entries(node, "contexts", ("context", CONTEXT))?,
                _ => {
                    let expected = expected_of(TOP, key);
                    if let Some(value) = self.value(node, expected, key)? {
                        top.insert(key.clone(), value);
                    }
                }
            }
        }
        let mut config: Kubeconfig = typed(top.into(), root, "")?;
        for entry in clusters {
            let (name, cluster, other) = self.named(entry, "clusters")?;
            config.clusters.push(NamedCluster { name, cluster, other });
        }
        for entry in users {
            let (name, auth_info, other) = self.named(entry, "users")?;
            config.auth_infos.push(NamedAuthInfo { name, auth_info, other });
        }
        for entry in contexts {
            let (name, context, other) = self.named(entry, "contexts")?;
            config.contexts.push(NamedContext { name, context, other });
        }
        Ok(config)
    }

    /// The entries of a list, whose content is below `key`.
    fn entries<'n>(
        &self,
        node: &'n Node,
        list: &'static str,
        (key, keys): (&'static str, Keys),
    ) -> Result<Vec<Entry<'n>>, ContentError> {
        let items = match &node.content {
            Content::List(items) => items.as_slice(),
            Content::Scalar(Value::Null) => &[],
            _ => return Err(mistake(node, list, "expected a list")),
        };
        let entry = |(index, item): (usize, &'n Node)| {
            let path = format!("{list}[{index}]");
            let pairs = match &item.content {
                Content::Map(pairs) => pairs.as_slice(),
                Content::Scalar(Value::Null) => &[],
                _ => return Err(mistake(item, &path, "expected a map of keys")),
            };
            let (mut name, mut other, mut content) = (String::new(), BTreeMap::new(), Ok(None));
            for (found, node) in pairs {
                let path = format!("{path}.{found}");
                if found == key {
                    content = self.value(node, Expected::Object(keys), &path);
                    if content.is_err() {
                        other.insert(found.clone(), any(node));
                    }
                } else if found == "name" {
                    let text = self.value(node, Expected::Text, &path)?;
                    text.as_ref().and_then(Value::as_str).unwrap_or_default().clone_into(&mut name);
                } else {
                    other.insert(found.clone(), any(node));
                }
            }
            Ok(Entry { name, content, other, node: item, path })
        };
        items.iter().enumerate().map(entry).collect()
    }

    /// The name, the content and the other keys of an entry. An entry with a mistake has no content.
    fn named<T: DeserializeOwned>(
        &mut self,
        entry: Entry<'_>,
        list: &'static str,
    ) -> Result<NamedEntry<T>, ContentError> {
        let Entry { name, content, other, node, path } = entry;
        let content = match content {
            Ok(content) => content.map(|content| typed(content, node, &path)).transpose()?,
            Err(error) => {
                self.mistakes.push(EntryMistake { list, name: name.clone(), error });
                None
            }
        };
        Ok((name, content, other))
    }

    /// The value of a node; `None` if it is null and not one of any type.
    fn value(
        &self,
        node: &Node,
        expected: Expected,
        path: &str,
    ) -> Result<Option<Value>, ContentError> {
        let fail = |message: &str| Err(mistake(node, path, message));
        if matches!(expected, Expected::Any) {
            return Ok(Some(any(node)));
        }
        if matches!(node.content, Content::Scalar(Value::Null)) {
            return Ok(None);
        }
        let value = match (expected, &node.content) {
            (Expected::Text, Content::Text(text)) => text.as_str().into(),
            // kubectl refuses a number or boolean here. The text is as in the file: `0x1F` is not 31.
            (Expected::Text, Content::Scalar(value)) => self
                .text
                .get(node.bytes.clone())
                .map_or_else(|| value.to_string().into(), Into::into),
            (Expected::Text, _) => return fail("expected text"),
            (Expected::Boolean, Content::Scalar(Value::Bool(value))) => (*value).into(),
            (Expected::Boolean, Content::Text(text)) if text == "true" || text == "false" => {
                (text == "true").into()
            }
            (Expected::Boolean, _) => return fail("expected true or false"),
            (Expected::OneOf(names), Content::Text(text)) => {
                if text.is_empty() {
                    return Ok(None);
                }
                if !names.contains(&text.as_str()) {
                    return fail(&format!("expected one of {}", names.join(", ")));
                }
                text.as_str().into()
            }
            (Expected::OneOf(names), _) => {
                return fail(&format!("expected one of {}", names.join(", ")));
            }
            (Expected::List(of), Content::List(items)) => {
                let item = |(index, item): (usize, &Node)| {
                    let value = self.value(item, *of, &format!("{path}[{index}]"))?;
                    Ok(value.unwrap_or_else(|| zero(*of)))
                };
                Value::Array(items.iter().enumerate().map(item).collect::<Result<_, _>>()?)
            }
            (Expected::List(_), _) => return fail("expected a list"),
            (Expected::Values(of), Content::Map(pairs)) => {
                let pair = |(key, node): &(String, Node)| {
                    let value = self.value(node, *of, &format!("{path}.{key}"))?;
                    Ok((key.clone(), value.unwrap_or_else(|| zero(*of))))
                };
                Value::Object(pairs.iter().map(pair).collect::<Result<_, _>>()?)
            }
            (Expected::Object(keys), Content::Map(pairs)) => self.object(pairs, keys, path)?,
            (Expected::Values(_) | Expected::Object(_) | Expected::Any, _) => {
                return fail("expected a map of keys");
            }
        };
        Ok(Some(value))
    }

    /// An object without its null values. Adds the missing [`ALWAYS_WRITTEN`] keys.
    fn object(
        &self,
        pairs: &[(String, Node)],
        keys: Keys,
        path: &str,
    ) -> Result<Value, ContentError> {
        let mut object = Map::new();
        for (key, node) in pairs {
            let expected = expected_of(keys, key);
            if let Some(value) = self.value(node, expected, &format!("{path}.{key}"))? {
                object.insert(key.clone(), value);
            }
        }
        for (key, expected) in keys.iter().filter(|(key, _)| ALWAYS_WRITTEN.contains(key)) {
            object.entry(*key).or_insert_with(|| zero(*expected));
        }
        Ok(object.into())
    }
}

/// The name, the content and the other keys of an entry.
type NamedEntry<T> = (String, Option<T>, BTreeMap<String, Value>);

/// An entry of one of the lists.
struct Entry<'n> {
    name: String,
    content: Result<Option<Value>, ContentError>,
    other: BTreeMap<String, Value>,
    node: &'n Node,
    path: String,
}

/// The value of a node of any type.
fn any(node: &Node) -> Value {
    match &node.content {
        Content::Scalar(value) => value.clone(),
        Content::Text(text) => text.as_str().into(),
        Content::List(items) => items.iter().map(any).collect(),
        Content::Map(pairs) => pairs.iter().map(|(key, value)| (key.clone(), any(value))).collect(),
    }
}

fn expected_of(keys: Keys, key: &str) -> Expected {
    keys.iter().find(|(name, _)| *name == key).map_or(Expected::Any, |(_, expected)| *expected)
}

/// The value of Go that stands for a null.
fn zero(expected: Expected) -> Value {
    match expected {
        Expected::Text | Expected::OneOf(_) => "".into(),
        Expected::Boolean => false.into(),
        Expected::List(_) => Value::Array(Vec::new()),
        Expected::Values(_) => Map::new().into(),
        Expected::Object(keys) => {
            let required = keys.iter().filter(|(key, _)| ALWAYS_WRITTEN.contains(key));
            Value::Object(required.map(|(key, of)| ((*key).to_owned(), zero(*of))).collect())
        }
        Expected::Any => Value::Null,
    }
}

fn typed<T: DeserializeOwned>(value: Value, node: &Node, path: &str) -> Result<T, ContentError> {
    serde_json::from_value(value).map_err(|_| mistake(node, path, "a value has a wrong type"))
}

fn mistake(node: &Node, path: &str, message: &str) -> ContentError {
    ContentError::Value { line: node.line, key: path.to_owned(), mistake: message.to_owned() }
}

#[cfg(test)]
mod tests;
