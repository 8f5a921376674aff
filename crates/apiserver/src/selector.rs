//! Label and field selectors of lists and watches.

use crate::status_error::StatusError;
use serde_json::Value;
use std::ops::Range;

/// Label and field selector of a request; the default matches every object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
    /// The range of hashes of the `uid` (KEP-5866); the end is not part of it.
    shard: Option<Range<u128>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
}

impl Selector {
    /// Parses `labelSelector` and `fieldSelector`.
    ///
    /// # Errors
    /// 400 for a requirement that cannot be parsed.
    pub fn parse(labels: &str, fields: &str) -> Result<Self, StatusError> {
        Ok(Self { labels: requirements(labels)?, fields: requirements(fields)?, shard: None })
    }

    /// Adds a `shardSelector`, such as `shardRange(object.metadata.uid, '0x0', '0x8000000000000000')`.
    ///
    /// # Errors
    /// 400 for another selector.
    pub fn in_shard(mut self, text: &str) -> Result<Self, StatusError> {
        if !text.is_empty() {
            let message = || format!("shardSelector: Invalid value: {text:?}");
            self.shard = Some(shard(text).ok_or_else(|| StatusError::bad_request(message()))?);
        }
        Ok(self)
    }

    /// Adds the requirement `metadata.name=name`.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.fields.push(Requirement::In("metadata.name".into(), vec![name.into()]));
        self
    }

    /// Whether the selector matches an object.
    pub fn matches(&self, object: &Value) -> bool {
        let label = |key: &str| object["metadata"]["labels"][key].as_str().map(str::to_owned);
        // An absent field equals the empty string: `spec.nodeName=` matches unscheduled pods.
        let field = |key: &str| {
            let value = key.split('.').fold(object, |at, part| &at[part]);
            Some(match value {
                Value::String(text) => text.clone(),
                Value::Null => String::new(),
                other => other.to_string(),
            })
        };
        let uid = || object["metadata"]["uid"].as_str().unwrap_or_default();
        self.labels.iter().all(|r| r.is_met(label))
            && self.fields.iter().all(|r| r.is_met(field))
            && self.shard.as_ref().is_none_or(|shard| shard.contains(&fnv1a(uid()).into()))
    }
}

fn shard(text: &str) -> Option<Range<u128>> {
    let arguments = text.strip_prefix("shardRange(")?.strip_suffix(')')?;
    let [field, start, end] =
        arguments.split(',').map(str::trim).collect::<Vec<_>>().try_into().ok()?;
    let bound = |text: &str| {
        let hex = text.strip_prefix("'0x")?.strip_suffix('\'')?;
        u128::from_str_radix(hex, 16).ok()
    };
    (field == "object.metadata.uid").then_some(bound(start)?..bound(end)?)
}

/// The hash FNV-1a of 64 bits.
fn fnv1a(text: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

impl Requirement {
    /// Whether an object meets the requirement; `value_of` returns its label or field.
    fn is_met(&self, value_of: impl Fn(&str) -> Option<String>) -> bool {
        match self {
            Self::In(key, values) => value_of(key).is_some_and(|v| values.contains(&v)),
            Self::NotIn(key, values) => value_of(key).is_none_or(|v| !values.contains(&v)),
            Self::Exists(key) => value_of(key).is_some(),
            Self::Missing(key) => value_of(key).is_none(),
        }
    }
}

/// Splits at commas outside parentheses.
fn requirements(text: &str) -> Result<Vec<Requirement>, StatusError> {
    let mut depth = 0;
    text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|term| !term.is_empty())
    .map(|term| {
        let message = || format!("unable to parse requirement: {term:?}");
        requirement(term).ok_or_else(|| StatusError::bad_request(message()))
    })
    .collect()
}

fn requirement(term: &str) -> Option<Requirement> {
    if let Some(list) = term.strip_suffix(')') {
        let (head, list) = list.split_once('(')?;
        let values = list.split(',').map(|v| v.trim().to_owned()).collect();
        let (key, operator) = head.trim().split_once(' ')?;
        return match operator.trim() {
            "in" => Some(Requirement::In(key.into(), values)),
            "notin" => Some(Requirement::NotIn(key.into(), values)),
            _ => None,
        };
    }
    let pair = |key: &str, value: &str| (key.trim().to_owned(), vec![value.trim().to_owned()]);
    if let Some((key, value)) = term.split_once("!=") {
        let (key, values) = pair(key, value);
        return Some(Requirement::NotIn(key, values));
    }
    if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        let (key, values) = pair(key, value);
        return Some(Requirement::In(key, values));
    }
    match term.strip_prefix('!') {
        Some(key) => Some(Requirement::Missing(key.trim().into())),
        None => Some(Requirement::Exists(term.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn selector_matches_labels_and_fields_of_an_object() {
        let pod = json!({
            "metadata": { "name": "a", "labels": { "app": "web", "tier": "front" } },
            "spec": { "nodeName": "n1" },
        });
        for (labels, fields, expected) in [
            ("", "", true),
            ("app=web", "", true),
            ("app==web,tier!=back", "", true),
            ("app in (db, web),!gone", "", true),
            ("app notin (web)", "", false),
            ("gone", "", false),
            ("", "spec.nodeName=n1,metadata.name=a", true),
            ("", "spec.nodeName=", false),
            ("", "metadata.namespace!=kube-system", true),
        ] {
            let selector = Selector::parse(labels, fields).unwrap();
            assert_eq!(selector.matches(&pod), expected, "{labels} {fields}");
        }
        assert!(Selector::parse("a within (b)", "").is_err());
        let in_shard = |range: &str| Selector::default().in_shard(range);
        let uid = json!({ "metadata": { "uid": "a" } }); // its hash is 0xaf63dc4c8601ec8c
        for (start, end, expected) in [
            ("0x0000000000000000", "0x8000000000000000", false),
            ("0x8000000000000000", "0x10000000000000000", true),
            ("0xaf63dc4c8601ec8c", "0xaf63dc4c8601ec8d", true),
            ("0x8000000000000000", "0xaf63dc4c8601ec8c", false),
        ] {
            let range = format!("shardRange(object.metadata.uid, '{start}','{end}')");
            assert_eq!(in_shard(&range).unwrap().matches(&uid), expected, "{range}");
        }
        assert_eq!(in_shard("").unwrap(), Selector::default());
        assert!(in_shard("shardRange(object.metadata.name, '0x0', '0x1')").is_err());
        assert!(in_shard("shardRange(object.metadata.uid, '0x0')").is_err());
        assert!(!Selector::default().named("b").matches(&pod));
    }
}
