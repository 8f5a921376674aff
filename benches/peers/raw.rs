//! The smallest protocol that tells passthroughs apart: bytes and nothing else. A proxy at L4 does
//! not care what it passes, so neither end spends its time on TLS here.
//!
//! The first byte says what a connection is for; TLS (a proxy's health check) begins with another.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::Result;

/// Answered with the same byte, then closed.
const ONCE: u8 = b'E';
/// Answered with the same byte, then open until the client closes.
const IDLE: u8 = b'I';
/// Followed by a length: answered with so many bytes, then closed.
const DOWN: u8 = b'D';
/// Followed by bytes to the end; answered with one, then closed.
const UP: u8 = b'U';

/// Bytes written at once. Go's server writes a large LIST in pieces of this order.
const CHUNK: usize = 32 * 1024;
/// Bytes read at once.
const BUFFER: usize = 256 * 1024;

/// No single exchange takes longer than this, however busy the machine.
const ANSWER: Duration = Duration::from_secs(60);

/// Whether a connection that begins with this byte is ours.
pub fn is_ours(first: u8) -> bool {
    [ONCE, IDLE, DOWN, UP].contains(&first)
}

/// The origin's side of one connection.
pub async fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    match stream.read_u8().await? {
        DOWN => {
            let chunk = vec![b'x'; CHUNK];
            let mut left = stream.read_u64().await?;
            while left > 0 {
                let len = left.min(CHUNK as u64) as usize;
                stream.write_all(&chunk[..len]).await?;
                left -= len as u64;
            }
        }
        UP => {
            let mut buffer = vec![0; BUFFER];
            while stream.read(&mut buffer).await? > 0 {}
            stream.write_u8(UP).await?;
        }
        IDLE => {
            stream.write_u8(IDLE).await?;
            stream.read_u8().await?;
        }
        other => stream.write_u8(other).await?,
    }
    Ok(())
}

/// One connection, one byte there and back.
pub async fn once(address: SocketAddr) -> Result<()> {
    let exchange = async {
        let mut stream = begin(address, ONCE).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        if answer != [ONCE] {
            return Err(format!("{} bytes instead of one", answer.len()).into());
        }
        Ok(())
    };
    tokio::time::timeout(ANSWER, exchange).await.map_err(|_| "one byte did not come back")?
}

/// A connection that has proven to reach the origin, and then idles.
pub async fn idle(address: SocketAddr) -> Result<TcpStream> {
    let exchange = async {
        let mut stream = begin(address, IDLE).await?;
        match stream.read_u8().await? {
            IDLE => Ok(stream),
            other => Err(format!("an idle flow was answered with {other}").into()),
        }
    };
    tokio::time::timeout(ANSWER, exchange).await.map_err(|_| "an idle flow did not open")?
}

/// Reads `bytes` from the origin.
pub async fn down(address: SocketAddr, bytes: u64) -> Result<()> {
    let exchange = async {
        let mut stream = begin(address, DOWN).await?;
        stream.write_u64(bytes).await?;
        let (mut buffer, mut got) = (vec![0; BUFFER], 0);
        loop {
            match stream.read(&mut buffer).await? as u64 {
                0 if got == bytes => return Ok(()),
                0 => return Err(format!("{got} of {bytes} bytes").into()),
                len => got += len,
            }
        }
    };
    tokio::time::timeout(ANSWER, exchange).await.map_err(|_| "the bytes did not come")?
}

/// Writes `bytes` to the origin.
pub async fn up(address: SocketAddr, bytes: u64) -> Result<()> {
    let exchange = async {
        let mut stream = begin(address, UP).await?;
        let chunk = vec![b'x'; CHUNK];
        let mut left = bytes;
        while left > 0 {
            let len = left.min(CHUNK as u64) as usize;
            stream.write_all(&chunk[..len]).await?;
            left -= len as u64;
        }
        stream.shutdown().await?;
        match stream.read_u8().await? {
            UP => Ok(()),
            other => Err(format!("an upload was answered with {other}").into()),
        }
    };
    tokio::time::timeout(ANSWER, exchange).await.map_err(|_| "the bytes did not go")?
}

async fn begin(address: SocketAddr, first: u8) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    stream.write_u8(first).await?;
    Ok(stream)
}
