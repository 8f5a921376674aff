//! An apiserver: HTTP/2, the verbs, and a watch cache that follows the store with a lag.
//!
//! What is not modelled: authentication, admission, priority and fairness beyond a plain rejection, pagination, and
//! encodings other than JSON.

mod server;
mod store;
mod watches;

pub(crate) use self::server::replicate_later;
pub use self::server::{Apiserver, Conditions, ServerTimer};
pub use self::store::{Resource, Store};
