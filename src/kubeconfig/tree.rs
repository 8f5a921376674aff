//! A kubeconfig as a tree that keeps what it does not know: read from YAML or JSON, written as YAML.
//!
//! Scalars are kept as they were written, quoted or plain, because their type is the reader's
//! business: `017` is text to one YAML library and 15 to another, and what we do not touch must
//! mean the same to kubectl afterwards. Comments and the layout are lost, as with `kubectl config`.

use std::fmt::Write as _;

use yaml_rust2::Event;
use yaml_rust2::parser::{Parser, Tag};
use yaml_rust2::scanner::TScalarStyle;

use crate::config::syntax_error;

/// Deepest nesting read: extensions may hold anything, a stack may not.
const MAX_DEPTH: usize = 64;

/// Most nodes of a tree, aliases resolved: stops aliases of aliases.
const MAX_NODES: usize = 200_000;

/// A value of a YAML document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A scalar without quotes: its type depends on its text.
    Plain(String),
    /// A quoted scalar: text, whatever it looks like.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in its order.
    Map(Vec<(String, Node)>),
}

impl Node {
    /// An empty mapping.
    pub fn map() -> Self {
        Self::Map(Vec::new())
    }

    /// A text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// The value of a key, if this is a mapping that has it.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match self {
            Self::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        match self {
            Self::Map(entries) => entries.iter_mut().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The value of a key as text; `None` for nothing, null and the empty text.
    pub fn str(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Node::as_str)
    }

    /// Whether a key holds `true`.
    pub fn is_true(&self, key: &str) -> bool {
        matches!(self.get(key), Some(Self::Plain(text)) if text.eq_ignore_ascii_case("true"))
    }

    /// This scalar as text; `None` for null and the empty text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Plain(text) if !is_null(text) => Some(text),
            Self::Text(text) if !text.is_empty() => Some(text),
            _ => None,
        }
    }

    /// The items of a list; none for anything else.
    pub fn items(&self, key: &str) -> &[Node] {
        match self.get(key) {
            Some(Self::List(items)) => items,
            _ => &[],
        }
    }

    /// The same, to change them.
    pub fn items_mut(&mut self, key: &str) -> &mut [Node] {
        match self.get_mut(key) {
            Some(Self::List(items)) => items,
            _ => &mut [],
        }
    }

    /// Sets a key of a mapping, in its place if it is there.
    pub fn set(&mut self, key: &str, value: Node) {
        if let Some(old) = self.get_mut(key) {
            *old = value;
        } else if let Self::Map(entries) = self {
            entries.push((key.to_owned(), value));
        }
    }

    /// Removes a key of a mapping and returns what was there.
    pub fn remove(&mut self, key: &str) -> Option<Node> {
        match self {
            Self::Map(entries) => {
                let at = entries.iter().position(|(k, _)| k == key)?;
                Some(entries.remove(at).1)
            }
            _ => None,
        }
    }

    /// Whether nothing is here: null, or an empty collection.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Plain(text) => is_null(text),
            Self::Text(_) => false,
            Self::List(items) => items.is_empty(),
            Self::Map(entries) => entries.is_empty(),
        }
    }
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

/// Reads one document; `None` for an empty file.
///
/// # Errors
/// What is wrong, with its line.
pub fn parse(text: &str) -> Result<Option<Node>, String> {
    let mut builder = Builder::default();
    let mut parser = Parser::new_from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut documents = 0;
    loop {
        let (event, mark) = parser.next_token().map_err(|error| {
            let (line, message) = syntax_error(text, &error);
            format!("line {line}: {message}")
        })?;
        let at = |message: &str| format!("line {}: {message}", mark.line());
        if let Event::SequenceStart(..) | Event::MappingStart(..) = event
            && builder.stack.len() >= MAX_DEPTH
        {
            return Err(at("nested too deep for a kubeconfig"));
        }
        match event {
            Event::StreamEnd => return Ok(builder.root.filter(|root| !root.is_empty())),
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => Ok(()),
            Event::DocumentStart => {
                documents += 1;
                if documents > 1 { Err("a second YAML document; one is expected") } else { Ok(()) }
            }
            Event::Scalar(text, style, anchor, tag) => {
                let tagged = tag.as_ref().is_some_and(is_string_tag);
                let plain = style == TScalarStyle::Plain && !tagged;
                let node = if plain { Node::Plain(text) } else { Node::Text(text) };
                builder.put(node, anchor)
            }
            Event::SequenceStart(anchor, _) => builder.open(Node::List(Vec::new()), anchor),
            Event::MappingStart(anchor, _) => builder.open(Node::map(), anchor),
            Event::SequenceEnd | Event::MappingEnd => builder.close(),
            Event::Alias(anchor) => builder.alias(anchor),
        }
        .map_err(at)?;
    }
}

fn is_string_tag(tag: &Tag) -> bool {
    tag.handle == "tag:yaml.org,2002:" && tag.suffix == "str"
}

