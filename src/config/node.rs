//! The readers that turn a value of the merged tree into a typed value.
//!
//! Each reader reports a wrong value and continues with a stand-in, so one pass finds all mistakes.
//! A stand-in never reaches the caller: a report with errors does not become a configuration.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use config::{Map, Value, ValueKind};

use super::cert_paths::CertPaths;
use super::errors::{ConfigError, join, quote, quote_key};
use super::report::{COMMAND_LINE, DEFAULT, ENV_PREFIX, ENVIRONMENT, Located, Report};
use super::units::{format_duration, format_size, parse_duration, parse_size};

/// A key path of the tree, with its value if there is one.
#[derive(Debug, Clone)]
pub(super) struct Node<'a> {
    value: Option<&'a Value>,
    pub(super) path: String,
}

impl<'a> Node<'a> {
    /// The root of a tree.
    pub(super) fn root(value: &'a Value) -> Self {
        Self { value: Some(value), path: String::new() }
    }

    /// The value; `None` for a missing one and for null.
    fn kind(&self) -> Option<&'a ValueKind> {
        self.value.map(|value| &value.kind).filter(|kind| **kind != ValueKind::Nil)
    }

    /// Whether the configuration sets this key.
    pub(super) fn is_given(&self) -> bool {
        self.kind().is_some()
    }

    fn origin(&self) -> Option<&'a str> {
        self.value.and_then(Value::origin)
    }

    /// Reports an error about this key, named as in the layer that the value comes from.
    pub(super) fn error(&self, report: &mut Report, message: impl Into<String>) {
        let message = message.into();
        let (file, path) = match self.origin() {
            Some(ENVIRONMENT) => {
                let name = format!("{ENV_PREFIX}{}", self.path.replace('.', "__").to_uppercase());
                (ENVIRONMENT.to_owned(), name)
            }
            Some(COMMAND_LINE) => (COMMAND_LINE.to_owned(), self.path.clone()),
            _ => (report.file.clone(), self.path.clone()),
        };
        report.errors.push(ConfigError { file, path, message });
    }

    fn mismatch<T>(&self, report: &mut Report, wanted: &str, found: &ValueKind) -> Option<T> {
        let quotes = match found {
            ValueKind::I64(_) | ValueKind::Float(_) | ValueKind::Boolean(_)
                if wanted.starts_with("text") =>
            {
                " (write it in quotes)"
            }
            _ => "",
        };
        self.error(report, format!("expected {wanted}, found {}{quotes}", describe(found)));
        None
    }

    /// A text that `parse` reads; `None` if there is none, or if it is wrong and reported.
    pub(super) fn parse<T>(
        &self,
        report: &mut Report,
        wanted: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        match self.kind()? {
            ValueKind::String(text) => {
                parse(text).map_err(|message| self.error(report, message)).ok()
            }
            other => self.mismatch(report, wanted, other),
        }
    }

    /// Like [`Node::parse`], and reports that a value is missing.
    pub(super) fn require<T>(
        &self,
        report: &mut Report,
        wanted: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        if !self.is_given() {
            let wanted = wanted.trim_start_matches("text: ");
            self.error(report, format!("is required: {wanted}"));
        }
        self.parse(report, wanted, parse)
    }

    /// The path of a file or directory; an empty text means none.
    pub(super) fn file(&self, report: &mut Report) -> Option<PathBuf> {
        let path = self.parse(report, "text: a path", path_of)?;
        Some(path).filter(|path| !path.as_os_str().is_empty())
    }

    /// The path of a file that must be set.
    pub(super) fn required_file(&self, report: &mut Report) -> Option<PathBuf> {
        self.require(report, "text: the path of a file", |text| match text {
            "" => Err("is required: the path of a file".to_owned()),
            text => path_of(text),
        })
    }

    /// One of `words`.
    pub(super) fn word<T: Copy>(&self, report: &mut Report, words: &[(&str, T)], default: T) -> T {
        let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let wanted = format!("text: one of {}", all.join(", "));
        let found = self.parse(report, &wanted, |text| {
            let word = words.iter().find(|(word, _)| *word == text);
            word.map(|(_, value)| *value)
                .ok_or_else(|| format!("{} is not one of {}", quote(text), all.join(", ")))
        });
        found.unwrap_or(default)
    }

    /// A whole number.
    pub(super) fn number(
        &self,
        report: &mut Report,
        default: u32,
        range: RangeInclusive<u32>,
    ) -> u32 {
        self.number_as(report, "a whole number", default, range)
    }

    /// A whole number; `wanted` describes it in messages.
    pub(super) fn number_as(
        &self,
        report: &mut Report,
        wanted: &str,
        default: u32,
        range: RangeInclusive<u32>,
    ) -> u32 {
        let number = match self.kind() {
            None => return default,
            Some(ValueKind::I64(number)) => Some(*number),
            // Values of variables and flags are always text.
            Some(ValueKind::String(text)) if self.origin() != Some(report.file.as_str()) => {
                let number = text.parse().ok();
                if number.is_none() {
                    self.error(report, format!("{} is not {wanted}", quote(text)));
                }
                number
            }
            Some(other) => self.mismatch(report, wanted, other),
        };
        let Some(number) = number else { return default };
        let (low, high) = range.into_inner();
        let Some(number) = u32::try_from(number).ok().filter(|n| (low..=high).contains(n)) else {
            self.error(report, format!("{number} is out of range: {low} to {high}"));
            return default;
        };
        number
    }

    /// A duration within `range`.
    pub(super) fn duration(
        &self,
        report: &mut Report,
        default: Duration,
        range: RangeInclusive<Duration>,
    ) -> Duration {
        let read = |text: &str| {
            let duration = parse_duration(text)?;
            if range.contains(&duration) {
                return Ok(duration);
            }
            let (low, high) = (format_duration(*range.start()), format_duration(*range.end()));
            Err(format!("{text} is out of range: {low} to {high}"))
        };
        self.quantity(report, "a duration such as 250ms, 2s or 1h", read).unwrap_or(default)
    }

    /// A size in bytes within `range`.
    pub(super) fn size(
        &self,
        report: &mut Report,
        default: u32,
        range: RangeInclusive<u32>,
    ) -> u32 {
        let read = |text: &str| {
            let size = parse_size(text)?;
            if let Some(size) = u32::try_from(size).ok().filter(|size| range.contains(size)) {
                return Ok(size);
            }
            let (low, high) = (*range.start(), *range.end());
            let (low, high) = (format_size(low.into()), format_size(high.into()));
            Err(format!("{text} is out of range: {low} to {high}"))
        };
        self.quantity(report, "a size such as 64KiB", read).unwrap_or(default)
    }

    /// A number with a unit. `read` also gets a number without one, and says that its unit is
    /// missing.
    fn quantity<T>(
        &self,
        report: &mut Report,
        wanted: &str,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        match self.kind()? {
            ValueKind::I64(number) => {
                read(&number.to_string()).map_err(|message| self.error(report, message)).ok()
            }
            _ => self.parse(report, wanted, read),
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, report: &mut Report, default: bool) -> bool {
        match self.kind() {
            None => default,
            Some(ValueKind::Boolean(value)) => *value,
            Some(other) => self.mismatch(report, "true or false", other).unwrap_or(default),
        }
    }

    /// The items of a list; none if there is no list.
    pub(super) fn items(&self, report: &mut Report) -> Vec<Node<'a>> {
        match self.kind() {
            None => Vec::new(),
            Some(ValueKind::Array(items)) => {
                let item =
                    |(i, value)| Node { value: Some(value), path: format!("{}[{i}]", self.path) };
                items.iter().enumerate().map(item).collect()
            }
            Some(other) => {
                self.mismatch::<()>(report, "a list", other);
                Vec::new()
            }
        }
    }

    /// The items of a list that must not be empty; `what` describes them in the message.
    pub(super) fn required_items(&self, report: &mut Report, what: &str) -> Vec<Node<'a>> {
        let before = report.errors.len();
        let items = self.items(report);
        if items.is_empty() && report.errors.len() == before {
            self.error(report, format!("is required: {what}"));
        }
        items
    }

    /// The fields of a map; reports any other value.
    pub(super) fn fields(&self, report: &mut Report) -> Fields<'a> {
        let map = match self.kind() {
            Some(ValueKind::Table(map)) => Some(map),
            None => None,
            Some(other) => self.mismatch(report, "a map of keys", other),
        };
        let broken = map.is_none() && self.is_given();
        Fields { map, broken, path: self.path.clone(), asked: Vec::new() }
    }
}

