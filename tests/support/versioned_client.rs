//! A client that writes and reads one `ConfigMap`, and the resource versions that it sees.

use std::ops::Deref;

use http::StatusCode;
use jackstay_apiserver::client::{Client, Reply};
use serde_json::Value;

use super::{CONFIGMAPS, config_map};

/// The path of the object.
pub const OBJECT: &str = "/api/v1/namespaces/default/configmaps/m";

/// See the module documentation.
pub struct VersionedClient {
    client: Client,
    written: u64,
}

impl VersionedClient {
    /// A client that has not written yet.
    pub fn new(client: Client) -> Self {
        Self { client, written: 0 }
    }

    /// A client that has created the object.
    pub async fn create(client: Client) -> Self {
        let mut new = Self::new(client);
        new.write().await;
        new
    }

    /// Writes the object. Returns its version.
    pub async fn write(&mut self) -> u64 {
        self.written += 1;
        let value = config_map("m", &self.written.to_string());
        let reply = match self.written {
            1 => self.client.post(CONFIGMAPS, &value).await,
            _ => self.client.put(OBJECT, &value).await,
        };
        version(&reply.unwrap())
    }

    /// Reads a target, of any version. Returns the version of the object or list.
    pub async fn read(&self, target: &str) -> u64 {
        let reply = self.client.get(target).await.unwrap();
        assert_eq!(reply.status, StatusCode::OK, "{target}: {:?}", reply.body);
        version(&reply)
    }
}

impl Deref for VersionedClient {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

fn version(reply: &Reply) -> u64 {
    let object: Value = serde_json::from_slice(&reply.body).unwrap();
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

/// The target of a list of any version.
pub fn list() -> String {
    format!("{CONFIGMAPS}?resourceVersion=0")
}

/// The target of a GET of any version.
pub fn get() -> String {
    format!("{OBJECT}?resourceVersion=0")
}
