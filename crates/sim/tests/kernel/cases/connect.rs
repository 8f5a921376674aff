//! Connects.

use std::pin::pin;

use jackstay_sim::net::Side;
use jackstay_sys::clock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{BOTH, ms, pause, read_once, since};
use crate::figures::{Figures, Tolerance};
use crate::rig::{GREETING, Rig};

/// How often packets are counted.
const LOOK: u64 = 5;

/// All packets are dropped: when SYN is repeated, and when the connect fails.
pub async fn no_answer(rig: &Rig, figures: &mut Figures) {
    rig.drop_packets(BOTH);
    let start = clock::now();
    let mut connecting = pin!(rig.connect());
    let (mut count, mut times) = (0, Vec::new());
    let result = loop {
        tokio::select! {
            biased;
            result = &mut connecting => break result,
            () = pause(ms(LOOK)) => {}
        }
        let packets = rig.packets();
        times.extend((count..packets).map(|_| since(start)));
        count = packets;
    };
    figures.times("SYNs", &times, Tolerance::TIMER);
    figures.time("failed after", since(start), Tolerance::TIMER);
    figures.result("result", &result.map(|_| 0));
}

/// Packets are dropped for a while.
pub async fn late(rig: &Rig, figures: &mut Figures, of: &[Side]) {
    let listener = rig.listen();
    rig.drop_packets(of);
    let start = clock::now();
    let end = async {
        pause(ms(1_500)).await;
        rig.drop_packets(&[]);
    };
    let (client, accepted, ()) = tokio::join!(
        async { (rig.connect().await.unwrap(), since(start)) },
        async { (listener.accept().await.unwrap(), since(start)) },
        end
    );
    figures.time("connected after", client.1, Tolerance::TIMER);
    figures.time("accepted after", accepted.1, Tolerance::TIMER);
}

/// No socket listens.
pub async fn refused(rig: &Rig, figures: &mut Figures) {
    let start = clock::now();
    let result = rig.connect().await;
    figures.time("failed after", since(start), Tolerance::PROMPT);
    figures.result("result", &result.map(|_| 0));
}

/// The process is stopped: its kernel accepts and acknowledges.
pub async fn stopped(rig: &Rig, figures: &mut Figures) {
    let mut peer = rig.start_peer();
    let mut before = rig.connect().await.unwrap();
    before.read_exact(&mut [0; GREETING.len()]).await.unwrap();
    peer.stop();
    let start = clock::now();
    let mut client = rig.connect().await.unwrap();
    figures.time("connected after", since(start), Tolerance::PROMPT);
    client.write_all(&[1; 1_000]).await.unwrap();
    tokio::select! {
        result = read_once(&mut client) => panic!("{result:?} of a stopped process"),
        () = pause(ms(1_000)) => {}
    }
    let info = client.tcp_info().unwrap();
    figures.count("acknowledged bytes", info.bytes_acked, Tolerance::NONE);
    figures.count("unacknowledged segments", info.unacked.into(), Tolerance::NONE);
}
