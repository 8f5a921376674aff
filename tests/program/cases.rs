//! Files, servers and clients as people have them: inputs that kubectl, kubelet or kube-apiserver accept, and the built
//! binary. `config/compatibility.md` lists them with the decision for each.

mod certificates;
mod gateway;
mod header_fields;
mod heads;
mod hosts;
mod kubeconfigs;
mod names;
mod paths;
mod peer;
mod pem;
mod plugin;
mod server_urls;
mod table;
mod websocket;
mod written_files;
