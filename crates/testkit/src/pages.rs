//! Pages over HTTP/1.1 without TLS, as the admin endpoint serves them.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::wait::PATIENCE;

fn request(server: SocketAddr, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n")
}

/// Head and body of a page.
///
/// # Errors
/// No process listens, or the connection ends early.
pub async fn get(server: SocketAddr, path: &str) -> io::Result<String> {
    let read = async {
        let mut stream = TcpStream::connect(server).await?;
        stream.write_all(request(server, path).as_bytes()).await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        Ok(page)
    };
    tokio::time::timeout(PATIENCE, read).await?
}

/// [`get`], blocking.
///
/// # Errors
/// See [`get`].
pub fn get_blocking(server: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = std::net::TcpStream::connect(server)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(request(server, path).as_bytes())?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    Ok(page)
}
