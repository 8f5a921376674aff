//! Faults in the network namespace of the test (`unshare --net`).

#![allow(dead_code)] // each test crate uses a part

use std::process::Command;

/// Runs a command of nftables.
pub fn nft(command: &str) {
    assert!(Command::new("nft").arg(command).status().unwrap().success(), "nft {command}");
}
