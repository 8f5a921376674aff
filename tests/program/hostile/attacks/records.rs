//! TLS records that carry a byte, or nothing. Each costs a decryption.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use rustls::{ClientConfig, ConnectionTrafficSecrets};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::repeat;
use crate::hostile::raw::{connect_tls, drain, get, tls_config};
use crate::hostile::rig::{Target, VALID_TOKEN};
use crate::support::http2::{PREFACE, WINDOW_UPDATE, frame, settings};

/// Type of a record with application data (RFC 8446, 5.1).
const APPLICATION_DATA: u8 = 23;
/// Bytes of the value that makes a request large.
const FILLER: usize = 15_000;
/// Bytes of the tag of a record.
const TAG: usize = 16;
/// Bytes that are written at once, so that the server always has more to read.
const BATCH: usize = 1 << 20;

/// Encrypts records of TLS 1.3, also ones that rustls does not send.
struct Sealer {
    key: LessSafeKey,
    iv: [u8; 12],
    sequence: u64,
}

impl Sealer {
    /// Takes over what a client sends after its handshake.
    async fn connect(
        server: SocketAddr,
        config: &Arc<ClientConfig>,
    ) -> io::Result<(TcpStream, Self)> {
        let (stream, session) = connect_tls(server, config).await?.into_inner();
        let (sequence, secrets) = session.dangerous_extract_secrets().unwrap().tx;
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => panic!("another cipher suite"),
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).unwrap());
        Ok((stream, Self { key, iv: iv.as_ref().try_into().unwrap(), sequence }))
    }

    /// Appends one record to `out`.
    fn seal(&mut self, content: &[u8], out: &mut Vec<u8>) {
        let length = u16::try_from(content.len() + 1 + TAG).unwrap().to_be_bytes();
        let head = [APPLICATION_DATA, 3, 3, length[0], length[1]];
        out.extend_from_slice(&head);
        let payload = out.len();
        out.extend_from_slice(content);
        out.push(APPLICATION_DATA);
        let mut nonce = self.iv;
        for (byte, sequence) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= sequence;
        }
        self.sequence += 1;
        let nonce = Nonce::assume_unique_for_key(nonce);
        let aad = Aad::from(head);
        let tag = self.key.seal_in_place_separate_tag(nonce, aad, &mut out[payload..]).unwrap();
        out.extend_from_slice(tag.as_ref());
    }
}

fn config(alpn: &str) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(&tls_config(alpn, None));
    config.enable_secret_extraction = true;
    Arc::new(config)
}

/// Large requests with a valid token over HTTP/2, in records of one byte.
pub async fn of_one_byte(target: &Target, connections: usize) {
    let (server, config) = (target.server, config("h2"));
    let grant = frame(WINDOW_UPDATE, 0, 0, &(1_u32 << 30).to_be_bytes());
    let preface: Arc<[u8]> = [PREFACE, &settings(&[]), &grant].concat().into();
    let (token, filler) = (format!("Bearer {VALID_TOKEN}"), "x".repeat(FILLER));
    repeat(connections, |_| {
        let (config, preface) = (Arc::clone(&config), Arc::clone(&preface));
        let fields = [("authorization", token.clone()), ("x-filler", filler.clone())];
        let request = move |n: u32| {
            let fields = fields.each_ref().map(|(name, value)| (*name, value.as_str()));
            get(2 * n + 1, "/version", &fields)
        };
        async move { send(server, &config, &preface, request, 0).await }
    })
    .await;
}

/// Large requests without a credential over HTTP/1.1, with this number of empty records before each byte.
pub async fn empty(target: &Target, connections: usize, empty: usize) {
    let (server, config) = (target.server, config("http/1.1"));
    let filler = "x".repeat(FILLER);
    let text = format!("GET /version HTTP/1.1\r\nHost: api\r\nX-Filler: {filler}\r\n\r\n");
    repeat(connections, |_| {
        let (config, text) = (Arc::clone(&config), text.clone().into_bytes());
        async move { send(server, &config, &[], |_| text.clone(), empty).await }
    })
    .await;
}

/// Sends requests until the server closes the connection.
async fn send(
    server: SocketAddr,
    config: &Arc<ClientConfig>,
    preface: &[u8],
    request: impl Fn(u32) -> Vec<u8>,
    empty: usize,
) -> io::Result<()> {
    let (stream, mut sealer) = Sealer::connect(server, config).await?;
    let (reader, mut writer) = stream.into_split();
    tokio::spawn(drain(reader));
    let mut out = Vec::new();
    if !preface.is_empty() {
        sealer.seal(preface, &mut out);
    }
    for n in 0.. {
        for byte in request(n) {
            (0..empty).for_each(|_| sealer.seal(&[], &mut out));
            sealer.seal(&[byte], &mut out);
            if out.len() >= BATCH {
                writer.write_all(&out).await?;
                out.clear();
            }
        }
    }
    Ok(())
}
