//! Reads a YAML file into a tree for the `config` crate, and reports syntax errors and duplicate keys.
//!
//! `serde-saphyr` bounds the depth and counts aliases while it parses, so a hostile file is refused
//! before it becomes a tree. The visitor below sees each entry of a map, so it reports every
//! duplicate key. Aliases, tags and a second document are refused, because the schema needs none.

use std::cell::RefCell;
use std::fmt;

use config::{Map, Value, ValueKind};
use jackstay_core::discovery::address::quote;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::{
    DuplicateKeyPolicy, Error, MergeKeyPolicy, NonFiniteFloatPolicy, Options, Spanned,
};

use super::errors::{KeyLines, join};

/// The schema has 6 levels; the bound protects the stack.
const MAX_DEPTH: usize = 32;

/// A parsed file.
pub(super) struct ParsedYaml {
    /// The top-level keys; `None` if the file cannot be read to its end or is not a map.
    pub(super) tree: Option<Map<String, Value>>,
    pub(super) errors: Vec<YamlMistake>,
    pub(super) lines: KeyLines,
}

/// An error in a file.
pub(super) struct YamlMistake {
    /// The path of the key; empty for a syntax error.
    pub(super) path: String,
    /// `None` for the file as a whole.
    pub(super) line: Option<u64>,
    pub(super) message: String,
}

impl YamlMistake {
    fn of_file(message: &str) -> Self {
        Self { path: String::new(), line: None, message: message.to_owned() }
    }
}

/// What the reader finds beside the values.
#[derive(Default)]
struct Findings {
    duplicates: Vec<YamlMistake>,
    lines: KeyLines,
}

/// Parses `text`; every value carries `origin`.
pub(super) fn parse(text: &str, origin: &str) -> ParsedYaml {
    let origin = origin.to_owned();
    let findings = RefCell::new(Findings::default());
    let reader = ValueReader { origin: &origin, path: String::new(), findings: &findings };
    let root = serde_saphyr::with_deserializer_from_str_with_options(text, options(), |document| {
        reader.deserialize(document)
    });
    let Findings { duplicates: mut errors, lines } = findings.into_inner();
    let is_blank = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
    let tree = match root.map(|root| root.kind) {
        Ok(ValueKind::Table(tree)) => Some(tree),
        Ok(ValueKind::Nil) if text.lines().all(is_blank) => {
            errors.push(YamlMistake::of_file("the file is empty"));
            None
        }
        Ok(_) => {
            let message = "the file must be a map of keys (listeners: …, upstreams: …)";
            errors.push(YamlMistake::of_file(message));
            None
        }
        Err(error) => {
            let (line, message) = match &error {
                // The reader accepts any value, so only a key can have the wrong type.
                Error::Unexpected { location, .. } | Error::NullIntoString { location } => {
                    (location.line(), "a key must be a word, not a list or a map".to_owned())
                }
                other => describe_yaml_error(text, other),
            };
            errors.push(YamlMistake { path: String::new(), line: Some(line), message });
            None
        }
    };
    ParsedYaml { tree, errors, lines }
}

fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: MAX_DEPTH, max_aliases: 0 },
        // Passes each duplicate key to the visitor, except after a key that is a number: then it
        // passes only the last duplicate. Such a key is unknown, so the file is refused anyway.
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        merge_keys: MergeKeyPolicy::AsOrdinary,
        // YAML 1.2: `off` and `yes` are text.
        strict_booleans: true,
        reject_unsupported_tags: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    }
}

