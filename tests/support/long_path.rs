//! A path with a long round trip in the network namespace of a test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A TUN device whose network is as far away as this, until it is dropped: see `long_path.py`.
pub struct LongPath(Child);

impl LongPath {
    /// `network`: the local address with the length of its prefix. Peers reach it at the next address.
    pub fn start(device: &str, network: &str, round_trip: Duration) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/long_path.py");
        let one_way = (round_trip / 2).as_millis().to_string();
        let mut process = Command::new("python3")
            .args([script, device, network, &one_way])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(process)
    }
}

impl Drop for LongPath {
    fn drop(&mut self) {
        // It ends with its input.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
