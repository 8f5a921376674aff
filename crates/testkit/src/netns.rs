//! Network faults by nftables. The test must run in its own network namespace (`unshare --net`).

use std::process::Command;

/// Runs `nft` with this command.
pub fn nft(command: &str) {
    assert!(Command::new("nft").arg(command).status().unwrap().success(), "nft {command}");
}
