//! The limit of memory that the kernel sets for this process: that of its cgroup.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where both versions of cgroups are mounted.
const ROOT: &str = "/sys/fs/cgroup";
/// Version 1 says "no limit" with a number close to the largest.
const UNLIMITED: u64 = 1 << 60;

/// The smallest limit of the process's cgroup and of those around it, in bytes; `None` without a limit. It is read
/// once, because a process that has restricted itself cannot read it again.
pub fn cgroup_limit() -> Option<u64> {
    static LIMIT: OnceLock<Option<u64>> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        smallest_limit(&groups, |file| fs::read_to_string(file).ok())
    })
}

/// `groups` has the lines of `/proc/self/cgroup` (cgroups(7)).
fn smallest_limit(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) =
            (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let (mount, file) = if controllers.is_empty() {
            (ROOT.to_owned(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (format!("{ROOT}/memory"), "memory.limit_in_bytes")
        } else {
            return Vec::new();
        };
        files(&mount, group, file)
    });
    let values = limits.filter_map(|file| read(&file)?.trim().parse::<u64>().ok());
    values.filter(|limit| *limit < UNLIMITED).min()
}

/// The file of the group and of each group around it. In a container without a cgroup namespace the path of
/// the group does not exist, and the mount itself is the group.
fn files(mount: &str, group: &str, file: &str) -> Vec<PathBuf> {
    let group = Path::new(mount).join(group.trim_start_matches('/'));
    let groups = group.ancestors().take_while(|group| group.starts_with(mount));
    groups.map(|group| group.join(file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smallest_limit_of_both_versions() {
        let unlimited = "9223372036854771712\n";
        for (groups, files, expected) in [
            ("0::/", &[("/sys/fs/cgroup/memory.max", "268435456\n")][..], Some(268_435_456)),
            ("0::/", &[("/sys/fs/cgroup/memory.max", "max\n")], None),
            (
                "0::/kubepods/pod",
                &[
                    ("/sys/fs/cgroup/kubepods/pod/memory.max", "max"),
                    ("/sys/fs/cgroup/kubepods/memory.max", "500"),
                ],
                Some(500),
            ),
            (
                "5:cpu,cpuacct:/x\n4:memory:/pod\n0::/",
                &[
                    ("/sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "700"),
                    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited),
                ],
                Some(700),
            ),
            // The path is that on the host, where the container's mount does not have it.
            (
                "4:memory:/docker/0123",
                &[("/sys/fs/cgroup/memory/memory.limit_in_bytes", "800")],
                Some(800),
            ),
            ("4:memory:/", &[("/sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited)], None),
            ("", &[], None),
        ] {
            let read = |file: &Path| {
                let found = files.iter().find(|(path, _)| Path::new(path) == file);
                found.map(|(_, text)| (*text).to_owned())
            };
            assert_eq!(smallest_limit(groups, read), expected, "{groups}");
        }
    }
}
