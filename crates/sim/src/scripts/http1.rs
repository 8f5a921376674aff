//! A client that speaks HTTP/1.1: one request on a connection of its own.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::testbed::{Proxy, Testbed};

/// Sends a request with these headers and without a body, and reads until the response is complete. Returns head and body.
pub async fn request(testbed: &Testbed, proxy: &Proxy, line: &str, headers: &str) -> String {
    let network = testbed.network_of(proxy);
    let stream = network.connect(Proxy::address()).await.expect("jackstay accepts");
    let mut tls = testbed.tls();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tls.resumption = Resumption::disabled();
    let name = ServerName::try_from("localhost").expect("a name");
    let connector = TlsConnector::from(Arc::new(tls));
    let mut stream = connector.connect(name, stream).await.expect("a TLS handshake");
    let request = format!("{line} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.expect("the request is sent");
    let (mut response, mut part) = (Vec::new(), [0; 4096]);
    while !is_complete(&response) {
        match stream.read(&mut part).await {
            Ok(read @ 1..) => response.extend_from_slice(&part[..read]),
            end => panic!("{line}: the response ended with {end:?}"),
        }
    }
    String::from_utf8_lossy(&response).into_owned()
}

/// Whether a response with a `Content-Length` has arrived.
fn is_complete(response: &[u8]) -> bool {
    let text = String::from_utf8_lossy(response);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let mut headers = head.lines().filter_map(|line| line.split_once(": "));
    let length = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    length.is_some_and(|(_, length)| length.parse() == Ok(body.len()))
}
