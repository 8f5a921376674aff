//! Moves bytes from one socket to another inside the kernel: `splice(2)` through a pipe.
//!
//! A pipe costs two descriptors and, while bytes are in it, pages; so pipes are pooled by thread
//! and held only while bytes move. They are filled only when empty: then "would block" can only
//! mean that the socket has nothing to give.

use std::cell::RefCell;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsRawFd;

use crate::net::process::resource_limits;

/// Bytes a pipe takes: what is moved in one go. The kernel gives an unprivileged user 64 MiB of
/// pipes in all (`fs.pipe-user-pages-soft`) and then smaller ones, which work as well.
const CAPACITY: libc::c_int = 512 * 1024;
/// Empty pipes kept by a thread: more transfers than this are rarely in full flow at once.
const POOLED: usize = 32;

thread_local! {
    static POOL: RefCell<Vec<Ends>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
struct Ends {
    reader: PipeReader,
    writer: PipeWriter,
}

/// A pipe between two sockets. Goes back to the pool when it is dropped empty.
#[derive(Debug)]
pub struct SplicePipe {
    /// Taken on drop.
    ends: Option<Ends>,
    buffered: usize,
}

impl SplicePipe {
    /// A pooled pipe, or a new one.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn acquire() -> io::Result<Self> {
        let pooled = POOL.with_borrow_mut(Vec::pop);
        let ends = if let Some(ends) = pooled {
            ends
        } else {
            let (reader, writer) = io::pipe()?;
            if resource_limits::is_reserved(&writer) {
                return Err(resource_limits::out_of_descriptors());
            }
            // SAFETY: fcntl takes integers here and touches no memory of ours; the descriptor is
            // open, since `writer` lives. A refusal leaves the pipe as it was.
            #[allow(unsafe_code)]
            unsafe {
                libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, CAPACITY);
            }
            Ends { reader, writer }
        };
        Ok(Self { ends: Some(ends), buffered: 0 })
    }

    /// Bytes that are in it.
    pub fn buffered(&self) -> usize {
        self.buffered
    }

    /// Takes what a socket has; 0 is its end. Only when nothing is held.
    ///
    /// # Errors
    /// `WouldBlock` when the socket has nothing; else the socket's error.
    pub fn fill(&mut self, socket: &impl AsRawFd) -> io::Result<usize> {
        debug_assert_eq!(self.buffered, 0, "would block must mean the socket");
        let Some(ends) = &self.ends else { return Ok(0) };
        let n = splice(socket, &ends.writer, CAPACITY as usize)?;
        self.buffered = n;
        Ok(n)
    }

    /// Gives a socket what is held.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes nothing now; else the socket's error.
    pub fn drain(&mut self, socket: &impl AsRawFd) -> io::Result<usize> {
        let Some(ends) = &self.ends else { return Ok(0) };
        let n = splice(&ends.reader, socket, self.buffered)?;
        self.buffered -= n;
        Ok(n)
    }
}

impl Drop for SplicePipe {
    fn drop(&mut self) {
        let Some(ends) = self.ends.take().filter(|_| self.buffered == 0) else { return };
        // The thread may be ending, and its pool gone with it.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < POOLED {
                pool.push(ends);
            }
        });
    }
}

fn splice(from: &impl AsRawFd, to: &impl AsRawFd, len: usize) -> io::Result<usize> {
    // SAFETY: both offsets are null, which a pipe and a socket require, and the rest are integers:
    // the call touches no memory of ours. Both descriptors are borrowed and so open; a wrong one
    // would be an error, not undefined behaviour.
    #[allow(unsafe_code)]
    let n = unsafe {
        libc::splice(
            from.as_raw_fd(),
            std::ptr::null_mut(),
            to.as_raw_fd(),
            std::ptr::null_mut(),
            len,
            libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK,
        )
    };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (two, _) = listener.accept().unwrap();
        (one, two)
    }

    #[test]
    fn bytes_go_from_socket_to_socket_and_the_pipe_back_to_the_pool() {
        let ((mut client, from), (to, mut server)) = (pair(), pair());
        from.set_nonblocking(true).unwrap();
        let mut pipe = SplicePipe::acquire().unwrap();
        assert_eq!(pipe.fill(&from).unwrap_err().kind(), ErrorKind::WouldBlock);
        client.write_all(b"hello").unwrap();
        let mut peeked = [0; 5];
        from.set_nonblocking(false).unwrap();
        from.peek(&mut peeked).unwrap();
        assert_eq!((pipe.fill(&from).unwrap(), pipe.buffered()), (5, 5));
        assert_eq!((pipe.drain(&to).unwrap(), pipe.buffered()), (5, 0));
        let mut got = [0; 5];
        server.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        drop(client);
        from.peek(&mut peeked).unwrap();
        assert_eq!(pipe.fill(&from).unwrap(), 0, "the end");
        let before = POOL.with_borrow(Vec::len);
        drop(pipe);
        assert_eq!(POOL.with_borrow(Vec::len), before + 1);
    }

    #[test]
    fn a_pipe_with_bytes_in_it_is_not_used_again() {
        let (mut client, from) = pair();
        client.write_all(b"secret").unwrap();
        from.peek(&mut [0; 1]).unwrap();
        let mut pipe = SplicePipe::acquire().unwrap();
        assert!(pipe.fill(&from).unwrap() > 0);
        let before = POOL.with_borrow(Vec::len);
        drop(pipe);
        assert_eq!(POOL.with_borrow(Vec::len), before);
    }

    #[test]
    fn a_reset_is_an_error_of_the_socket() {
        let (client, from) = pair();
        socket2::SockRef::from(&client).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(client);
        let mut pipe = SplicePipe::acquire().unwrap();
        assert_eq!(pipe.fill(&from).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
