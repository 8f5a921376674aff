//! Finds which source files call functions of which other files, from their syntax trees and by name.
//!
//! A call counts for another file if that defines the function, and the caller names the type or the module of it (`T::f()`,
//! `m::f()`, `use m::f`) or has a variable or field named like the type (`pool` for `Pool`). A method whose type the
//! caller does not name counts if only one file defines a method of this name. Test code is ignored.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Expr, ExprCall, ExprMethodCall, ImplItemFn, Item, ItemFn, ItemImpl, ItemTrait, Macro,
    TraitItemFn, Type,
};

use super::imports::is_test_only;

/// The functions that one file defines and calls.
#[derive(Default)]
struct Scan {
    /// Functions without `self`, with the type or the module that a caller writes before `::`.
    functions: BTreeSet<(String, String)>,
    /// Methods with their types.
    methods: BTreeSet<(String, String)>,
    /// Calls by path: the segment before the name, if there is one, and the name.
    path_calls: BTreeSet<(String, String)>,
    method_calls: BTreeSet<String>,
    /// Every identifier.
    names: BTreeSet<String>,
    /// The type of the block that is read, or the module.
    owner: String,
}

impl Scan {
    fn define(&mut self, signature: &syn::Signature) {
        let defined = (self.owner.clone(), signature.ident.to_string());
        let into =
            if signature.receiver().is_some() { &mut self.methods } else { &mut self.functions };
        into.insert(defined);
    }

    fn with_owner(&mut self, owner: String, read: impl FnOnce(&mut Self)) {
        let outer = std::mem::replace(&mut self.owner, owner);
        read(self);
        self.owner = outer;
    }

    /// Finds calls in the arguments of a macro, which syn does not parse.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        for at in 0..tokens.len() {
            match &tokens[at..] {
                [TokenTree::Punct(dot), TokenTree::Ident(name), TokenTree::Group(group), ..]
                    if dot.as_char() == '.' && group.delimiter() == Delimiter::Parenthesis =>
                {
                    self.method_calls.insert(name.to_string());
                }
                [
                    TokenTree::Ident(owner),
                    TokenTree::Punct(_),
                    TokenTree::Punct(colon),
                    TokenTree::Ident(name),
                    TokenTree::Group(_),
                    ..,
                ] if colon.as_char() == ':' => {
                    self.path_calls.insert((owner.to_string(), name.to_string()));
                }
                [TokenTree::Ident(name), TokenTree::Group(_), ..] => {
                    self.path_calls.insert((String::new(), name.to_string()));
                }
                [TokenTree::Group(group), ..] => self.tokens(group.stream()),
                _ => {}
            }
        }
    }
}

/// The last segment of a type's path, without references.
fn type_name(of: &Type) -> String {
    match of {
        Type::Path(path) => {
            path.path.segments.last().map(|part| part.ident.to_string()).unwrap_or_default()
        }
        Type::Reference(reference) => type_name(&reference.elem),
        _ => String::new(),
    }
}

impl<'ast> Visit<'ast> for Scan {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test_only(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        self.with_owner(type_name(&item.self_ty), |scan| visit::visit_item_impl(scan, item));
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.with_owner(item.ident.to_string(), |scan| visit::visit_item_trait(scan, item));
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.define(&item.sig);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.define(&item.sig);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        self.define(&item.sig);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        if let Expr::Path(function) = &*call.func {
            let names = function.path.segments.iter().map(|part| part.ident.to_string());
            let names: Vec<_> = names.collect();
            if let [.., owner, name] = &names[..] {
                let owner = if owner == "Self" { &self.owner } else { owner };
                self.path_calls.insert((owner.clone(), name.clone()));
            } else if let [name] = &names[..] {
                self.path_calls.insert((String::new(), name.clone()));
            }
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.method_calls.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, item: &'ast Macro) {
        self.tokens(item.tokens.clone());
    }
}

/// Every identifier of `tokens`.
fn identifiers(tokens: TokenStream, found: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(name) => drop(found.insert(name.to_string())),
            TokenTree::Group(group) => identifiers(group.stream(), found),
            _ => {}
        }
    }
}

/// The calls between the files of several packages.
pub struct Calls {
    files: BTreeMap<String, Scan>,
    /// The files that define a method of this name.
    methods: BTreeMap<String, BTreeSet<String>>,
}

impl Calls {
    /// Reads files, given by their path and their text.
    pub fn read<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let mut read = Self { files: BTreeMap::new(), methods: BTreeMap::new() };
        for (path, text) in files {
            let tree = syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"));
            let stem = path.trim_end_matches("/mod.rs").trim_end_matches(".rs");
            let owner = stem.rsplit('/').next().expect("a path has a part").to_owned();
            let mut scan = Scan { owner, ..Scan::default() };
            scan.visit_file(&tree);
            let code = text.split("#[cfg(test)]\nmod ").next().expect("a first part");
            identifiers(code.parse().expect("tokens"), &mut scan.names);
            for (_, method) in &scan.methods {
                read.methods.entry(method.clone()).or_default().insert(path.to_owned());
            }
            read.files.insert(path.to_owned(), scan);
        }
        read
    }

    /// Whether a function of the file `caller` calls one of the file `callee`.
    ///
    /// # Panics
    /// One of the files was not read.
    pub fn between(&self, caller: &str, callee: &str) -> bool {
        let file = |path| self.files.get(path).unwrap_or_else(|| panic!("{path} is not read"));
        let (from, to) = (file(caller), file(callee));
        let by_path = to.functions.iter().chain(&to.methods).any(|(owner, name)| {
            from.path_calls.contains(&(owner.clone(), name.clone()))
                || (from.names.contains(owner)
                    && from.path_calls.contains(&(String::new(), name.clone()))
                    && !from.functions.iter().any(|(_, own)| own == name))
        });
        let by_method = to.methods.iter().any(|(owner, name)| {
            from.method_calls.contains(name)
                && (from.names.contains(owner)
                    || from.names.contains(&owner.to_lowercase())
                    || self.methods[name].len() == 1)
        });
        by_path || by_method
    }
}

#[test]
fn calls_are_found_by_path_by_import_and_by_method() {
    let files = [
        (
            "a.rs",
            "use crate::b::{self, B, free}; fn run(c: u8) { b::module(); B::new(); free(); c.only(); c.common(); }",
        ),
        ("b.rs", "pub struct B; impl B { pub fn new() -> Self { B } } pub fn module() {} "),
        ("c.rs", "pub struct C; impl C { pub fn only(&self) {} }"),
        ("d.rs", "pub struct D; impl D { pub fn common(&self) {} }"),
        (
            "e.rs",
            "pub struct E; impl E { pub fn common(&self) {} } #[cfg(test)] mod tests { fn f() { super::super::c::only() } }",
        ),
        ("f.rs", "fn g(d: &D) { tokio::select! { () = d.common() => {} } }"),
    ];
    let calls = Calls::read(files.into_iter());
    let found: Vec<_> = files
        .iter()
        .flat_map(|(from, _)| files.iter().map(move |(to, _)| (*from, *to)))
        .filter(|(from, to)| from != to && calls.between(from, to))
        .collect();
    assert_eq!(found, [("a.rs", "b.rs"), ("a.rs", "c.rs"), ("f.rs", "d.rs")]);
}
