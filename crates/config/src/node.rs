//! The readers that turn a value of the merged tree into a typed value.
//!
//! Each reader reports an invalid value and continues with a placeholder, so one pass finds all
//! mistakes. A report with errors does not become a valid configuration, so no placeholder is used.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use config::{Map, Value, ValueKind};
use jackstay_core::discovery::address::quote;

use super::errors::{ConfigError, join, quote_key};
use super::listener::CertPaths;
use super::model::MemoryLimit;
use super::report::{COMMAND_LINE, DEFAULT, ENV_PREFIX, ENVIRONMENT, Located, Report};
use super::units::{
    OutOfRange, Percent, UnitError, format_duration, format_size, parse_duration, parse_percent,
    parse_size,
};
use super::value_error::ValueError;

/// A key of the tree, with its value if it has one.
#[derive(Debug, Clone)]
pub(super) struct Node<'a> {
    value: Option<&'a Value>,
    pub(super) path: String,
    /// An ancestor of this key is not a map. That is reported, so this key is not reported as missing.
    is_orphan: bool,
    report: &'a Report,
}

impl<'a> Node<'a> {
    /// The root of a tree, whose mistakes are added to `report`.
    pub(super) fn root(value: &'a Value, report: &'a Report) -> Self {
        Self { value: Some(value), path: String::new(), is_orphan: false, report }
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
    pub(super) fn error(&self, message: impl Into<String>) {
        self.report.add(self.config_error(message));
    }

    /// Reports a warning about this key.
    pub(super) fn warn(&self, message: impl Into<String>) {
        self.report.add_warning(self.config_error(message));
    }

    fn config_error(&self, message: impl Into<String>) -> ConfigError {
        let (file, path) = match self.origin() {
            Some(ENVIRONMENT) => {
                let name = format!("{ENV_PREFIX}{}", self.path.replace('.', "__").to_uppercase());
                (ENVIRONMENT, name)
            }
            Some(COMMAND_LINE) => (COMMAND_LINE, self.path.clone()),
            _ => (&*self.report.file, self.path.clone()),
        };
        ConfigError::new(file, &path, message)
    }

    fn mismatch<T>(&self, wanted: &str, found: &ValueKind) -> Option<T> {
        let quotes = match found {
            ValueKind::I64(_) | ValueKind::Float(_) | ValueKind::Boolean(_)
                if wanted.starts_with("text") =>
            {
                " (write it in quotes)"
            }
            _ => "",
        };
        self.error(format!("expected {wanted}, found {}{quotes}", describe(found)));
        None
    }

    /// The value of a result, or `None` after reporting its error.
    fn valid<T, E: Display>(&self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.error(error.to_string())).ok()
    }