/// A collection whose end has not come yet.
struct Open {
    node: Node,
    key: Option<String>,
    anchor: usize,
}

#[derive(Default)]
struct Builder {
    stack: Vec<Open>,
    anchors: Vec<(usize, Node, usize)>,
    root: Option<Node>,
    nodes: usize,
}

impl Builder {
    fn open(&mut self, node: Node, anchor: usize) -> Result<(), &'static str> {
        if self.awaits_key() {
            return Err("a key must be a word, not a list or a map");
        }
        self.stack.push(Open { node, key: None, anchor });
        Ok(())
    }

    fn close(&mut self) -> Result<(), &'static str> {
        let open = self.stack.pop().ok_or("unexpected end of a block")?;
        self.put(open.node, open.anchor)
    }

    fn awaits_key(&self) -> bool {
        matches!(self.stack.last(), Some(Open { node: Node::Map(_), key: None, .. }))
    }

    fn alias(&mut self, anchor: usize) -> Result<(), &'static str> {
        let known = self.anchors.iter().rev().find(|(id, ..)| *id == anchor);
        let (_, node, size) = known.ok_or("an alias (*name) of something that has not ended")?;
        let (node, size) = (node.clone(), *size);
        self.nodes += size;
        self.put(node, 0)
    }

    fn put(&mut self, node: Node, anchor: usize) -> Result<(), &'static str> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err("too large for a kubeconfig");
        }
        if anchor > 0 {
            let size = size(&node);
            self.anchors.push((anchor, node.clone(), size));
            self.nodes += size;
        }
        let awaits_key = self.awaits_key();
        match self.stack.last_mut() {
            None => self.root = Some(node),
            Some(Open { node: Node::List(items), .. }) => items.push(node),
            Some(Open { node: Node::Map(entries), key, .. }) if awaits_key => match node {
                Node::Plain(text) if text == "<<" => {
                    return Err("YAML merge keys (<<) are not supported");
                }
                Node::Plain(text) | Node::Text(text) => {
                    if entries.iter().any(|(k, _)| *k == text) {
                        return Err("a key appears twice in one map");
                    }
                    *key = Some(text);
                }
                _ => return Err("a key must be a word, not a list or a map"),
            },
            Some(Open { node: Node::Map(entries), key, .. }) => {
                entries.push((key.take().unwrap_or_default(), node));
            }
            Some(_) => return Err("a value in a scalar"),
        }
        Ok(())
    }
}

fn size(node: &Node) -> usize {
    match node {
        Node::Plain(_) | Node::Text(_) => 1,
        Node::List(items) => 1 + items.iter().map(size).sum::<usize>(),
        Node::Map(entries) => 1 + entries.iter().map(|(_, v)| 1 + size(v)).sum::<usize>(),
    }
}

/// The tree as a YAML document in block style, with a newline at its end.
pub fn emit(node: &Node) -> String {
    let mut out = String::new();
    match node {
        Node::Map(entries) if !entries.is_empty() => emit_map(entries, 0, &mut out),
        Node::List(items) if !items.is_empty() => emit_list(items, 0, &mut out),
        other => {
            emit_short(other, &mut out);
            out.push('\n');
        }
    }
    out
}

fn emit_map(entries: &[(String, Node)], indent: usize, out: &mut String) {
    for (i, (key, value)) in entries.iter().enumerate() {
        // The first entry of a map in a list stands behind its dash.
        if i > 0 || !out.ends_with("- ") {
            let _ = write!(out, "{:indent$}", "");
        }
        emit_text(key, out);
        out.push(':');
        match value {
            Node::Map(inner) if !inner.is_empty() => {
                out.push('\n');
                emit_map(inner, indent + 2, out);
            }
            // As kubectl writes them: the dash below its key.
            Node::List(inner) if !inner.is_empty() => {
                out.push('\n');
                emit_list(inner, indent, out);
            }
            other => {
                out.push(' ');
                emit_short(other, out);
                out.push('\n');
            }
        }
    }
}

fn emit_list(items: &[Node], indent: usize, out: &mut String) {
    for (i, item) in items.iter().enumerate() {
        if i > 0 || !out.ends_with("- ") {
            let _ = write!(out, "{:indent$}", "");
        }
        out.push_str("- ");
        match item {
            Node::Map(inner) if !inner.is_empty() => emit_map(inner, indent + 2, out),
            Node::List(inner) if !inner.is_empty() => emit_list(inner, indent + 2, out),
            other => {
                emit_short(other, out);
                out.push('\n');
            }
        }
    }
}

fn emit_short(node: &Node, out: &mut String) {
    match node {
        // A plain scalar over several lines has been folded into one already; what is left of
        // its blank lines can only be said in quotes.
        Node::Plain(text) if text.contains('\n') => emit_quoted(text, out),
        Node::Plain(text) if text.is_empty() => out.push_str("null"),
        Node::Plain(text) => out.push_str(text),
        Node::Text(text) => emit_text(text, out),
        Node::List(_) => out.push_str("[]"),
        Node::Map(_) => out.push_str("{}"),
    }
}

