//! Faults in the network namespace that a test was started in (`unshare --net`).

#![allow(dead_code)] // each test crate uses its part

use std::process::Command;

/// Runs one command of nftables.
pub fn nft(command: &str) {
    assert!(Command::new("nft").arg(command).status().unwrap().success(), "nft {command}");
}
