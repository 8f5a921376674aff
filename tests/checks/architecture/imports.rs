//! Finds import circles between source files from their syntax trees.
//!
//! A file imports another one if it uses a path into it: `use super::pool; pool::Pool::new()` imports `pool.rs`. A use
//! of a re-exported name (`pub use`) counts as an import of the file that defines the name. Paths in the strings of serde
//! attributes (`#[serde(with = "...")]`) are read as well. Test code is ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Literal, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, LitStr, Macro, Meta, UseTree, Visibility};

/// Keys of `#[serde(...)]` whose text is the path of a function or a type.
const SERDE_PATHS: [&str; 9] = [
    "default",
    "serialize_with",
    "deserialize_with",
    "skip_serializing_if",
    "getter",
    "from",
    "try_from",
    "into",
    "remote",
];

/// A module path from the crate root: `["proxy", "watch"]`.
type Module = Vec<String>;

/// The paths in one file, and the names that it binds to paths.
#[derive(Default)]
struct Scan {
    /// Segments of every path as written.
    paths: BTreeSet<Vec<String>>,
    /// Names bound by `use`, with their paths as written; `true` for re-exports.
    bound: Vec<(String, Vec<String>, bool)>,
    /// Child modules.
    children: BTreeSet<String>,
}

/// Whether an item is compiled for tests only.
pub fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                list.tokens
                    .clone()
                    .into_iter()
                    .next()
                    .is_some_and(|first| first.to_string() == "test")
            })
    })
}

impl Scan {
    fn bind(&mut self, prefix: &[String], tree: &UseTree, public: bool) {
        let extended = |name: String| [prefix, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.bind(&extended(path.ident.to_string()), &path.tree, public),
            UseTree::Name(name) if name.ident == "self" => {
                let name = prefix.last().expect("`self` has a prefix").clone();
                self.bound.push((name, prefix.to_vec(), public));
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                self.bound.push((name.clone(), extended(name), public));
            }
            UseTree::Rename(rename) => {
                let path = extended(rename.ident.to_string());
                self.bound.push((rename.rename.to_string(), path, public));
            }
            UseTree::Glob(_) => drop(self.paths.insert(extended("*".to_owned()))),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.bind(prefix, tree, public));
            }
        }
    }

    /// Finds paths in the arguments of a macro, which syn does not parse.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if colons == 2 => path.push(ident.to_string()),
                TokenTree::Ident(ident) => {
                    self.paths.insert(std::mem::replace(&mut path, vec![ident.to_string()]));
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => drop(self.paths.insert(std::mem::take(&mut path))),
            }
            colons = 0;
        }
        self.paths.insert(path);
    }

    /// Finds paths in the strings between the parentheses of `serde(...)`.
    fn serde_strings(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        for at in 0..tokens.len() {
            match &tokens[at..] {
                [TokenTree::Ident(key), TokenTree::Punct(equals), TokenTree::Literal(text), ..]
                    if equals.as_char() == '=' =>
                {
                    self.serde_path(&key.to_string(), text);
                }
                [TokenTree::Group(group), ..] => self.serde_strings(group.stream()),
                _ => {}
            }
        }
    }

    /// Reads the text of a key of `#[serde(...)]`, if it is a path.
    fn serde_path(&mut self, key: &str, text: &Literal) {
        let parse = || syn::parse_str::<LitStr>(&text.to_string()).expect("a text");
        if SERDE_PATHS.contains(&key) {
            let path = parse().parse::<syn::Type>();
            self.visit_type(&path.unwrap_or_else(|error| panic!("{key} = {text}: {error}")));
        } else if key == "with" {
            // The text is the path of a module with functions of these names.
            let module = parse().parse::<syn::Path>();
            let module = module.unwrap_or_else(|error| panic!("{key} = {text}: {error}"));
            let segments = module.segments.iter().map(|part| part.ident.to_string());
            for function in ["serialize", "deserialize"] {
                self.paths.insert(segments.clone().chain([function.to_owned()]).collect());
            }
        }
    }
}

