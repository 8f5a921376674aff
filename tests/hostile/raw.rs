//! An attacker's connection: raw HTTP/2 frames (RFC 9113) over TLS, without flow control and without limits.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// The SETTINGS parameter of the window of a new stream.
pub const INITIAL_WINDOW_SIZE: u16 = 4;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The default of `SETTINGS_MAX_FRAME_SIZE`.
const MAX_FRAME_SIZE: usize = 16_384;

pub type Tls = TlsStream<TcpStream>;

/// Encodes a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Encodes SETTINGS.
pub fn settings(parameters: &[(u16, u32)]) -> Vec<u8> {
    let encode =
        |(name, value): &(u16, u32)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(SETTINGS, 0, 0, &parameters.iter().flat_map(encode).collect::<Vec<_>>())
}

/// Encodes a header block of literal fields that are not indexed (RFC 7541, 6.2.2).
pub fn header_block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        string(&mut block, name);
        string(&mut block, value);
    }
    block
}

/// A string literal without Huffman coding; its length is an integer with a prefix of 7 bits.
fn string(block: &mut Vec<u8>, text: &str) {
    let mut length = text.len();
    if length < 127 {
        block.push(length as u8);
    } else {
        block.push(127);
        length -= 127;
        while length >= 128 {
            block.push((length % 128) as u8 | 128);
            length /= 128;
        }
        block.push(length as u8);
    }
    block.extend(text.as_bytes());
}

/// Encodes HEADERS, and CONTINUATION where one frame is not enough.
pub fn headers(stream: u32, end_stream: bool, fields: &[(&str, &str)]) -> Vec<u8> {
    let block = header_block(fields);
    let mut pieces = block.chunks(MAX_FRAME_SIZE).peekable();
    let mut frames = Vec::new();
    let mut kind = HEADERS;
    while let Some(piece) = pieces.next() {
        let end_headers = if pieces.peek().is_none() { END_HEADERS } else { 0 };
        let end_stream = if kind == HEADERS && end_stream { END_STREAM } else { 0 };
        frames.extend(frame(kind, end_headers | end_stream, stream, piece));
        kind = CONTINUATION;
    }
    frames
}

/// Encodes the request `GET path`, with these fields besides the pseudo-header fields.
pub fn get(stream: u32, path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut fields =
        vec![(":method", "GET"), (":scheme", "https"), (":authority", "api"), (":path", path)];
    fields.extend(more);
    headers(stream, true, &fields)
}

/// TLS settings of an attacker, which accepts any server.
pub fn tls_config(
    alpn: &str,
    chain: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
    let mut config = match chain {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Arc::new(config)
}

pub async fn connect_tls(server: SocketAddr, config: &Arc<ClientConfig>) -> io::Result<Tls> {
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    TlsConnector::from(Arc::clone(config)).connect(ServerName::from(server.ip()), stream).await
}

/// Connects, and sends the preface with these SETTINGS.
pub async fn connect_h2(
    server: SocketAddr,
    config: &Arc<ClientConfig>,
    parameters: &[(u16, u32)],
) -> io::Result<Tls> {
    let mut tls = connect_tls(server, config).await?;
    tls.write_all(&[PREFACE, &settings(parameters)].concat()).await?;
    tls.flush().await?;
    Ok(tls)
}

/// Reads and discards until the server closes the connection.
pub async fn drain(mut stream: impl tokio::io::AsyncRead + Unpin) {
    let mut buffer = vec![0; 65_536];
    while matches!(stream.read(&mut buffer).await, Ok(1..)) {}
}

#[derive(Debug)]
struct AnyServer(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
