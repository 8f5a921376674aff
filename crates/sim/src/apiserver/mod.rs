//! An apiserver: HTTP/2, the verbs, and a watch cache that follows the store with a lag.
//!
//! What is not modelled: authentication, admission, priority and fairness beyond a plain rejection, and encodings other
//! than JSON.

mod lists;
mod server;
mod store;
mod watches;

pub use self::server::{Apiserver, Conditions, ServerTimer};
pub(crate) use self::server::{list_bytes, replicate_later};
pub use self::store::{Resource, Store};
