//! Packets of an established connection are dropped for a while.

use std::time::Duration;

use jackstay_core::tcp_info::TcpInfo;
use jackstay_sim::net::Side;
use jackstay_sys::clock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{exchange, ms, pause, pause_until, since};
use crate::figures::{FIELDS, Figures, Tolerance};
use crate::rig::Rig;

/// What is sent meanwhile.
const BYTES: usize = 1_000;
/// When `TCP_INFO` of the sender is read. The moments lie between the timeouts of both kinds of streams.
const MOMENTS: [u64; 7] = [100, 320, 530, 950, 1_150, 2_500, 3_800];

/// What [`later`] compares.
const ROUND_TRIPS: [&str; 4] = ["rtt", "rtt deviation", "shortest rtt", "bytes acked"];

/// A fault.
#[derive(Clone, Copy)]
pub struct Drop {
    /// The end that sends. The client's end has `TCP_THIN_LINEAR_TIMEOUTS`.
    pub sender: Side,
    /// The ends whose packets are dropped.
    pub of: &'static [Side],
    pub until: Duration,
}

/// Two packets are dropped, and later ones are not: a tail loss probe shows that they are missing.
pub async fn tail(rig: &Rig, figures: &mut Figures) {
    // The probe follows two round trips later, which is long after the drop has ended, also on a busy machine.
    rig.change_links(|link| link.latency = ms(15));
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    pause(ms(200)).await;
    // Linux ignores an acknowledgement of the probe that comes sooner than the shortest round trip, because it could be
    // that of the packet before (`tcp_rack_advance`).
    rig.change_links(|link| link.latency = ms(20));
    rig.drop_packets(&[Side::Client]);
    let start = clock::now();
    for _ in 0..2 {
        client.write_all(&[1; 100]).await.unwrap();
        pause(ms(1)).await;
    }
    rig.drop_packets(&[]);
    server.read_exact(&mut [0; 200]).await.unwrap();
    figures.time("received after", since(start), Tolerance::PROMPT);
    pause(ms(200)).await;
    let info = client.tcp_info().unwrap();
    figures.count("retransmits", info.retransmits.into(), Tolerance::NONE);
    figures.count("retransmitted", info.retransmitted.into(), Tolerance::NONE);
}

/// Nothing is dropped, but round trips become longer than the retransmission timeout, so that each segment is sent twice.
/// Time stamps show how long they take.
pub async fn later(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    pause(ms(200)).await;
    let mut infos: Vec<TcpInfo> = Vec::new();
    for latency in [300, 600, 900] {
        rig.change_links(|link| link.latency = ms(latency));
        exchange(&mut client, &mut server, 1).await;
        // The copies arrive.
        pause(ms(2_000)).await;
        infos.push(client.tcp_info().unwrap());
    }
    figures.infos(&infos, FIELDS.iter().filter(|field| ROUND_TRIPS.contains(&field.name)));
}

/// `TCP_INFO` of the sender meanwhile, and when the bytes arrive.
pub async fn data(rig: &Rig, figures: &mut Figures, drop: Drop) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    pause(ms(200)).await;
    let (sender, receiver) = match drop.sender {
        Side::Client => (&mut client, &mut server),
        Side::Server => (&mut server, &mut client),
    };
    rig.drop_packets(drop.of);
    let start = clock::now();
    let sending = async {
        sender.write_all(&[1; BYTES]).await.unwrap();
        let mut infos: Vec<TcpInfo> = Vec::new();
        for at in MOMENTS.into_iter().map(ms).filter(|at| *at < drop.until) {
            pause_until(start + at).await;
            infos.push(sender.tcp_info().unwrap());
        }
        pause_until(start + drop.until).await;
        rig.drop_packets(&[]);
        while sender.tcp_info().unwrap().has_pending() {
            pause(ms(1)).await;
        }
        infos.push(sender.tcp_info().unwrap());
        (infos, since(start))
    };
    let receiving = async {
        receiver.read_exact(&mut [0; BYTES]).await.unwrap();
        since(start)
    };
    let ((infos, acknowledged), received) = tokio::join!(sending, receiving);
    figures.time("received after", received, Tolerance::TIMER);
    figures.time("acknowledged after", acknowledged, Tolerance::TIMER);
    figures.infos(&infos, &FIELDS);
    let info = receiver.tcp_info().unwrap();
    figures.count("data segments of the receiver", info.data_segments_in.into(), Tolerance::NONE);
}
