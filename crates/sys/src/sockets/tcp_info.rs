//! Reads `TCP_INFO`, the kernel's state of a TCP connection.

use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::AsRawFd;
use std::time::Duration;

use jackstay_core::tcp_info::TcpInfo;

/// `TCP_CLOSE` of `net/tcp_states.h`; the libc crate has no constants for the states.
const TCP_CLOSE: u8 = 7;
/// States after the peer's FIN: `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`, `TCP_CLOSING`, `TCP_TIME_WAIT`.
const AFTER_FIN: [u8; 4] = [8, 9, 11, 6];
/// Length of the structure up to and including `tcpi_data_segs_out` (Linux 4.6).
const MIN_LENGTH: usize = offset_of!(libc::tcp_info, tcpi_data_segs_out) + size_of::<u32>();
/// Length of the structure up to and including `tcpi_bytes_retrans` (Linux 4.19).
const LENGTH_WITH_SENT: usize = offset_of!(libc::tcp_info, tcpi_bytes_retrans) + size_of::<u64>();
/// Length of the structure up to and including `tcpi_snd_wnd` (Linux 5.4).
const LENGTH_WITH_WINDOW: usize = offset_of!(libc::tcp_info, tcpi_snd_wnd) + size_of::<u32>();

/// Reads `TCP_INFO` of a connected TCP socket.
///
/// # Errors
/// What `getsockopt(2)` returns, or `Unsupported` on kernels before Linux 4.6.
pub fn read(socket: &impl AsRawFd) -> io::Result<TcpInfo> {
    let mut raw = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `raw` is valid for writes of `len` bytes. The kernel writes at most `len` bytes and stores in
    // `len` how many it wrote. A wrong descriptor is an error, not undefined behaviour.
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
    let len = len as usize;
    if len < MIN_LENGTH {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "TCP_INFO is too short"));
    }
    // SAFETY: every byte is initialised, with zeroes where an older kernel wrote nothing, and the structure
    // has only integer fields, for which every bit pattern is valid.
    #[allow(unsafe_code)]
    let raw = unsafe { raw.assume_init() };
    let has_window = len >= LENGTH_WITH_WINDOW;
    let handed_over = raw.tcpi_bytes_sent.wrapping_sub(raw.tcpi_bytes_retrans);
    Ok(TcpInfo {
        closed: raw.tcpi_state == TCP_CLOSE,
        ended: AFTER_FIN.contains(&raw.tcpi_state),
        retransmits: raw.tcpi_retransmits,
        probes: raw.tcpi_probes,
        rto: Duration::from_micros(raw.tcpi_rto.into()),
        rtt: Duration::from_micros(raw.tcpi_rtt.into()),
        rtt_deviation: Duration::from_micros(raw.tcpi_rttvar.into()),
        min_rtt: Duration::from_micros(raw.tcpi_min_rtt.into()),
        send_mss: raw.tcpi_snd_mss,
        unacked: raw.tcpi_unacked,
        last_data_recv: Duration::from_millis(raw.tcpi_last_data_recv.into()),
        last_ack_recv: Duration::from_millis(raw.tcpi_last_ack_recv.into()),
        retransmitted: raw.tcpi_total_retrans,
        bytes_acked: raw.tcpi_bytes_acked,
        bytes_received: raw.tcpi_bytes_received,
        receive_rtt: Duration::from_micros(raw.tcpi_rcv_rtt.into()),
        segments_out: raw.tcpi_segs_out,
        segments_in: raw.tcpi_segs_in,
        data_segments_in: raw.tcpi_data_segs_in,
        out_of_order: raw.tcpi_rcv_ooopack,
        notsent_bytes: raw.tcpi_notsent_bytes,
        handed_over: (len >= LENGTH_WITH_SENT).then_some(handed_over),
        data_segments_sent: raw.tcpi_data_segs_out,
        send_window: has_window.then_some(raw.tcpi_snd_wnd),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn read_counts_acknowledged_bytes_and_segments() {
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
        assert!(after.min_rtt <= after.rtt && after.rtt < Duration::from_secs(5), "{after:?}");
        assert!(after.segments_in > after.data_segments_in, "{after:?}");
        assert_eq!(after.data_segments_in - before.data_segments_in, 1, "{after:?}");
    }

    #[test]
    fn read_while_the_peer_does_not_read_shows_pending_bytes() {
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
    fn read_shows_fin_and_reset_while_data_are_unread() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(b"unread").unwrap();
        assert!(!read(&server).unwrap().closed);
        assert!(!read(&client).unwrap().ended);
        server.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!read(&server).unwrap().ended);
        client.peek(&mut [0; 1]).unwrap();
        while !read(&client).unwrap().ended {
            std::thread::yield_now();
        }
        // Because of the unread bytes, the close sends RST.
        drop(client);
        assert!(read(&server).unwrap().closed);
    }

    #[test]
    fn read_of_a_non_socket_returns_error() {
        assert!(read(&std::io::stderr()).is_err());
    }

    /// Offsets of the kernel's `struct tcp_info` (`linux/tcp.h`), up to the last field that is read.
    #[test]
    fn libc_tcp_info_has_the_layout_of_the_kernel() {
        assert_eq!(offset_of!(libc::tcp_info, tcpi_bytes_acked), 120);
        assert_eq!(offset_of!(libc::tcp_info, tcpi_notsent_bytes), 144);
        assert_eq!(offset_of!(libc::tcp_info, tcpi_min_rtt), 148);
        assert_eq!(offset_of!(libc::tcp_info, tcpi_data_segs_out), 156);
        assert_eq!(offset_of!(libc::tcp_info, tcpi_rcv_ooopack), 224);
        assert_eq!(offset_of!(libc::tcp_info, tcpi_snd_wnd), 228);
    }
}
