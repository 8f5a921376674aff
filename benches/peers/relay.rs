//! A TCP relay that delays every byte, in a process of its own: the line to an apiserver in another region. It has no
//! limit of bytes under way and no loss, so what is slow on it is slow because of windows and round trips.
//!
//! The process is this program with the argument `relay`. It prints its address and serves until its standard input
//! closes.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use crate::Result;

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// Relays connections to `target`, each direction delayed by `delay`, until standard input ends.
pub fn run(target: SocketAddr, delay: Duration) -> Result<()> {
    thread::spawn(|| {
        let _ = io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    println!("{}", listener.local_addr()?);
    io::stdout().flush()?;
    for client in listener.incoming() {
        // Client and server see a failure.
        let Ok(client) = client else { continue };
        let Ok(server) = TcpStream::connect(target) else { continue };
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        direction(client.try_clone()?, server.try_clone()?, delay);
        direction(server, client, delay);
    }
    Ok(())
}

/// Starts two threads: one reads as fast as the sender writes, one writes each piece when it is due.
fn direction(mut from: TcpStream, to: TcpStream, delay: Duration) {
    let (send, receive) = channel();
    thread::spawn(move || deliver(&receive, to));
    thread::spawn(move || {
        let mut buffer = vec![0; PIECE];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if send.send((Instant::now() + delay, buffer[..length].to_vec())).is_err() {
                return;
            }
        }
        let _ = send.send((Instant::now() + delay, Vec::new()));
    });
}

/// Writes pieces when they are due; an empty one is the end.
fn deliver(pieces: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream) {
    while let Ok((due, piece)) = pieces.recv() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        if piece.is_empty() || to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
