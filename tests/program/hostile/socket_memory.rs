//! What the kernel holds for the sockets of a process, which cgroups of version 1 do not count.

use std::fs;

use jackstay_sys::sockets::queue_memory;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// What the kernel holds for the sockets of a process, in bytes.
pub fn socket_memory(pid: &str) -> u64 {
    let Some(process) = pid.parse().ok().and_then(Pid::from_raw) else { return 0 };
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return 0 };
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets = descriptors.filter(|descriptor| {
        let target = fs::read_link(descriptor.path());
        target.is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"))
    });
    sockets
        .filter_map(|socket| {
            let number = socket.file_name().to_str()?.parse().ok()?;
            let socket = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()?;
            Some(queue_memory::read(&socket).ok()?.total() as u64)
        })
        .sum()
}
