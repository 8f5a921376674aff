//! `TCP_INFO`: what the kernel knows about the life of a connection.
//!
//! An HTTP/2 PING proves life end to end, but it is answered by a process; a segment is answered
//! by a kernel. The two together tell a dead path from a stopped process and from plain loss.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The part of `struct tcp_info` (`linux/tcp.h`) that is evidence of life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Nothing comes and nothing goes any more: the peer has reset the connection, the kernel has
    /// given it up, or both sides have ended.
    pub closed: bool,
    /// The peer has ended its direction: all that it will ever say has come.
    pub ended: bool,
    /// Retransmission timeouts in a row without anything of ours being acknowledged.
    pub retransmits: u8,
    /// Keepalive and window probes sent since the last segment that carried an ACK.
    pub probes: u8,
    /// The retransmission timeout now in force.
    pub rto: Duration,
    /// Largest segment that we send.
    pub send_mss: u32,
    /// Segments sent and not yet acknowledged.
    pub unacked: u32,
    /// Segments sent again, in all.
    pub retransmitted: u32,
    /// Segments sent, in all.
    pub segments_out: u32,
    /// Segments that arrived, in all (RFC 4898 tcpEStatsPerfSegsIn).
    pub segments_in: u32,
    /// Those of them with data, again and again included (RFC 4898 tcpEStatsPerfDataSegsIn).
    pub data_segments_in: u32,
    /// Those with data that arrived before what comes before them; 0 on a kernel older than 5.4.
    pub out_of_order: u32,
    /// Time since the last segment that carried an ACK; every segment of a live peer does.
    pub last_ack_recv: Duration,
    /// Time since the last segment with data that were new and next in order.
    pub last_data_recv: Duration,
    /// Bytes that the peer has acknowledged (RFC 4898 tcpEStatsAppHCThruOctetsAcked).
    pub bytes_acked: u64,
    /// Bytes in the send queue that were never sent. A packet that our own netfilter dropped in
    /// its output hook counts here, not as unacknowledged.
    pub notsent_bytes: u32,
    /// Segments with data that were sent, again and again included (RFC 4898 tcpEStatsPerfDataSegsOut,
    /// Linux 4.6); 0 on older kernels.
    pub data_segments_sent: u32,
    /// Room that the peer has announced; `None` on a kernel older than 5.4.
    pub send_window: Option<u32>,
}

impl TcpInfo {
    /// Whether bytes of ours still wait for the peer's acknowledgement.
    pub fn has_pending(&self) -> bool {
        self.unacked > 0 || self.notsent_bytes > 0
    }

    /// Time since the last sign of life: any segment.
    pub fn silent(&self) -> Duration {
        self.last_ack_recv.min(self.last_data_recv)
    }

    /// Segments that arrived and were not the same data again: the rest of a stream that goes on,
    /// and acknowledgements alone, as keepalives are answered with. It grows with each of them;
    /// data that arrived in order are seen by [`Self::last_data_recv`].
    pub fn fresh_segments(&self) -> u32 {
        self.segments_in.wrapping_sub(self.data_segments_in).wrapping_add(self.out_of_order)
    }

    /// Whether what was not sent waits for room at the peer, rather than for nothing: a stack
    /// holds a segment back only if it does not fit whole (RFC 9293 section 3.8.6.2.1). `None` if
    /// the kernel does not tell.
    pub fn is_window_closed(&self) -> Option<bool> {
        let window = self.send_window?;
        Some(self.notsent_bytes > 0 && window < self.send_mss.min(self.notsent_bytes))
    }
}

/// The state of a connection that is over (`net/tcp_states.h`); the libc crate has no constant for it.
const TCP_CLOSE: u8 = 7;
/// Those in which the peer's FIN has come: `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`, `TCP_CLOSING`,
/// `TCP_TIME_WAIT`.
const AFTER_FIN: [u8; 4] = [8, 9, 11, 6];
/// Length of `struct tcp_info` up to and including `tcpi_notsent_bytes` (Linux 4.6).
const NEEDED: usize = 148;
/// The same up to and including `tcpi_rcv_ooopack` and `tcpi_snd_wnd` (Linux 5.4).
const WITH_WINDOW: usize = 232;

