//! Finds the message size from which `splice(2)` needs less CPU than copying. `proxy::passthrough::pump` switches at
//! that size.
//!
//! ```text
//! cargo bench --bench splice
//! ```
//!
//! One thread moves messages between two loopback connections, as a passthrough listener does, either through a
//! 64 KiB buffer or through a pipe. The figure is the CPU time of that thread, as the median of interleaved rounds.

use std::{
    io::{Read, Result, Write},
    net::{TcpListener, TcpStream},
    thread,
};

use jackstay_sys::sockets::splice::SplicePipe;

/// The same size as in `proxy::passthrough::pump`.
const BUFFER: usize = 64 * 1024;
/// Message sizes in bytes.
const SIZES: [usize; 8] = [256, 1 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 4 << 20];
/// Bytes of a sample, with at least 8 and at most [`MAX_MESSAGES`] messages.
const BYTES: usize = 128 << 20;
const MAX_MESSAGES: usize = 40_000;
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    if !std::env::args().any(|arg| arg == "--bench") {
        println!("run by `cargo bench --bench splice`");
        return Ok(());
    }
    println!("{:>12} {:>22} {:>22}", "message", "copied, CPU-ms per MB", "spliced, CPU-ms per MB");
    for size in SIZES {
        let (mut copied, mut spliced) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            copied.push(sample(size, false)?);
            spliced.push(sample(size, true)?);
        }
        println!("{size:>12} {:>22.3} {:>22.3}", median(copied), median(spliced));
    }
    Ok(())
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Milliseconds of CPU per megabyte.
fn sample(size: usize, splice: bool) -> Result<f64> {
    let ((mut client, from), (to, mut server)) = (pair()?, pair()?);
    let messages = (BYTES / size).clamp(8, MAX_MESSAGES);
    let mover = thread::spawn(move || move_messages(from, to, splice));
    let sink = thread::spawn(move || -> Result<()> {
        let mut message = vec![0; size];
        for _ in 0..messages {
            server.read_exact(&mut message)?;
            // The client waits for this byte before it sends the next message.
            server.write_all(&[1])?;
        }
        Ok(())
    });
    let message = vec![7; size];
    for _ in 0..messages {
        client.write_all(&message)?;
        client.read_exact(&mut [0])?;
    }
    drop(client);
    let cpu_ns = mover.join().expect("no panic")?;
    sink.join().expect("no panic")?;
    let (cpu_ms, megabytes) = (cpu_ns / 1e6, (messages * size) as f64 / 1e6);
    Ok(cpu_ms / megabytes)
}

/// Moves messages in one direction until the client closes. Returns the CPU time of this thread in nanoseconds; another
/// thread returns the acknowledgements.
fn move_messages(mut from: TcpStream, mut to: TcpStream, splice: bool) -> Result<f64> {
    let (mut back_from, mut back_to) = (to.try_clone()?, from.try_clone()?);
    let back = thread::spawn(move || {
        let mut byte = [0];
        while back_from.read_exact(&mut byte).is_ok() && back_to.write_all(&byte).is_ok() {}
    });
    let before = thread_cpu_ns()?;
    let mut pipe = SplicePipe::acquire()?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = if splice {
            let n = pipe.fill(&from)?;
            while pipe.buffered() > 0 {
                pipe.drain(&to)?;
            }
            n
        } else {
            let n = from.read(&mut buffer)?;
            to.write_all(&buffer[..n])?;
            n
        };
        if n == 0 {
            break;
        }
    }
    let used = thread_cpu_ns()? - before;
    to.shutdown(std::net::Shutdown::Both)?;
    back.join().expect("no panic");
    Ok(used)
}

/// CPU time of the calling thread (kernel documentation, scheduler/sched-stats).
fn thread_cpu_ns() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let first = text.split(' ').next().and_then(|number| number.parse().ok());
    first.ok_or_else(|| std::io::Error::other("/proc/thread-self/schedstat has no number"))
}

/// Both ends of a loopback connection.
fn pair() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let (two, _) = listener.accept()?;
    for stream in [&one, &two] {
        stream.set_nodelay(true)?;
    }
    Ok((one, two))
}
