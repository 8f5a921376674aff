//! A YAML file as a tree for the `config` crate, or all that is wrong with its form.
//!
//! The tree is built from the parser's events, not by its loader: so a file that would explode
//! (aliases of aliases) or overflow the stack (depth) is refused on the way, and every duplicate
//! key is reported. The schema needs no anchors, tags or several documents, so there are none.

use std::fmt::Write as _;

use config::{Map, Value, ValueKind};
use yaml_rust2::Event;
use yaml_rust2::parser::Parser;
use yaml_rust2::scanner::{ScanError, TScalarStyle};

use super::errors::{join, quote, quote_key};

/// The schema is 6 deep; this only has to stop what would overflow a stack.
const MAX_DEPTH: usize = 32;

/// A tree, and what is wrong with the file beside it.
pub(super) struct Parsed {
    /// The top-level keys; as much of them as could be read.
    pub(super) tree: Map<String, Value>,
    /// (path or line, message) of each mistake of form.
    pub(super) errors: Vec<(String, String)>,
    /// Whether the text could be read to its end: if not, missing keys mean nothing.
    pub(super) complete: bool,
}

/// Parses `text`; every value carries `origin`.
pub(super) fn parse(text: &str, origin: &str) -> Parsed {
    let origin = origin.to_owned();
    let mut builder = Builder { origin: &origin, stack: Vec::new(), root: None, errors: vec![] };
    let complete = builder.run(text);
    let mut errors = builder.errors;
    let tree = match builder.root.map(|root| root.kind) {
        Some(ValueKind::Table(tree)) => tree,
        // A broken document has said so already.
        _ if !complete => Map::new(),
        None => {
            errors.push((String::new(), "the file is empty".to_owned()));
            return Parsed { tree: Map::new(), errors, complete: false };
        }
        Some(_) => {
            let message = "the file must be a map of keys (listeners: …, upstreams: …)";
            errors.push((String::new(), message.to_owned()));
            return Parsed { tree: Map::new(), errors, complete: false };
        }
    };
    Parsed { tree, errors, complete }
}

/// A collection whose end has not come yet.
enum Open {
    Map { entries: Map<String, Value>, key: Option<String>, skip: bool },
    List(Vec<Value>),
}

struct Builder<'a> {
    origin: &'a String,
    stack: Vec<Open>,
    root: Option<Value>,
    errors: Vec<(String, String)>,
}