/// Reads `TCP_INFO` of a connected TCP socket.
///
/// # Errors
/// What `getsockopt` returns, or `Unsupported` on a kernel older than 4.6.
pub fn read(socket: &impl AsRawFd) -> io::Result<TcpInfo> {
    let mut raw = [0_u8; 256];
    let mut len = raw.len() as libc::socklen_t;
    // SAFETY: `raw` is valid for writes of `len` bytes and outlives the call; the kernel writes at
    // most `len` bytes and stores how many it wrote. Any descriptor is allowed: a wrong one is an
    // error, not undefined behaviour.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            raw.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if (len as usize) < NEEDED {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "TCP_INFO is too short"));
    }
    Ok(parse(&raw, len as usize))
}

/// Offsets as in `linux/tcp.h`; the structure only ever grows at its end.
fn parse(raw: &[u8; 256], len: usize) -> TcpInfo {
    let u32_at = |at: usize| u32::from_ne_bytes(raw[at..at + 4].try_into().unwrap_or_default());
    let u64_at = |at: usize| u64::from_ne_bytes(raw[at..at + 8].try_into().unwrap_or_default());
    TcpInfo {
        closed: raw[0] == TCP_CLOSE,
        ended: AFTER_FIN.contains(&raw[0]),
        retransmits: raw[2],
        probes: raw[3],
        rto: Duration::from_micros(u32_at(8).into()),
        send_mss: u32_at(16),
        unacked: u32_at(24),
        last_data_recv: Duration::from_millis(u32_at(52).into()),
        last_ack_recv: Duration::from_millis(u32_at(56).into()),
        retransmitted: u32_at(100),
        bytes_acked: u64_at(120),
        segments_out: u32_at(136),
        segments_in: u32_at(140),
        data_segments_in: u32_at(152),
        out_of_order: if len >= WITH_WINDOW { u32_at(224) } else { 0 },
        notsent_bytes: u32_at(144),
        data_segments_sent: u32_at(156),
        send_window: (len >= WITH_WINDOW).then(|| u32_at(228)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn acknowledged_bytes_are_seen() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let before = read(&client).unwrap();
        client.write_all(&[7; 1000]).unwrap();
        server.read_exact(&mut [0; 1000]).unwrap();
        server.write_all(b"x").unwrap();
        client.read_exact(&mut [0; 1]).unwrap();
        let after = read(&client).unwrap();
        assert_eq!(after.bytes_acked - before.bytes_acked, 1000);
        assert!(!after.has_pending());
        assert!(after.segments_out > before.segments_out, "{before:?} {after:?}");
        assert!(after.rto >= Duration::from_millis(200), "{after:?}");
        assert!(after.last_data_recv < Duration::from_secs(5), "{after:?}");
        assert!(after.segments_in > after.data_segments_in, "{after:?}");
        assert_eq!(after.data_segments_in - before.data_segments_in, 1, "{after:?}");
    }

    #[test]
    fn a_reader_that_does_not_read_leaves_bytes_pending() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_server, _) = listener.accept().unwrap();
        client.set_nonblocking(true).unwrap();
        while client.write(&[0; 4096]).is_ok() {}
        let info = read(&client).unwrap();
        assert!(info.has_pending());
        // Linux 5.4 and later.
        if info.send_window.is_some() && info.notsent_bytes > 0 && info.unacked == 0 {
            assert_eq!(info.is_window_closed(), Some(true), "{info:?}");
        }
    }

    #[test]
    fn a_reset_is_seen_while_nobody_reads() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(b"unread").unwrap();
        assert!(!read(&server).unwrap().closed);
        assert!(!read(&client).unwrap().ended);
        server.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!read(&server).unwrap().ended);
        // What was not read makes it a reset.
        let mut byte = [0; 1];
        client.peek(&mut byte).unwrap();
        while !read(&client).unwrap().ended {
            std::thread::yield_now();
        }
        drop(client);
        assert!(read(&server).unwrap().closed);
    }

    #[test]
    fn not_a_tcp_socket_is_an_error() {
        assert!(read(&std::io::stderr()).is_err());
    }
}
