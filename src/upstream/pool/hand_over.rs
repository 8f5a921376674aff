//! Hands the connections that mostly carry streams of proven tokens to the class of these tokens.
//!
//! The first request of a client with a token is sent on a connection of a class that has few of them, because an
//! invalid token makes the apiserver end the connection. If the request is a watch, it keeps its stream for minutes
//! after its response head has proven the token. With many new clients, as after a restart, such watches would use
//! up the streams of the class for all that follow.
//!
//! A live connection joins the class of proven tokens when most of its streams are those of proven tokens
//! ([`is_mostly_proven`]). No stream is moved, and the class that it leaves may open another one. This lets no client
//! with invalid tokens open connections: each takes several tokens that the apiserver has accepted, and the class of
//! proven tokens keeps its own limit. A request with an invalid token that is open on the connection at that moment
//! may still end it with a GOAWAY, on which the other streams continue.
//!
//! [`is_mostly_proven`]: crate::upstream::connection::Connection::is_mostly_proven

use std::rc::Rc;

use jackstay_core::connection_health::ConnectionState;

use super::class::ClassPool;
use crate::config;
use crate::upstream::credentials::CredentialClass;

/// Hands connections of a class of unproven tokens over to the class of `proven` ones, up to its limit.
pub(super) fn hand_over_proven(
    unproven: &ClassPool,
    proven: &ClassPool,
    limits: &config::Connections,
) {
    debug_assert!(is_unproven(unproven.credential_class()));
    unproven.connections.borrow_mut().retain(|connection| {
        let is_handed_over = connection.is_mostly_proven()
            && connection.state() == ConnectionState::Live
            && proven.may_add_to(&connection.endpoint, limits);
        if is_handed_over {
            connection.serve_proven_tokens();
            unproven.forget_dials(&connection.endpoint.label);
            proven.connections.borrow_mut().push(Rc::clone(connection));
        }
        !is_handed_over
    });
}

/// Whether connections of the class are handed over.
pub(super) fn is_unproven(class: CredentialClass) -> bool {
    matches!(class, CredentialClass::UnprovenToken | CredentialClass::SlowedToken)
}
