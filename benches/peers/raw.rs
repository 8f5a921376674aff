//! A minimal byte protocol for the measurements at L4, where proxies do not interpret the bytes. Client and origin do
//! not use TLS, to save their CPU.
//!
//! The first byte selects the operation. It differs from the first byte of TLS, which health checks send.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::Result;

/// The origin returns the same byte and closes the connection.
const ONCE: u8 = b'E';
/// The origin returns the same byte and waits until the client closes.
const IDLE: u8 = b'I';
/// A length follows. The origin sends that many bytes and closes the connection.
const DOWN: u8 = b'D';
/// Data follows until the client ends its direction. The origin then returns one byte and closes the connection.
const UP: u8 = b'U';

/// Bytes per write, similar to Go's server for a large LIST.
const CHUNK: usize = 32 * 1024;
/// Bytes per read.
const BUFFER: usize = 256 * 1024;

/// Timeout of an exchange, long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Whether this first byte belongs to the protocol.
pub fn is_raw(first: u8) -> bool {
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

/// Opens a connection and exchanges one byte.
pub async fn once(address: SocketAddr) -> Result<()> {
    let exchange = async {
        let mut stream = begin(address, ONCE).await?;
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await?;
        if response != [ONCE] {
            return Err(format!("{} bytes instead of one", response.len()).into());
        }
        Ok(())
    };
    tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_| "timeout: one byte")?
}

/// Opens a connection, checks that it reaches the origin, and leaves it idle.
pub async fn idle(address: SocketAddr) -> Result<TcpStream> {
    let exchange = async {
        let mut stream = begin(address, IDLE).await?;
        match stream.read_u8().await? {
            IDLE => Ok(stream),
            other => Err(format!("unexpected byte {other} on an idle flow").into()),
        }
    };
    tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_| "timeout: opening an idle flow")?
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
    tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_| "timeout: download")?
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
            other => Err(format!("unexpected byte {other} after an upload").into()),
        }
    };
    tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_| "timeout: upload")?
}

/// Connects and sends the first byte.
async fn begin(address: SocketAddr, first: u8) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    stream.write_u8(first).await?;
    Ok(stream)
}
