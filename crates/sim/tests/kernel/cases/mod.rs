//! The cases.

mod connect;
mod drops;
mod ends;
mod keepalive;
mod streams;

use std::time::{Duration, Instant};

use jackstay_sim::net::Side;
use jackstay_sys::clock;
use jackstay_sys::sockets::stream::TcpStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use self::drops::Drop;
use crate::Case;

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const BOTH: &[Side] = &[Side::Client, Side::Server];
const CLIENT: &[Side] = &[Side::Client];
const SERVER: &[Side] = &[Side::Server];

/// The name of each case, and its code.
pub const CASES: [(&str, Case); 26] = [
    ("connect, no answer", |rig, f| Box::pin(connect::no_answer(rig, f))),
    ("connect, no answer for 1.5 s", |rig, f| Box::pin(connect::late(rig, f, BOTH))),
    ("connect, answers lost for 1.5 s", |rig, f| Box::pin(connect::late(rig, f, SERVER))),
    ("connect, closed port", |rig, f| Box::pin(connect::refused(rig, f))),
    ("connect, stopped process", |rig, f| Box::pin(connect::stopped(rig, f))),
    ("client sends, both dropped for 1.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Client, of: BOTH, until: ms(1_100) }))
    }),
    ("client sends, both dropped for 4.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Client, of: BOTH, until: ms(4_100) }))
    }),
    ("client sends, its packets dropped for 4.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Client, of: CLIENT, until: ms(4_100) }))
    }),
    ("client sends, answers dropped for 4.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Client, of: SERVER, until: ms(4_100) }))
    }),
    ("server sends, both dropped for 1.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Server, of: BOTH, until: ms(1_100) }))
    }),
    ("server sends, both dropped for 4.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Server, of: BOTH, until: ms(4_100) }))
    }),
    ("server sends, answers dropped for 4.1 s", |rig, f| {
        Box::pin(drops::data(rig, f, Drop { sender: Side::Server, of: CLIENT, until: ms(4_100) }))
    }),
    ("two packets lost", |rig, f| Box::pin(drops::tail(rig, f))),
    ("later and later", |rig, f| Box::pin(drops::later(rig, f))),
    ("keepalive of the client", |rig, f| Box::pin(keepalive::of_client(rig, f))),
    ("keepalive of the server", |rig, f| Box::pin(keepalive::of_server(rig, f))),
    ("forgotten flow", |rig, f| Box::pin(ends::forgotten(rig, f))),
    ("close, data unread", |rig, f| Box::pin(ends::unread(rig, f))),
    ("close, then data", |rig, f| Box::pin(ends::data_after_close(rig, f))),
    ("half-close", |rig, f| Box::pin(ends::half_close(rig, f))),
    ("close, data queued", |rig, f| Box::pin(ends::queued(rig, f))),
    ("SIGKILL", |rig, f| Box::pin(ends::killed(rig, f))),
    ("stopped reader", |rig, f| Box::pin(streams::stopped_reader(rig, f))),
    ("acknowledgements", |rig, f| Box::pin(streams::acknowledgements(rig, f))),
    ("2 MB at 10 Mbit/s", |rig, f| Box::pin(streams::transfer(rig, f))),
    ("5 % loss", |rig, f| Box::pin(streams::loss(rig, f))),
];

/// Lets time pass, which is part of a case: when something is measured, or the length of a fault.
async fn pause(time: Duration) {
    tokio::time::sleep(time).await;
}

async fn pause_until(at: Instant) {
    tokio::time::sleep_until(at.into()).await;
}

/// A small request and its response, `count` times. Both ends know the time of a round trip then.
async fn exchange(client: &mut TcpStream, server: &mut TcpStream, count: usize) {
    let mut buf = [0; 100];
    for _ in 0..count {
        client.write_all(&[1; 100]).await.unwrap();
        server.read_exact(&mut buf).await.unwrap();
        server.write_all(&buf).await.unwrap();
        client.read_exact(&mut buf).await.unwrap();
    }
}

/// Reads once.
async fn read_once(stream: &mut TcpStream) -> std::io::Result<usize> {
    stream.read(&mut [0; 1 << 10]).await
}

/// Reads until the end or an error. Returns the bytes, and what has come then.
async fn read_all(stream: &mut TcpStream) -> (u64, std::io::Result<usize>) {
    let mut buf = vec![0; 64 << 10];
    let mut bytes = 0;
    loop {
        match stream.read(&mut buf).await {
            Ok(count) if count > 0 => bytes += count as u64,
            result => return (bytes, result),
        }
    }
}

/// The time since a moment.
fn since(start: Instant) -> Duration {
    clock::elapsed(start)
}
