//! Which endpoints may lead to several apiservers.
//!
//! | endpoint | `kind` of the upstream | may lead to several |
//! |---|---|---|
//! | a backend of an address | any | no: each connection was found to have reached that apiserver |
//! | a set of connections to backends that cannot be told apart | any | yes |
//! | an address | `apiserver` | no |
//! | an address | `balancer` | yes |
//! | an address | `auto`, at most [`MAX_ADDRESSES`] addresses | yes |
//! | an address | `auto`, more addresses | no: each is probably one apiserver |
//!
//! A survey cannot show that an address leads to one apiserver: several that share their certificate and the address that
//! they advertise, as those of a hosted control plane, look like one. Each connection reaches one of them, and stays
//! there. So what one connection has shown of a watch cache says nothing about the next connection.

use std::sync::Arc;

use jackstay_config::EndpointKind;
use jackstay_core::backends::MAX_ADDRESSES;

use super::endpoint::Endpoint;

/// Sets for each endpoint of an upstream whether it may lead to several apiservers, by the table of the module.
pub fn mark_shared(endpoints: &[Arc<Endpoint>], kind: EndpointKind) {
    let may_be_shared = match kind {
        EndpointKind::Apiserver => false,
        EndpointKind::Balancer => true,
        EndpointKind::Auto => number_of_addresses(endpoints) <= MAX_ADDRESSES,
    };
    for endpoint in endpoints {
        let is_whole = endpoint.backend.is_none();
        endpoint.set_shared(may_be_shared && is_whole || endpoint.is_indistinct());
    }
}

/// Whether there may be an apiserver behind an address of these endpoints that is no endpoint.
pub fn may_hide_apiserver(endpoints: &[Arc<Endpoint>]) -> bool {
    endpoints.iter().any(|endpoint| endpoint.is_shared() || endpoint.backend.is_some())
}

fn number_of_addresses(endpoints: &[Arc<Endpoint>]) -> usize {
    let mut addresses: Vec<_> = endpoints.iter().map(|endpoint| &endpoint.address).collect();
    addresses.sort_unstable_by_key(|address| (&address.host, address.port));
    addresses.dedup();
    addresses.len()
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
        Endpoint::of_backend(&"u".into(), (&address, backend), None, metrics).unwrap()
    }

    #[test]
    fn addresses_may_be_shared_by_kind_and_number_and_backends_are_not() {
        use EndpointKind::{Apiserver, Auto, Balancer};
        for (kind, addresses, expected) in [
            (Apiserver, 1, false),
            (Balancer, 1, true),
            (Balancer, 3, true),
            (Auto, 1, true),
            (Auto, MAX_ADDRESSES, true),
            (Auto, MAX_ADDRESSES + 1, false),
        ] {
            let endpoints: Vec<_> = (0..addresses).map(|n| endpoint(n as u16 + 1, None)).collect();
            mark_shared(&endpoints, kind);
            let shared = endpoints.iter().filter(|endpoint| endpoint.is_shared()).count();
            let case = format!("{kind:?} {addresses}");
            assert_eq!(shared, if expected { addresses } else { 0 }, "{case}");
            assert_eq!(may_hide_apiserver(&endpoints), expected, "{case}");
        }
        let backend =
            |n: u64| Backend { id: BackendId::Certificate(n), name: n.to_string().into() };
        // The address itself is an endpoint beside its backends.
        let any = Backend { id: BackendId::Indistinct(1), name: "any-1".into() };
        let endpoints = [endpoint(1, Some(backend(1))), endpoint(1, Some(any)), endpoint(1, None)];
        mark_shared(&endpoints, Auto);
        assert_eq!(endpoints.each_ref().map(|endpoint| endpoint.is_shared()), [false, true, true]);
        assert!(may_hide_apiserver(&endpoints[..2]));
    }
}
