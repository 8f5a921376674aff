//! Notices when a file in use has certificates that are not read, and when all of them are read again. Pure.

use std::collections::BTreeMap;

/// The certificates that are not read, by the name of their file in the log.
pub type SkippedByName = BTreeMap<String, Vec<String>>;

/// A change of what is not read of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct SkippedChange {
    /// The name of the file in the log.
    pub name: String,
    /// What was not read before; `None` for a file that was not in use before.
    pub from: Option<Vec<String>>,
    /// What is not read now: sentences with file, line and reason.
    pub to: Vec<String>,
}

/// What is not read of the files in use, at the last update.
#[derive(Debug, Default)]
pub struct SkippedWatch(SkippedByName);

impl SkippedWatch {
    /// Returns the changes since the last update.
    pub fn update(&mut self, skipped: SkippedByName) -> Vec<SkippedChange> {
        let changes = skipped.iter().filter_map(|(name, to)| {
            let from = self.0.get(name);
            let differs = from.map_or(&[][..], Vec::as_slice) != to.as_slice();
            differs.then(|| SkippedChange {
                name: name.clone(),
                from: from.cloned(),
                to: to.clone(),
            })
        });
        let changes = changes.collect();
        self.0 = skipped;
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn update_reports_each_change_once() {
        let files = |skipped: &[&str]| {
            let skipped = skipped.iter().map(|text| (*text).to_owned()).collect();
            SkippedByName::from([("CA".to_owned(), skipped)])
        };
        let mut watch = SkippedWatch::default();
        assert_eq!(watch.update(files(&[])), []);
        for (now, from) in
            [(&["a"][..], Some(&[][..])), (&["a", "b"], Some(&["a"])), (&[], Some(&["a", "b"]))]
        {
            let changes = watch.update(files(now));
            let from =
                from.map(|from| from.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
            assert_eq!(changes.len(), 1, "{now:?}");
            assert_eq!((&changes[0].from, changes[0].to.len()), (&from, now.len()), "{now:?}");
            assert_eq!(watch.update(files(now)), [], "{now:?}");
        }
        let changes = SkippedWatch::default().update(files(&["a"]));
        assert_eq!(changes[0].from, None);
    }
}
