//! How connections end.

use jackstay_sys::clock;
use jackstay_sys::sockets::stream::TcpStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{exchange, ms, pause, read_all, read_once, since};
use crate::figures::{Figures, Tolerance};
use crate::rig::{GREETING, Rig};

/// A device on the path has forgotten the connection, and resets it when a packet passes.
pub async fn forgotten(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 3).await;
    rig.reset_flows();
    let start = clock::now();
    client.write_all(&[1; 100]).await.unwrap();
    let result = read_once(&mut client).await;
    figures.time("client hears after", since(start), Tolerance::PROMPT);
    figures.result("client reads", &result);
    figures.result("client writes", &client.write(&[1; 100]).await);
    figures.count("client is closed", client.tcp_info().unwrap().closed.into(), Tolerance::NONE);
    server.write_all(&[1; 100]).await.unwrap();
    figures.result("server reads", &read_once(&mut server).await);
}

/// The server closes the socket while it has not read everything.
pub async fn unread(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 3).await;
    client.write_all(&[1; 100]).await.unwrap();
    server.write_all(&[1; 100]).await.unwrap();
    pause(ms(100)).await;
    drop(server);
    pause(ms(100)).await;
    figures.count("client is closed", client.tcp_info().unwrap().closed.into(), Tolerance::NONE);
    for at in ["first", "second", "third"] {
        figures.result(&format!("{at} read"), &read_once(&mut client).await);
    }
    figures.result("write", &client.write(&[1; 100]).await);
}

/// The server closes the socket, and the client writes.
pub async fn data_after_close(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 3).await;
    drop(server);
    pause(ms(100)).await;
    let info = client.tcp_info().unwrap();
    figures.count("client has the end", info.ended.into(), Tolerance::NONE);
    figures.count("client is closed by that", info.closed.into(), Tolerance::NONE);
    figures.result("first write", &client.write(&[1; 100]).await);
    pause(ms(100)).await;
    figures.count("client is closed", client.tcp_info().unwrap().closed.into(), Tolerance::NONE);
    figures.result("second write", &client.write(&[1; 100]).await);
    figures.result("third write", &client.write(&[1; 100]).await);
    figures.result("read", &read_once(&mut client).await);
}

/// The server ends its direction, and reads on.
pub async fn half_close(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 3).await;
    server.write_all(&[1; 100]).await.unwrap();
    server.shutdown_write().unwrap();
    pause(ms(100)).await;
    let (bytes, result) = read_all(&mut client).await;
    figures.count("client reads", bytes, Tolerance::NONE);
    figures.result("and then", &result);
    figures.result("server writes", &server.write(&[1; 100]).await);
    client.write_all(&[1; 1_000]).await.unwrap();
    client.shutdown().await.unwrap();
    let (bytes, result) = read_all(&mut server).await;
    figures.count("server reads", bytes, Tolerance::NONE);
    figures.result("and after that", &result);
    let closed = [&client, &server].map(|end| end.tcp_info().unwrap().closed.into());
    figures.numbers("both are closed", closed.map(|is: u8| is.into()).to_vec(), Tolerance::NONE);
}

/// The client closes the socket while what it has written is unread, and partly unsent.
pub async fn queued(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    client.write_all(&vec![1; 100_000]).await.unwrap();
    drop(client);
    pause(ms(1_000)).await;
    let (bytes, result) = read_all(&mut server).await;
    figures.count("server reads", bytes, Tolerance::NONE);
    figures.result("and then", &result);
}

/// The process of the server is killed.
pub async fn killed(rig: &Rig, figures: &mut Figures) {
    let mut peer = rig.start_peer();
    let mut idle = greeted(rig).await;
    let mut unread = greeted(rig).await;
    unread.write_all(&[1; 100]).await.unwrap();
    let mut greeting_unread = rig.connect().await.unwrap();
    pause(ms(100)).await;
    peer.stop();
    // It is not accepted any more.
    let mut waiting = rig.connect().await.unwrap();
    pause(ms(100)).await;
    peer.kill();
    pause(ms(100)).await;
    figures.result("idle connection", &read_once(&mut idle).await);
    figures.result("connection with unread data", &read_once(&mut unread).await);
    let (bytes, result) = read_all(&mut greeting_unread).await;
    figures.count("bytes from before", bytes, Tolerance::NONE);
    figures.result("and then", &result);
    figures.result("connection in the accept queue", &read_once(&mut waiting).await);
    figures.result("new connection", &rig.connect().await.map(|_| 0));
}

/// A connection that the peer has accepted.
async fn greeted(rig: &Rig) -> TcpStream {
    let mut stream = rig.connect().await.unwrap();
    stream.read_exact(&mut [0; GREETING.len()]).await.unwrap();
    stream
}