    /// The text, if the value is a text. Reports no error.
    pub(super) fn text(&self) -> Option<&'a str> {
        match self.kind()? {
            ValueKind::String(text) => Some(text),
            _ => None,
        }
    }

    /// A text that `parse` reads; `None` if it is missing, or invalid and reported.
    pub(super) fn parse<T, E: Display>(
        &self,
        wanted: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        match self.kind()? {
            ValueKind::String(text) => self.valid(parse(text)),
            other => self.mismatch(wanted, other),
        }
    }

    /// Like [`Node::parse`], and reports a missing value.
    pub(super) fn require<T, E: Display>(
        &self,
        wanted: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        if !self.is_given() && !self.is_orphan {
            self.error(format!("is required: {}", wanted.trim_start_matches("text: ")));
        }
        self.parse(wanted, parse)
    }

    /// The path of a file or directory; `None` for an empty text.
    pub(super) fn file(&self) -> Option<PathBuf> {
        let path = self.parse("text: a path", path_of)?;
        Some(path).filter(|path| !path.as_os_str().is_empty())
    }

    /// The path of a file that must be set.
    pub(super) fn required_file(&self) -> Option<PathBuf> {
        self.require("text: the path of a file", |text| match text {
            "" => Err(ValueError::NoFile),
            text => path_of(text),
        })
    }

    /// One of the names of `T`.
    pub(super) fn one_of<T: ValueEnum>(&self, default: T) -> T {
        let names = T::value_variants().iter().filter_map(T::to_possible_value);
        let all = names.map(|name| name.get_name().to_owned()).collect::<Vec<_>>().join(", ");
        let value = self.parse(&format!("text: one of {all}"), |text| {
            T::from_str(text, false).map_err(|_| ValueError::not(text, format!("one of {all}")))
        });
        value.unwrap_or(default)
    }

    /// A whole number.
    pub(super) fn number(&self, default: u32, range: RangeInclusive<u32>) -> u32 {
        self.number_as("a whole number", default, range)
    }

    /// A whole number; `wanted` describes it in messages.
    pub(super) fn number_as(&self, wanted: &str, default: u32, range: RangeInclusive<u32>) -> u32 {
        let number = match self.kind() {
            None => return default,
            Some(ValueKind::I64(number)) => Some(*number),
            // Values of variables and flags are always text.
            Some(ValueKind::String(text)) if self.origin() != Some(&self.report.file) => {
                self.valid(text.parse().map_err(|_| ValueError::not(text, wanted.to_owned())))
            }
            Some(other) => self.mismatch(wanted, other),
        };
        let Some(number) = number else { return default };
        let range = i64::from(*range.start())..=i64::from(*range.end());
        let number = within(range, number, &number.to_string(), i64::to_string);
        self.valid(number).map_or(default, |number| number as u32)
    }

    /// A duration within `range`.
    pub(super) fn duration(&self, default: Duration, range: RangeInclusive<Duration>) -> Duration {
        let read = |text: &str| {
            let duration = parse_duration(text)?;
            Ok::<_, UnitError>(within(range, duration, text, |limit| format_duration(*limit))?)
        };
        self.quantity("a duration such as 250ms, 2s or 1h", read).unwrap_or(default)
    }

    /// A size in bytes within `range`.
    pub(super) fn size(&self, default: u32, range: RangeInclusive<u32>) -> u32 {
        let range = u64::from(*range.start())..=u64::from(*range.end());
        let read = |text: &str| {
            let size = parse_size(text)?;
            Ok::<_, UnitError>(within(range, size, text, |limit| format_size(*limit))?)
        };
        self.quantity("a size such as 64KiB", read).map_or(default, |size| size as u32)
    }

    /// A size in bytes within `range`, or `auto`.
    pub(super) fn memory_limit(&self, range: RangeInclusive<u64>) -> MemoryLimit {
        let read = |text: &str| {
            if text == "auto" {
                return Ok(MemoryLimit::Auto);
            }
            let size = within(range, parse_size(text)?, text, |limit| format_size(*limit))?;
            Ok::<_, UnitError>(MemoryLimit::Bytes(size))
        };
        self.quantity("a size such as 128MiB, or auto", read).unwrap_or(MemoryLimit::Auto)
    }

    /// A share such as `10%`.
    pub(super) fn percent(&self, default: Percent) -> Percent {
        self.quantity("a share such as 10%", parse_percent).unwrap_or(default)
    }

    /// A text with a unit. `read` also gets a number without a unit, for which it returns an error.
    fn quantity<T>(
        &self,
        wanted: &str,
        read: impl FnOnce(&str) -> Result<T, UnitError>,
    ) -> Option<T> {
        match self.kind()? {
            ValueKind::I64(number) => self.valid(read(&number.to_string())),
            _ => self.parse(wanted, read),
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, default: bool) -> bool {
        match self.kind() {
            None => default,
            Some(ValueKind::Boolean(value)) => *value,
            // The value of an environment variable.
            Some(ValueKind::String(text)) if text == "true" => true,
            Some(ValueKind::String(text)) if text == "false" => false,
            Some(other) => self.mismatch("true or false", other).unwrap_or(default),
        }
    }

    /// The items of a list; empty if the value is no list.
    pub(super) fn items(&self) -> Vec<Node<'a>> {
        let items = match self.kind() {
            None => None,
            Some(ValueKind::Array(items)) => Some(items),
            Some(other) => self.mismatch("a list", other),
        };
        let path = |i| format!("{}[{i}]", self.path);
        let items = items.into_iter().flatten().enumerate();
        items.map(|(i, value)| Node { value: Some(value), path: path(i), ..*self }).collect()
    }

    /// The fields of a map. Reports a value that is no map.
    pub(super) fn fields(&self) -> Fields<'a> {
        let map = match self.kind() {
            Some(ValueKind::Table(map)) => Some(map),
            None => None,
            Some(other) => self.mismatch("a map of keys", other),
        };
        let is_malformed = self.is_orphan || map.is_none() && self.is_given();
        let (path, report) = (self.path.clone(), self.report);
        Fields { map, is_malformed, path, known_keys: Vec::new(), report }
    }
}