impl<'ast> Visit<'ast> for Scan {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Const(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test_only(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.bind(&[], &item.tree, !matches!(item.vis, Visibility::Inherited));
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        self.children.insert(item.ident.to_string());
        visit::visit_item_mod(self, item);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            if list.path.is_ident("serde") {
                self.serde_strings(list.tokens.clone());
            } else if list.path.is_ident("cfg_attr") {
                let tokens: Vec<_> = list.tokens.clone().into_iter().collect();
                for pair in tokens.windows(2) {
                    if let [TokenTree::Ident(name), TokenTree::Group(group)] = pair
                        && name == "serde"
                    {
                        self.serde_strings(group.stream());
                    }
                }
            }
        }
        visit::visit_attribute(self, attribute);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.insert(path.segments.iter().map(|part| part.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast Macro) {
        self.tokens(item.tokens.clone());
    }
}

/// The imports between the files of a source tree.
pub struct Imports {
    files: BTreeMap<Module, (String, Scan)>,
}

impl Imports {
    /// Reads files, given by their path below the crate root and their text.
    pub fn read<'a>(files: impl Iterator<Item = (&'a Path, &'a str)>) -> Self {
        let files = files.map(|(path, text)| {
            let name = path.to_str().unwrap().to_owned();
            let tree = syn::parse_file(text).unwrap_or_else(|error| panic!("{name}: {error}"));
            let mut scan = Scan::default();
            scan.visit_file(&tree);
            (module_of(path), (name, scan))
        });
        Self { files: files.collect() }
    }

    /// Resolves a path as written in `module` to a path from the crate root; `None` for a path outside the crate. `depth`
    /// limits the number of `use` declarations that are followed.
    fn absolute(&self, module: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        let scan = &self.files.get(module)?.1;
        let parent = || module.split_last().map(|(_, parent)| parent);
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let (mut base, mut rest) = (parent()?, rest);
                while rest.first().is_some_and(|part| part == "super") {
                    (base, rest) = (base.split_last()?.1, &rest[1..]);
                }
                Some([base, rest].concat())
            }
            name if scan.children.contains(name) => Some([module, path].concat()),
            name => {
                let (_, target, _) = scan.bound.iter().find(|(bound, _, _)| bound == name)?;
                if depth == 0 || target.first() == Some(first) {
                    return None;
                }
                let base = self.absolute(module, target, depth - 1)?;
                Some([&base, rest].concat())
            }
        }
    }

    /// The module that defines an absolute path, after at most `depth` re-exports.
    fn definition(&self, path: &[String], depth: usize) -> Option<Module> {
        let module =
            (0..=path.len()).rev().map(|n| &path[..n]).find(|m| self.files.contains_key(*m))?;
        let (name, rest) = path[module.len()..].split_first()?;
        let scan = &self.files[module].1;
        let exported = scan.bound.iter().find(|(bound, _, public)| *public && bound == name);
        if let Some((_, target, _)) = exported.filter(|_| depth > 0)
            && let Some(base) = self.absolute(module, target, 4)
        {
            return self.definition(&[&base, rest].concat(), depth - 1);
        }
        Some(module.to_vec())
    }

    /// The modules that a module imports.
    fn imports_of(&self, module: &Module) -> BTreeSet<Module> {
        let scan = &self.files[module].1;
        let imported = scan.bound.iter().filter(|(_, _, public)| !public).map(|(_, path, _)| path);
        let mut used: BTreeSet<_> = imported
            .chain(&scan.paths)
            .filter_map(|path| self.definition(&self.absolute(module, path, 4)?, 4))
            .collect();
        used.remove(module);
        used
    }

    /// The path of each file with the top-level modules that it names in paths.
    pub fn top_level(&self) -> impl Iterator<Item = (&str, BTreeSet<String>)> {
        self.files.iter().map(|(module, (file, scan))| {
            let paths = scan.bound.iter().map(|(_, path, _)| path).chain(&scan.paths);
            let top = |path: &Vec<String>| self.absolute(module, path, 4)?.into_iter().next();
            (file.as_str(), paths.filter_map(top).collect())
        })
    }

    /// The import circles: sets of files in which each file uses all others, directly or indirectly.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let uses: BTreeMap<_, _> = self.files.keys().map(|m| (m, self.imports_of(m))).collect();
        let reach: BTreeMap<_, BTreeSet<&Module>> = uses
            .keys()
            .map(|start| {
                let (mut seen, mut open) = (BTreeSet::new(), vec![*start]);
                while let Some(module) = open.pop() {
                    open.extend(uses[module].iter().filter(|next| seen.insert(*next)));
                }
                (*start, seen)
            })
            .collect();
        let in_circle = |a: &&Module, b: &&Module| reach[*a].contains(*b) && reach[*b].contains(*a);
        let mut circles: BTreeSet<Vec<String>> = BTreeSet::new();
        for module in reach.keys().filter(|module| in_circle(module, module)) {
            let members = reach.keys().filter(|other| in_circle(module, other));
            circles.insert(members.map(|member| self.files[*member].0.clone()).collect());
        }
        circles.into_iter().collect()
    }
}