/// The keys of one map. A key that a reader asks for is in the schema; the others are unknown.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    map: Option<&'a Map<String, Value>>,
    /// The value is reported as not a map, so that its keys are not reported as missing.
    pub(super) broken: bool,
    path: String,
    asked: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The value of a key of the schema.
    pub(super) fn get(&mut self, report: &mut Report, key: &'static str) -> Node<'a> {
        self.asked.push(key);
        let node =
            Node { value: self.map.and_then(|map| map.get(key)), path: join(&self.path, key) };
        if node.value.is_none() || node.origin() == Some(DEFAULT) {
            report.defaulted.push(node.path.clone());
        }
        node
    }

    /// Reports a key that has no meaning here with the message `why`, if it is set.
    pub(super) fn foreign(&mut self, report: &mut Report, key: &'static str, why: &str) {
        self.asked.push(key);
        let node =
            Node { value: self.map.and_then(|map| map.get(key)), path: join(&self.path, key) };
        if node.is_given() {
            node.error(report, why);
        }
    }

    /// The map below a key.
    pub(super) fn section(&mut self, report: &mut Report, key: &'static str) -> Fields<'a> {
        let node = self.get(report, key);
        let mut fields = node.fields(report);
        fields.broken |= self.broken;
        fields
    }

    /// The items of a list that must not be empty; none if this is not a map.
    pub(super) fn required_items(
        &mut self,
        report: &mut Report,
        key: &'static str,
        what: &str,
    ) -> Vec<Node<'a>> {
        let list = self.get(report, key);
        if self.broken { Vec::new() } else { list.required_items(report, what) }
    }

    /// An optional certificate with its key, and the node of `cert_file`.
    pub(super) fn cert_pair(&mut self, report: &mut Report) -> (Node<'a>, Option<CertPaths>) {
        let (cert, key) = (self.get(report, "cert_file"), self.get(report, "key_file"));
        let paths = match (cert.file(report), key.file(report)) {
            (Some(cert_file), Some(key_file)) => Some(CertPaths { cert_file, key_file }),
            (Some(_), None) => {
                key.error(report, "is required beside cert_file");
                None
            }
            (None, Some(_)) => {
                cert.error(report, "is required beside key_file");
                None
            }
            (None, None) => None,
        };
        (cert, paths)
    }

    /// A required name that can be a metric label, by the rule for a Kubernetes object (RFC 1123).
    /// Adds it to `names`.
    pub(super) fn name(&mut self, report: &mut Report, names: &mut Vec<Located<String>>) -> String {
        let node = self.get(report, "name");
        if self.broken {
            return String::new();
        }
        let name = node.require(report, "text: a name of its own", |text| {
            let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
            let bytes = text.as_bytes();
            let ends =
                bytes.first().is_some_and(alphanumeric) && bytes.last().is_some_and(alphanumeric);
            if ends && bytes.len() <= 63 && bytes.iter().all(|b| alphanumeric(b) || *b == b'-') {
                return Ok(text.to_owned());
            }
            Err(format!(
                "{} is not a name: up to 63 of a-z, 0-9 and -, not starting or ending with -",
                quote(text)
            ))
        });
        names.extend(name.clone().map(|name| (node.path, name)));
        name.unwrap_or_default()
    }

    /// Reports the unknown keys.
    pub(super) fn finish(self, report: &mut Report) {
        let mut unknown: Vec<&String> =
            self.map.map(|map| map.keys().collect()).unwrap_or_default();
        unknown.retain(|key| !self.asked.contains(&key.as_str()));
        unknown.sort();
        for key in unknown {
            report.unknown(&self.path, key, &self.asked);
        }
    }
}

fn path_of(text: &str) -> Result<PathBuf, String> {
    if text.contains('\0') {
        return Err(format!("{} cannot be a path", quote(text)));
    }
    Ok(PathBuf::from(text))
}

/// The kind of a value, for messages.
pub(super) fn describe(kind: &ValueKind) -> String {
    match kind {
        ValueKind::Nil => "nothing".to_owned(),
        ValueKind::Boolean(value) => format!("the truth value {value}"),
        ValueKind::I64(value) => format!("the number {value}"),
        ValueKind::Float(value) => format!("the number {value}"),
        ValueKind::String(value) => format!("the text {}", quote(value)),
        ValueKind::Table(map) => match map.keys().min() {
            Some(key) => format!("a map ({}: …)", quote_key(key)),
            None => "an empty map".to_owned(),
        },
        ValueKind::Array(_) => "a list".to_owned(),
        ValueKind::I128(_) | ValueKind::U64(_) | ValueKind::U128(_) => "a number".to_owned(),
    }
}
