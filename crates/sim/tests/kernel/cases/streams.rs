//! Windows, rates and loss.

use std::cell::Cell;
use std::time::Duration;

use jackstay_sys::clock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{exchange, ms, pause, pause_until, since};
use crate::figures::{BUFFERS, Figures, Tolerance};
use crate::rig::Rig;

/// Why answers to probes of a closed window differ.
const PROBES: &str = "Linux answers at most two probes a second";
/// What the server reads at once.
const STEP: usize = 16 << 10;
/// Round trips under loss.
const ROUND_TRIPS: usize = 200;

/// The client writes until the kernels take no more, because the server does not read. Then the server reads.
pub async fn stopped_reader(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    let mut written = 0;
    while let Ok(count) = tokio::time::timeout(ms(500), client.write(&[1; 16 << 10])).await {
        written += count.unwrap();
    }
    let before = client.tcp_info().unwrap();
    figures.count("bytes taken", written as u64, Tolerance::by(0.0, 0.75, BUFFERS));
    figures.text("window is closed", format!("{:?}", before.is_window_closed()));
    pause(ms(3_000)).await;
    let info = client.tcp_info().unwrap();
    figures.count("probes without an answer", info.probes.into(), Tolerance::NONE);
    figures.count("retransmits", info.retransmits.into(), Tolerance::NONE);
    figures.time("rto", info.rto, Tolerance::TIMER);
    figures.time("last ack recv", info.last_ack_recv, Tolerance::by(0.5, 0.0, PROBES));
    figures.count(
        "segments out",
        (info.segments_out - before.segments_out).into(),
        Tolerance::NONE,
    );
    figures.count(
        "segments in",
        (info.segments_in - before.segments_in).into(),
        Tolerance::by(1.0, 0.0, PROBES),
    );
    let start = clock::now();
    let (read, at_wake_up) = (Cell::new(0), Cell::new(0));
    let reading = async {
        let mut buf = vec![0; STEP];
        while read.get() <= written {
            read.set(read.get() + server.read(&mut buf).await.unwrap());
            pause(ms(10)).await;
        }
    };
    let writing = async {
        client.write_all(&[1]).await.unwrap();
        at_wake_up.set(read.get());
    };
    tokio::join!(reading, writing);
    figures.time("everything read after", since(start), Tolerance::by(0.1, 0.75, BUFFERS));
    figures.count(
        "bytes read when the writer goes on",
        at_wake_up.get() as u64,
        Tolerance::by(0.0, 0.75, BUFFERS),
    );
    figures.count("bytes lost", (written + 1 - read.get()) as u64, Tolerance::NONE);
}

/// A transfer whose time the rate decides.
pub async fn transfer(rig: &Rig, figures: &mut Figures) {
    const BYTES: usize = 2_000_000;
    /// In bytes a second.
    const RATE: u64 = 10_000_000 / 8;
    rig.change_links(|link| (link.latency, link.rate) = (ms(10), RATE));
    let (mut client, mut server) = rig.pair().await;
    let start = clock::now();
    let (sent, mut received) = (vec![1; BYTES], vec![0; BYTES]);
    let (result, ()) = tokio::join!(server.write_all(&sent), async {
        client.read_exact(&mut received).await.unwrap();
    });
    result.unwrap();
    let time = since(start);
    // Both sides have the same links.
    assert!(time.as_secs_f64() >= BYTES as f64 / RATE as f64, "faster than the link: {time:?}");
    figures.time(
        "transferred in",
        time,
        Tolerance::by(0.1, 0.1, "headers: 4 %; slow start: 100 ms"),
    );
}

/// Times of small round trips, of whose packets one of 20 is lost.
pub async fn loss(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    rig.change_links(|link| link.loss = 0.05);
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..ROUND_TRIPS {
        let start = clock::now();
        exchange(&mut client, &mut server, 1).await;
        times.push(since(start));
    }
    times.sort();
    let late = times.iter().filter(|time| **time > ms(100)).count();
    assert!(late > 0, "the links lose nothing");
    figures.time("median", times[ROUND_TRIPS / 2], Tolerance::PROMPT);
    figures.count(
        "later than 100 ms",
        late as u64,
        Tolerance::by(16.0, 0.0, "chance: 3.7 standard deviations of one side"),
    );
    figures.time(
        "longest",
        times[ROUND_TRIPS - 1],
        Tolerance::by(0.3, 0.5, "chance: three losses in a row"),
    );
}

/// Segments that wait for an acknowledgement 10 ms and 200 ms after a request whose response is late: the first one
/// of a connection, and one after responses that were not.
pub async fn acknowledgements(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    for name in ["the first request", "a later request"] {
        let start = clock::now();
        client.write_all(&[1; 100]).await.unwrap();
        server.read_exact(&mut [0; 100]).await.unwrap();
        let mut unacknowledged = Vec::new();
        for at in [10, 200] {
            pause_until(start + ms(at)).await;
            unacknowledged.push(f64::from(client.tcp_info().unwrap().unacked));
        }
        figures.numbers(name, unacknowledged, Tolerance::NONE);
        exchange(&mut client, &mut server, 10).await;
        pause(ms(200)).await;
    }
}