/// The module of a file: `src/a/b.rs` and `src/a/b/mod.rs` are `a::b`.
fn module_of(path: &Path) -> Module {
    let mut module: Module = path.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    let file = module.pop().expect("a file has a name");
    match file.trim_end_matches(".rs") {
        "mod" | "lib" | "main" => {}
        name => module.push(name.to_owned()),
    }
    module
}

#[test]
fn circles_finds_imports_through_paths_macros_and_reexports() {
    let files = [
        ("lib.rs", "pub mod a; pub mod b;"),
        ("a.rs", "mod c; mod d; pub use c::C; use crate::b; fn f() { b::g(); }"),
        ("a/c.rs", "use super::d::D; pub struct C(D);"),
        (
            "a/d.rs",
            "fn h() { println!(\"{}\", super::C::x()) } #[cfg(test)] mod tests { use crate::b; }",
        ),
        ("b.rs", "pub fn g() {} #[cfg(test)] use crate::a::C;"),
    ];
    let imports = Imports::read(files.iter().map(|(path, text)| (Path::new(path), *text)));
    assert_eq!(imports.circles(), [["a/c.rs", "a/d.rs"]]);
}

#[test]
fn paths_in_serde_strings_are_imports() {
    // Of a field of `a/c.rs`: whether it imports `a/d.rs`, which imports `a/c.rs`, and whether it imports `b.rs`.
    let table = [
        ("with = \"d\"", true, false),
        ("with = \"super::d\"", true, false),
        ("default = \"d::f\"", true, false),
        ("rename = \"x\", serialize_with = \"crate::a::d::f\"", true, false),
        ("deserialize_with = \"d::f::<u8>\"", true, false),
        ("skip_serializing_if = \"super::d::D::is_empty\"", true, false),
        ("from = \"Vec<d::D>\"", true, false),
        ("try_from = \"d::D\", into = \"u8\"", true, false),
        ("remote = \"d::D\", getter = \"u8::from\"", true, false),
        ("with = \"crate::b\"", false, true),
        ("into = \"super::super::b::B\"", false, true),
        ("default, flatten, rename = \"super::d::D\"", false, false),
        ("skip_serializing_if = \"Option::is_none\"", false, false),
    ];
    for (arguments, is_circle, imports_b) in table {
        for attribute in [
            format!("#[serde({arguments})]"),
            format!("#[cfg_attr(feature = \"x\", serde({arguments}), doc(alias = \"d\"))]"),
        ] {
            let text = format!("use super::d; pub struct C {{ {attribute} field: u8 }}");
            let files = [
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", "mod c; mod d;"),
                ("a/c.rs", &*text),
                ("a/d.rs", "use super::c::C; pub struct D(C); pub fn f() {}"),
                ("b.rs", "pub struct B;"),
            ];
            let imports = Imports::read(files.iter().map(|(path, text)| (Path::new(path), *text)));
            let circles = imports.circles();
            assert_eq!(circles == [["a/c.rs", "a/d.rs"]], is_circle, "{attribute}: {circles:?}");
            let (_, named) = imports.top_level().find(|(file, _)| *file == "a/c.rs").unwrap();
            assert_eq!(named.contains("b"), imports_b, "{attribute}: {named:?}");
        }
    }
}
