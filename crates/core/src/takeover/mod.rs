//! How a new process takes the place of a running one, or starts beside one that drains.
//!
//! | side | machine | decides |
//! |---|---|---|
//! | new | [`start`] | whether it binds its addresses, asks the process that has them, waits, or fails |
//! | new | [`inquiry`] | what serves the takeover socket |
//! | old | [`hand_over`] | what follows each step of a new process |
//!
//! [`messages`] has the lines that both sides exchange.

pub mod hand_over;
pub mod inquiry;
pub mod messages;
pub mod start;
