//! Which endpoints may lead to several apiservers.
//!
//! | endpoint | may lead to several |
//! |---|---|
//! | a backend of an address | no: each connection was found to have reached that apiserver |
//! | a set of connections to backends that cannot be told apart | yes |
//! | an address that is examined (`control::backends`) | yes |
//! | any other address | no: it is one apiserver by the configuration, or because there are many |
//!
//! A survey cannot show that an address leads to one apiserver: several that share their certificate and the address that
//! they advertise, as those of a hosted control plane, look like one. Each connection reaches one of them, and stays
//! there. So what one connection has shown of a watch cache says nothing about the next connection.

use std::sync::Arc;

use super::endpoint::Endpoint;

/// Sets for each endpoint of an upstream whether it may lead to several apiservers, by the table of the module.
pub fn mark_shared(endpoints: &[Arc<Endpoint>], is_examined: impl Fn(&str) -> bool) {
    for endpoint in endpoints {
        let is_whole = || endpoint.backend.is_none() && is_examined(&endpoint.address.to_string());
        endpoint.set_shared(endpoint.is_indistinct() || is_whole());
    }
}

/// Whether there may be an apiserver behind an address of these endpoints that is no endpoint.
pub fn may_hide_apiserver(endpoints: &[Arc<Endpoint>]) -> bool {
    endpoints.iter().any(|endpoint| endpoint.is_shared() || endpoint.backend.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Metrics;
    use jackstay_core::backends::{Backend, BackendId};
    use jackstay_core::discovery::address::EndpointAddress;

    fn endpoint(port: u16, backend: Option<Backend>) -> Arc<Endpoint> {
        let address = EndpointAddress { host: "10.0.0.1".to_owned(), port };
        let metrics = Metrics::new().endpoint("u", &address.to_string());
        Endpoint::of_backend(&"u".into(), (&address, backend), None, metrics, &Arc::default())
            .unwrap()
    }

    #[test]
    fn examined_addresses_may_be_shared_and_backends_are_not() {
        let backend =
            |n: u64| Backend { id: BackendId::Certificate(n), name: n.to_string().into() };
        let any = Backend { id: BackendId::Indistinct(1), name: "any-1".into() };
        // The address itself is an endpoint beside its backends.
        let endpoints = [
            endpoint(1, Some(backend(1))),
            endpoint(1, Some(backend(2))),
            endpoint(1, None),
            endpoint(2, Some(any)),
            endpoint(3, None),
        ];
        mark_shared(&endpoints, |address| address == "10.0.0.1:1");
        let shared = endpoints.each_ref().map(|endpoint| endpoint.is_shared());
        assert_eq!(shared, [false, false, true, true, false]);
        assert!(may_hide_apiserver(&endpoints[..2]));
        assert!(!may_hide_apiserver(&endpoints[4..]));
    }
}