/// The keys of one map. A key that a reader asks for is in the schema; the others are unknown.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    map: Option<&'a Map<String, Value>>,
    /// Whether the value or an ancestor is not a map.
    pub(super) is_malformed: bool,
    path: String,
    known_keys: Vec<&'static str>,
    report: &'a Report,
}

impl<'a> Fields<'a> {
    fn node(&mut self, key: &'static str) -> Node<'a> {
        self.known_keys.push(key);
        let value = self.map.and_then(|map| map.get(key));
        let path = join(&self.path, key);
        Node { value, path, is_orphan: self.is_malformed, report: self.report }
    }

    /// The value of a key of the schema.
    pub(super) fn get(&mut self, key: &'static str) -> Node<'a> {
        let node = self.node(key);
        if node.value.is_none() || node.origin() == Some(DEFAULT) {
            self.report.defaulted.borrow_mut().push(node.path.clone());
        }
        node
    }

    /// Whether a key is set. The schema knows it then.
    pub(super) fn has(&mut self, key: &'static str) -> bool {
        self.node(key).is_given()
    }

    /// Reports the error `why` if this key is set, which the mode of the listener does not have or which was removed.
    pub(super) fn refuse(&mut self, key: &'static str, why: &str) {
        let node = self.node(key);
        if node.is_given() {
            node.error(why);
        }
    }

    /// The fields of the map at a key.
    pub(super) fn section(&mut self, key: &'static str) -> Fields<'a> {
        self.get(key).fields()
    }

    /// The items of a list that must not be empty. `content` describes them in the error.
    pub(super) fn required_items(&mut self, key: &'static str, content: &str) -> Vec<Node<'a>> {
        let list = self.get(key);
        let errors_before = self.report.error_count();
        let items = list.items();
        if items.is_empty() && !list.is_orphan && self.report.error_count() == errors_before {
            list.error(format!("is required: {content}"));
        }
        items
    }

    /// An optional certificate with its key, and the node of `cert_file`.
    pub(super) fn cert_pair(&mut self) -> (Node<'a>, Option<CertPaths>) {
        let (cert, key) = (self.get("cert_file"), self.get("key_file"));
        let (cert_file, key_file) = (cert.file(), key.file());
        match (&cert_file, &key_file) {
            (Some(_), None) => key.error("is required beside cert_file"),
            (None, Some(_)) => cert.error("is required beside key_file"),
            _ => {}
        }
        let paths = cert_file.zip(key_file);
        (cert, paths.map(|(cert_file, key_file)| CertPaths { cert_file, key_file }))
    }

    /// A required name that can be a metric label, by the rule for a Kubernetes object (RFC 1123).
    /// Adds it to `names`.
    pub(super) fn name(&mut self, names: &mut Vec<Located<String>>) -> String {
        let node = self.get("name");
        let name = node.require("text: a unique name", |text| {
            let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            let dash_at_end = text.starts_with('-') || text.ends_with('-');
            if (1..=63).contains(&text.len()) && text.chars().all(allowed) && !dash_at_end {
                return Ok(text.to_owned());
            }
            let expected = "a name: up to 63 of a-z, 0-9 and -, not starting or ending with -";
            Err(ValueError::not(text, expected))
        });
        names.extend(name.clone().map(|name| (node.path, name)));
        name.unwrap_or_default()
    }

    /// Reports the unknown keys.
    pub(super) fn finish(self) {
        let keys = self.map.into_iter().flat_map(Map::keys);
        let mut unknown: Vec<_> =
            keys.filter(|key| !self.known_keys.contains(&key.as_str())).collect();
        unknown.sort();
        for key in unknown {
            self.report.unknown(&self.path, key, &self.known_keys);
        }
    }
}

/// The value if it is within `range`. The error contains `text`, the value as written, and the limits
/// as `format` writes them.
fn within<T: PartialOrd>(
    range: RangeInclusive<T>,
    value: T,
    text: &str,
    format: impl Fn(&T) -> String,
) -> Result<T, OutOfRange> {
    if range.contains(&value) {
        return Ok(value);
    }
    let (low, high) = (format(range.start()), format(range.end()));
    Err(OutOfRange { text: text.to_owned(), low, high })
}

fn path_of(text: &str) -> Result<PathBuf, ValueError> {
    if text.contains('\0') {
        return Err(ValueError::NulInPath(text.to_owned()));
    }
    Ok(PathBuf::from(text))
}

/// Describes a value for messages.
pub(super) fn describe(kind: &ValueKind) -> String {
    match kind {
        ValueKind::Nil => "nothing".to_owned(),
        ValueKind::Boolean(value) => value.to_string(),
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
