//! A value of the merged tree with its path, and the readers that turn it into typed values.
//!
//! Every reader reports what is wrong and goes on with a stand-in, so that one pass finds all
//! mistakes; nobody sees a stand-in, since a report with errors never becomes a configuration.

use std::fmt::{Display, Write as _};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use config::{Map, Value, ValueKind};

use super::errors::{ConfigError, join, nearest, quote};
use super::units::{format_duration, format_size, parse_duration, parse_size};
use super::yaml::describe;

/// Origin of values from environment variables, and the `file` of errors about them.
pub(super) const ENVIRONMENT: &str = "environment";
/// The same for flags.
pub(super) const COMMAND_LINE: &str = "command line";
/// Origin of built-in defaults.
pub(super) const DEFAULT: &str = "default";
/// What every variable of ours starts with.
pub(super) const PREFIX: &str = "JACKSTAY__";

/// What one pass over a configuration found.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// The configuration file.
    pub(super) file: String,
    pub(super) errors: Vec<ConfigError>,
    pub(super) warnings: Vec<String>,
    /// Paths of the keys that were looked for and left to their defaults.
    pub(super) defaulted: Vec<String>,
}

impl Report {
    /// An error at a path of the file.
    pub(super) fn error(&mut self, path: &str, message: impl Into<String>) {
        let (file, path) = (self.file.clone(), path.to_owned());
        self.errors.push(ConfigError { file, path, message: message.into() });
    }

    /// A remark about a path of the file.
    pub(super) fn warn(&mut self, path: &str, message: impl Display) {
        self.warnings.push(format!("{}: {path}: {message}", self.file));
    }

    /// An error about a key that nobody knows.
    pub(super) fn unknown(&mut self, path: &str, key: &str, known: &[&str]) {
        let mut message = format!("unknown key {}", quote(key));
        if let Some(near) = nearest(key, known) {
            let _ = write!(message, "; did you mean {near}?");
        }
        self.error(&join(path, key), message);
    }
}

/// One place of the tree; there may be no value.
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

    /// What is there; a null is nothing.
    fn kind(&self) -> Option<&'a ValueKind> {
        self.value.map(|value| &value.kind).filter(|kind| **kind != ValueKind::Nil)
    }

    /// Whether the user said anything here.
    pub(super) fn is_given(&self) -> bool {
        self.kind().is_some()
    }

    fn origin(&self) -> Option<&'a str> {
        self.value.and_then(Value::origin)
    }

    /// Reports an error here, in the words of the layer the value came from.
    pub(super) fn error(&self, report: &mut Report, message: impl Into<String>) {
        let message = message.into();
        let (file, path) = match self.origin() {
            Some(ENVIRONMENT) => {
                let name = format!("{PREFIX}{}", self.path.replace('.', "__").to_uppercase());
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

    /// A text as `parse` understands it; `None` if there is none or it is wrong (and reported).
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

    /// A file or directory, where an empty text means none.
    pub(super) fn file(&self, report: &mut Report) -> Option<PathBuf> {
        let path = self.parse(report, "text: a path", path_of)?;
        Some(path).filter(|path| !path.as_os_str().is_empty())
    }

    /// A file that must be named.
    pub(super) fn required_file(&self, report: &mut Report) -> Option<PathBuf> {
        self.require(report, "text: the path of a file", |text| match text {
            "" => Err("is required: the path of a file".to_owned()),
            text => path_of(text),
        })
    }

    /// One of some words.
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

    /// A whole number that may be something else as well, which `wanted` says.
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
            // Variables and flags have no types.
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

    /// A duration within bounds.
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

    /// A size in bytes within bounds.
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

    /// A number with a unit; a bare number gets the reader's own complaint.
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

    /// A switch.
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

    /// The fields of a map; reports it if this is something else.
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

/// The keys of one map: those asked for are known, whatever is left is a mistake.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    map: Option<&'a Map<String, Value>>,
    /// Something that is no map is here: it has been reported, and missing keys mean nothing.
    pub(super) broken: bool,
    path: String,
    asked: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The value of a key, which is thereby part of the schema.
    pub(super) fn get(&mut self, report: &mut Report, key: &'static str) -> Node<'a> {
        self.asked.push(key);
        let node =
            Node { value: self.map.and_then(|map| map.get(key)), path: join(&self.path, key) };
        if node.value.is_none() || node.origin() == Some(DEFAULT) {
            report.defaulted.push(node.path.clone());
        }
        node
    }

    /// A key that has no meaning here: reports that it is given, in the words of `why`.
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

    /// Reports the keys nobody asked for.
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