impl Builder<'_> {
    /// Consumes all events; false if the text is not readable to its end.
    fn run(&mut self, text: &str) -> bool {
        let mut parser = Parser::new_from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
        let mut documents = 0;
        loop {
            let (event, mark) = match parser.next_token() {
                Ok(next) => next,
                Err(error) => {
                    let (line, message) = syntax_error(text, &error);
                    return self.stop(format!("line {line}"), message);
                }
            };
            let line = || format!("line {}", mark.line());
            match event {
                Event::StreamEnd => return true,
                Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
                Event::DocumentStart => {
                    documents += 1;
                    if documents > 1 {
                        return self.stop(line(), "a second YAML document; one is expected");
                    }
                }
                Event::Alias(_) => {
                    return self.stop(line(), "YAML aliases (*name) are not supported");
                }
                Event::Scalar(_, _, _, Some(_))
                | Event::SequenceStart(_, Some(_))
                | Event::MappingStart(_, Some(_)) => {
                    return self.stop(line(), "YAML tags (!name) are not supported");
                }
                Event::SequenceStart(..) | Event::MappingStart(..)
                    if self.stack.len() >= MAX_DEPTH =>
                {
                    return self.stop(line(), format!("nested more than {MAX_DEPTH} deep"));
                }
                Event::SequenceStart(..) | Event::MappingStart(..) if self.awaits_key() => {
                    return self.stop(line(), "a key must be a word, not a list or a map");
                }
                Event::SequenceStart(..) => self.stack.push(Open::List(Vec::new())),
                Event::MappingStart(..) => {
                    self.stack.push(Open::Map { entries: Map::new(), key: None, skip: false });
                }
                Event::SequenceEnd | Event::MappingEnd => match self.stack.pop() {
                    Some(Open::List(items)) => self.put(ValueKind::Array(items)),
                    Some(Open::Map { entries, .. }) => self.put(ValueKind::Table(entries)),
                    None => return self.stop(line(), "not valid YAML: unexpected end of a block"),
                },
                Event::Scalar(text, ..) if self.awaits_key() => self.key(text),
                Event::Scalar(text, TScalarStyle::Plain, ..) => self.put(plain(text)),
                Event::Scalar(text, ..) => self.put(ValueKind::String(text)),
            }
        }
    }

    /// Reports what makes reading on pointless.
    fn stop(&mut self, at: String, message: impl Into<String>) -> bool {
        self.errors.push((at, message.into()));
        false
    }

    fn awaits_key(&self) -> bool {
        matches!(self.stack.last(), Some(Open::Map { key: None, .. }))
    }

    fn key(&mut self, text: String) {
        let path = self.path();
        if let Some(Open::Map { entries, key, skip }) = self.stack.last_mut() {
            *skip = entries.contains_key(&text);
            if *skip {
                let message = format!("the key {} appears twice here", quote(&text));
                self.errors.push((join(&path, &text), message));
            }
            *key = Some(text);
        }
    }

    /// Adds a finished value to what is open; of a duplicate key the first value stays.
    fn put(&mut self, kind: ValueKind) {
        let value = Value::new(Some(self.origin), kind);
        match self.stack.last_mut() {
            None => self.root = Some(value),
            Some(Open::List(items)) => items.push(value),
            Some(Open::Map { entries, key, skip }) => {
                if let (Some(key), false) = (key.take(), *skip) {
                    entries.insert(key, value);
                }
            }
        }
    }

    /// Path of the innermost open collection.
    fn path(&self) -> String {
        let mut path = String::new();
        for open in &self.stack {
            match open {
                Open::Map { key: Some(key), .. } => path = join(&path, key),
                Open::Map { key: None, .. } => {}
                Open::List(items) => {
                    let _ = write!(path, "[{}]", items.len());
                }
            }
        }
        path
    }
}

/// The line and the message of an error of the parser.
///
/// Of a tab in the indentation the parser reports where the value before it begins, which is the
/// line above or one further up; here it is the line with the tab.
pub fn syntax_error(text: &str, error: &ScanError) -> (usize, String) {
    let (reported, info) = (error.marker().line(), error.info());
    let starts_with_tab = |line: &str| {
        let rest = line.trim_start_matches(' ');
        rest.starts_with('\t') && !matches!(rest.trim_start().chars().next(), None | Some('#'))
    };
    let lines = text.lines().zip(1..).skip(reported.saturating_sub(1));
    // After a flow collection or a comment it misses a key instead, on the right line.
    let is_key_missing = info.contains("did not find expected key");
    match lines.filter(|(line, _)| starts_with_tab(line)).map(|(_, number)| number).next() {
        Some(number) if info.contains("tab") || is_key_missing && number == reported => {
            let message = "not valid YAML: a tab in the indentation; indent with spaces";
            (number, message.to_owned())
        }
        _ => (reported, format!("not valid YAML: {info}")),
    }
}

/// A scalar without quotes, by the rules of YAML 1.2 (`off` and `yes` are words).
fn plain(text: String) -> ValueKind {
    match text.as_str() {
        "" | "~" | "null" | "Null" | "NULL" => return ValueKind::Nil,
        "true" | "True" | "TRUE" => return ValueKind::Boolean(true),
        "false" | "False" | "FALSE" => return ValueKind::Boolean(false),
        _ => {}
    }
    let number = text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
    match (number, text.parse::<i64>(), text.parse::<f64>()) {
        (true, Ok(integer), _) => ValueKind::I64(integer),
        (true, _, Ok(float)) => ValueKind::Float(float),
        _ => ValueKind::String(text),
    }
}

/// What a value is, for messages.
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
