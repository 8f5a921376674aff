//! Files: read within a size limit ([`bounded_read`]), replaced in one step ([`atomic_write`]), and
//! bearer tokens ([`bearer_token`]).

pub mod atomic_write;
pub mod bearer_token;
pub mod bounded_read;
