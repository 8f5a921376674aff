//! A cgroup with a limit of memory, for one process.

use std::fs;
use std::path::PathBuf;

/// A cgroup that is removed when this is dropped; its processes must have ended.
pub struct MemoryCgroup {
    dir: PathBuf,
    v2: bool,
}

impl MemoryCgroup {
    /// Creates a cgroup with this limit in bytes. `None` if this host lets no cgroup be created.
    pub fn new(limit: u64) -> Option<Self> {
        let v2 = fs::metadata("/sys/fs/cgroup/cgroup.controllers").is_ok();
        let root = if v2 { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
        let dir = PathBuf::from(format!("{root}/jackstay-hostile-{}", std::process::id()));
        if v2 {
            let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
        }
        let _ = fs::create_dir(&dir);
        let file = if v2 { "memory.max" } else { "memory.limit_in_bytes" };
        let cgroup = Self { dir, v2 };
        fs::write(cgroup.dir.join(file), limit.to_string()).is_ok().then_some(cgroup)
    }

    /// The file to which a process writes `0` to join.
    pub fn processes(&self) -> PathBuf {
        self.dir.join("cgroup.procs")
    }

    /// The largest use of memory up to now in bytes, including page cache and kernel memory.
    pub fn peak(&self) -> u64 {
        let file = if self.v2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
    }
}