/// A text, without quotes only where no reader of YAML 1.1 or 1.2 could take it for something else.
fn emit_text(text: &str, out: &mut String) {
    let mut bytes = text.bytes();
    let begins = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'/');
    let goes_on = bytes.all(|b| b.is_ascii_alphanumeric() || b"-._/+=@".contains(&b));
    let words = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];
    let word = words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if begins && goes_on && !word { out.push_str(text) } else { emit_quoted(text, out) }
}

/// A text in double quotes.
fn emit_quoted(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            // Controls, and what YAML 1.1 takes for line breaks.
            c if c.is_control() || ['\u{2028}', '\u{2029}', '\u{feff}'].contains(&c) => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_kubectl_writes_comes_back_as_it_was() {
        let text = "\
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: LS0tLS1CRUdJTg==
    extensions:
    - extension:
        last-update: Mon, 01 Jan 2026 00:00:00 UTC
        version: v1.25.2
      name: cluster_info
    server: https://192.168.49.2:8443
  name: minikube
contexts: []
current-context: minikube
kind: Config
preferences: {}
users:
- name: minikube
  user:
    exec:
      args:
      - eks
      - \"017\"
      - 017
      env: null
      interactiveMode: IfAvailable
      provideClusterInfo: false
";
        assert_eq!(emit(&parse(text).unwrap().unwrap()), text);
    }

    #[test]
    fn json_is_yaml() {
        let node = parse(r#"{"a": {"b": [1, "x y", true]}, "c": ""}"#).unwrap().unwrap();
        assert_eq!(emit(&node), "a:\n  b:\n  - 1\n  - \"x y\"\n  - true\nc: \"\"\n");
        assert!(node.get("a").is_some_and(|a| a.items("b").len() == 3));
    }

    #[test]
    fn anchors_are_resolved_and_bounded() {
        let node = parse("a: &x {b: c}\nd: *x\n").unwrap().unwrap();
        assert_eq!(node.get("d").and_then(|d| d.str("b")), Some("c"));
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for i in 1..9 {
            let all = vec![format!("*a{}", i - 1); 10].join(", ");
            let _ = writeln!(bomb, "a{i}: &a{i} [{all}]");
        }
        assert!(parse(&bomb).unwrap_err().contains("too large"));
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, expected) in [
            ("a: 1\na: 2\n", "line 2: a key appears twice in one map"),
            ("a: [\n", "not valid YAML"),
            ("a: 1\n\tb: 2\n", "line 2: not valid YAML: a tab in the indentation"),
            ("? [a]\n: b\n", "line 1: a key must be a word"),
            ("a: 1\n---\nb: 2\n", "a second YAML document"),
            ("a: &x {<<: *x}\n", "merge keys"),
            ("a: &x [*x]\n", "has not ended"),
            (&"[".repeat(100), "nested too deep"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        assert_eq!(parse("# nothing\n"), Ok(None));
        assert_eq!(parse("{}"), Ok(None));
    }

    /// What must survive: plain scalars by their text, quoted ones by theirs. A text that needs no
    /// quotes may come back plain.
    fn same(a: &Node, b: &Node) -> bool {
        match (a, b) {
            (Node::Plain(a), Node::Plain(b)) => a == b || (is_null(a) && is_null(b)),
            (Node::Text(a), Node::Text(b) | Node::Plain(b)) => a == b,
            (Node::List(a), Node::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
            }
            (Node::Map(a), Node::Map(b)) => {
                let pair =
                    |((k, a), (l, b)): (&(String, Node), &(String, Node))| k == l && same(a, b);
                a.len() == b.len() && a.iter().zip(b).all(pair)
            }
            _ => false,
        }
    }

    fn any_node() -> impl Strategy<Value = Node> {
        let leaf = prop_oneof![
            any::<String>().prop_map(Node::Text),
            "[ -~]{0,12}".prop_map(Node::Text),
            prop_oneof![
                Just("0x1F"),
                Just("017"),
                Just("1_000"),
                Just("yes"),
                Just("1e3"),
                Just("~"),
                Just("2020-01-01"),
                Just("a b"),
                Just("-5"),
                Just("https://h:1/p")
            ]
            .prop_map(|text| Node::Plain(text.to_owned())),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            let key = prop_oneof!["[a-z]{1,6}", any::<String>()];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Node::List),
                prop::collection::btree_map(key, inner, 0..4)
                    .prop_map(|map| Node::Map(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(node in any_node()) {
            // `<<` as a quoted key is no merge key.
            let text = emit(&Node::Map(vec![("root".into(), node.clone())]));
            let back = parse(&text).unwrap().unwrap();
            prop_assert!(same(&node, back.get("root").unwrap()), "{text}\n{back:?}");
        }

        #[test]
        fn garbage_is_no_panic(text in any::<String>()) {
            let _ = parse(&text);
        }
    }
}
