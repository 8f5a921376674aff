//! Moves bytes from one socket to another inside the kernel: `splice(2)` through a pipe.
//!
//! A pipe takes two descriptors and, while it contains bytes, pages. Pipes are pooled per thread and
//! in use only while bytes move. A pipe is filled only when it is empty, so `WouldBlock` from a fill
//! always refers to the socket.

use std::cell::RefCell;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;

use rustix::pipe::{SpliceFlags, fcntl_setpipe_size};

use crate::net::process::resource_limits;

/// Capacity of a pipe in bytes, and so the size of one transfer. The kernel gives an unprivileged user
/// 64 MiB of pipes in total (`fs.pipe-user-pages-soft`); smaller pipes beyond that work as well.
const CAPACITY: usize = 512 * 1024;
/// Empty pipes kept per thread. More transfers than this are rarely active at the same time.
const POOLED: usize = 32;

thread_local! {
    static POOL: RefCell<Vec<Ends>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
struct Ends {
    reader: PipeReader,
    writer: PipeWriter,
}

/// A pipe between two sockets. Returns to the pool when it is dropped empty.
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
    /// `EMFILE` if no unreserved descriptor is left ([`resource_limits::is_reserved`]).
    pub fn acquire() -> io::Result<Self> {
        let pooled = POOL.with_borrow_mut(Vec::pop);
        let ends = if let Some(ends) = pooled {
            ends
        } else {
            let (reader, writer) = io::pipe()?;
            if resource_limits::is_reserved(&writer) {
                return Err(resource_limits::out_of_descriptors());
            }
            // Refused above the user's limit; the pipe then keeps its default size.
            let _ = fcntl_setpipe_size(&writer, CAPACITY);
            Ends { reader, writer }
        };
        Ok(Self { ends: Some(ends), buffered: 0 })
    }

    /// Bytes in the pipe.
    pub fn buffered(&self) -> usize {
        self.buffered
    }

    /// Moves bytes from a socket into the pipe, which must be empty. 0 means the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` when the socket has no bytes; otherwise the socket's error.
    pub fn fill(&mut self, socket: &impl AsFd) -> io::Result<usize> {
        debug_assert_eq!(self.buffered, 0, "WouldBlock must refer to the socket");
        let Some(ends) = &self.ends else { return Ok(0) };
        let n = splice(socket, &ends.writer, CAPACITY)?;
        self.buffered = n;
        Ok(n)
    }

    /// Moves bytes from the pipe into a socket.
    ///
    /// # Errors
    /// `WouldBlock` when the socket's send buffer is full; otherwise the socket's error.
    pub fn drain(&mut self, socket: &impl AsFd) -> io::Result<usize> {
        let Some(ends) = &self.ends else { return Ok(0) };
        let n = splice(&ends.reader, socket, self.buffered)?;
        self.buffered -= n;
        Ok(n)
    }
}

impl Drop for SplicePipe {
    fn drop(&mut self) {
        let Some(ends) = self.ends.take().filter(|_| self.buffered == 0) else { return };
        // The thread-local pool is gone while the thread ends.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < POOLED {
                pool.push(ends);
            }
        });
    }
}

fn splice(from: &impl AsFd, to: &impl AsFd, len: usize) -> io::Result<usize> {
    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    Ok(rustix::pipe::splice(from, None, to, None, len, flags)?)
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
    fn pipe_moves_bytes_and_returns_to_pool_when_empty() {
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
    fn pipe_dropped_with_bytes_is_not_pooled() {
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
    fn fill_from_reset_socket_returns_connection_reset() {
        let (client, from) = pair();
        socket2::SockRef::from(&client).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(client);
        let mut pipe = SplicePipe::acquire().unwrap();
        assert_eq!(pipe.fill(&from).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