/// The line and the message of a YAML error. The message quotes no value of the file, because a
/// value may be a secret.
pub fn describe_yaml_error(text: &str, error: &Error) -> (u64, String) {
    let line = error.location().map_or(1, |location| location.line());
    let message = match error {
        Error::WithSnippet { error, .. } | Error::AliasError { error, .. } => {
            return describe_yaml_error(text, error);
        }
        Error::ExternalMessage { msg, .. } => return describe_syntax_error(text, line, msg),
        Error::Eof { .. } => "not valid YAML: it ends too early".to_owned(),
        Error::MultipleDocuments { .. } => "a second YAML document; one is expected".to_owned(),
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("the key {} appears twice", quote(key))
        }
        Error::DuplicateMappingKey { key: None, .. } => "a key appears twice in one map".to_owned(),
        Error::UnsupportedTag { .. } => "YAML tags (!name) are not supported".to_owned(),
        Error::UnknownAnchor { .. } => "a YAML alias (*name) without its anchor".to_owned(),
        Error::Budget { breach, .. } => match breach {
            BudgetBreach::Depth { depth } => format!("nested more than {} deep", depth - 1),
            // A configuration may have 0 aliases, so its first one exceeds the budget.
            BudgetBreach::Aliases { aliases: 1 } => {
                "YAML aliases (*name) are not supported".to_owned()
            }
            _ => "too large".to_owned(),
        },
        Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => "too many YAML aliases (*name)".to_owned(),
        Error::SerdeMissingField { field, .. } => format!("has no {field}"),
        Error::SerdeUnknownVariant { expected, .. } => {
            format!("expected one of {}", expected.join(", "))
        }
        Error::Unexpected { expected: "mapping start", .. } => "expected a map of keys".to_owned(),
        Error::Unexpected { expected: "sequence start", .. } => "expected a list".to_owned(),
        Error::Unexpected { expected: "string scalar", .. } => "expected text".to_owned(),
        Error::Unexpected { expected, .. } => format!("expected {expected}"),
        Error::NullIntoString { .. } => "expected text, found nothing".to_owned(),
        Error::InvalidScalar { ty, .. } => format!("expected {ty}"),
        Error::SerdeInvalidType { expected, .. } | Error::SerdeInvalidValue { expected, .. } => {
            format!("expected {expected}")
        }
        _ => "not valid YAML".to_owned(),
    };
    (line, message)
}

/// The line and the message of a syntax error that the parser reports as `message` on line
/// `reported`.
///
/// For a tab in the indentation the parser reports the line on which the value before the tab
/// begins. This function finds the line with the tab.
fn describe_syntax_error(text: &str, reported: u64, message: &str) -> (u64, String) {
    let starts_with_tab = |line: &str| {
        let rest = line.trim_start_matches(' ');
        rest.starts_with('\t') && !matches!(rest.trim_start().chars().next(), None | Some('#'))
    };
    let mut lines = text.lines().zip(1..).filter(|(_, number)| *number >= reported);
    // After a flow collection or a comment the parser reports a missing key, on the tab's own line.
    let is_key_missing = message.contains("did not find expected key");
    match lines.find(|(line, _)| starts_with_tab(line)) {
        Some((_, number)) if message.contains("tab") || is_key_missing && number == reported => {
            let message = "not valid YAML: a tab in the indentation; indent with spaces";
            (number, message.to_owned())
        }
        _ => (reported, format!("not valid YAML: {message}")),
    }
}

/// Reads the value at `path` and its descendants.
struct ValueReader<'a> {
    origin: &'a String,
    path: String,
    findings: &'a RefCell<Findings>,
}

impl ValueReader<'_> {
    fn child(&self, path: String) -> Self {
        Self { path, ..*self }
    }

    fn value(&self, kind: ValueKind) -> Value {
        Value::new(Some(self.origin), kind)
    }
}

impl<'de> DeserializeSeed<'de> for ValueReader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueReader<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(self.value(ValueKind::Nil))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(self.value(ValueKind::Boolean(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(self.value(ValueKind::I64(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(self.value(i64::try_from(value).map_or(ValueKind::U64(value), ValueKind::I64)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(self.value(ValueKind::Float(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(self.value(ValueKind::String(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) =
            list.next_element_seed(self.child(format!("{}[{}]", self.path, items.len())))?
        {
            items.push(item);
        }
        Ok(self.value(ValueKind::Array(items)))
    }

    /// Keeps the first value of a duplicate key.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Map::new();
        while let Some(Spanned { value: key, referenced, .. }) =
            map.next_key::<Spanned<String>>()?
        {
            let (path, line) = (join(&self.path, &key), referenced.line());
            {
                let Findings { duplicates, lines } = &mut *self.findings.borrow_mut();
                if entries.is_empty() && self.path.ends_with(']') {
                    lines.add(&self.path, line);
                }
                lines.add(&path, line);
                if entries.contains_key(&key) {
                    let message = format!("the key {} appears twice here", quote(&key));
                    duplicates.push(YamlMistake { path: path.clone(), line: Some(line), message });
                }
            }
            let value = map.next_value_seed(self.child(path))?;
            entries.entry(key).or_insert(value);
        }
        Ok(self.value(ValueKind::Table(entries)))
    }
}
