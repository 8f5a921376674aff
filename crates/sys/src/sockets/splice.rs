//! Moves bytes from one socket to another inside the kernel: `splice(2)` through a pipe.
//!
//! A pipe needs two descriptors and, while it contains bytes, memory pages. A flow therefore takes a pipe from
//! its thread's pool only while bytes move. A pipe is filled only when it is empty, so `WouldBlock` from
//! [`SplicePipe::fill`] always means that the socket has no bytes.

use std::cell::RefCell;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;

use rustix::pipe::{SpliceFlags, fcntl_setpipe_size};

use crate::process::resource_limits;

/// Capacity of a pipe in bytes, which limits one transfer. The kernel gives an unprivileged user 64 MiB of
/// pipes in total (`fs.pipe-user-pages-soft`). Pipes beyond that are smaller and work too.
const CAPACITY: usize = 512 * 1024;
/// Maximum of empty pipes in a thread's pool. More transfers are rarely active at the same time.
const MAX_POOLED: usize = 32;

thread_local! {
    static POOL: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
struct Pipe {
    reader: PipeReader,
    writer: PipeWriter,
}

/// A pipe between two sockets. Returns to the pool when it is dropped empty.
#[derive(Debug)]
pub struct SplicePipe {
    /// `None` only during the drop.
    pipe: Option<Pipe>,
    buffered: usize,
}

impl SplicePipe {
    /// A pooled pipe, or a new one.
    ///
    /// # Errors
    /// `EMFILE` if no unreserved descriptor is left ([`resource_limits::is_reserved`]).
    pub fn acquire() -> io::Result<Self> {
        let pooled = POOL.with_borrow_mut(Vec::pop);
        let pipe = if let Some(pipe) = pooled {
            pipe
        } else {
            let (reader, writer) = io::pipe()?;
            if resource_limits::is_reserved(&writer) {
                return Err(resource_limits::out_of_descriptors());
            }
            // The kernel refuses the size above the user's limit. The pipe then keeps its default size.
            let _ = fcntl_setpipe_size(&writer, CAPACITY);
            Pipe { reader, writer }
        };
        Ok(Self { pipe: Some(pipe), buffered: 0 })
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
        let Some(pipe) = &self.pipe else { return Ok(0) };
        let n = splice(socket, &pipe.writer, CAPACITY)?;
        self.buffered = n;
        Ok(n)
    }

    /// Moves bytes from the pipe into a socket.
    ///
    /// # Errors
    /// `WouldBlock` when the socket's send buffer is full; otherwise the socket's error.
    pub fn drain(&mut self, socket: &impl AsFd) -> io::Result<usize> {
        let Some(pipe) = &self.pipe else { return Ok(0) };
        let n = splice(&pipe.reader, socket, self.buffered)?;
        self.buffered -= n;
        Ok(n)
    }
}

impl Drop for SplicePipe {
    fn drop(&mut self) {
        let Some(pipe) = self.pipe.take().filter(|_| self.buffered == 0) else { return };
        // While the thread ends, its pool may be destroyed already.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < MAX_POOLED {
                pool.push(pipe);
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
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        (client, accepted)
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
        assert_eq!(pipe.fill(&from).unwrap(), 0, "end of stream");
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
