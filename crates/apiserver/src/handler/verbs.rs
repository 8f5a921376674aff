//! Handles requests for resources by verb, and encodes responses as JSON or as a table.

use super::{Format, JSON, RequestContext, respond};
use crate::body::{self, ResponseBody};
use crate::cluster::{Cluster, Object};
use crate::kinds::{self, Kind, ObjectRef};
use crate::route::Target;
use crate::selector::Selector;
use crate::status_error::StatusError;
use crate::{patch, protobuf, resource, table, tunnel, watch};
use bytes::BytesMut;
use http::Response;
use http::header::{ACCEPT, CONTENT_TYPE};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl RequestContext {
    pub(super) async fn resource(
        &self,
        target: &Target,
        body: Incoming,
    ) -> Result<Response<ResponseBody>, StatusError> {
        let object =
            ObjectRef { kind: target.kind, namespace: &target.namespace, name: &target.name };
        let cluster = &self.writer();
        let dry_run = self.query.all("dryRun").any(|v| v == "All");
        match target.subresource.as_str() {
            "" => {}
            "status" if target.kind.has_status => {}
            name if *target.kind == kinds::PODS => {
                cluster.get(object)?;
                return self.pod_subresource(object, name, body).await;
            }
            "finalize" => {}
            _ => return Err(StatusError::no_such_path()),
        }
        match self.verb() {
            "watch" => self.watch(target),
            "get" => {
                let stored = self.get(object).await?;
                self.object_response(200, object, &stored)
            }
            "list" => self.list(target).await,
            "create" if target.name.is_empty() => {
                let value = self.json_body(body).await?;
                let namespace = namespace_of(target, &value);
                let stored = cluster.create(target.kind, &namespace, value, dry_run)?;
                self.object_response(201, object, &stored)
            }
            "update" => {
                let value = self.json_body(body).await?;
                self.update(target, object, value, dry_run)
            }
            "patch" => self.patch(target, object, body, dry_run).await,
            "delete" => {
                let options = self.json_body(body).await?;
                let deleted = cluster.delete(object, &options["preconditions"], dry_run)?;
                let uid = &deleted.value["metadata"]["uid"];
                let details = json!({ "name": object.name, "kind": object.kind.plural, "group": object.kind.group, "uid": uid });
                self.negotiate(200, &self.success(&details, Some(deleted.version)))
            }
            "deletecollection" => {
                self.delete_collection(target, dry_run)?;
                self.negotiate(200, &self.success(&json!({ "kind": target.kind.plural }), None))
            }
            _ => Err(StatusError::method_not_allowed()),
        }
    }

    /// The store, which records the changes as those of this request.
    fn writer(&self) -> Cluster {
        let cluster = &self.server.cluster;
        self.header("audit-id").map_or_else(|| cluster.clone(), |id| cluster.on_behalf_of(id))
    }

    /// Deletes the objects that the selector matches.
    fn delete_collection(&self, target: &Target, dry_run: bool) -> Result<(), StatusError> {
        let cluster = &self.writer();
        let (objects, _) = cluster.list(target.kind, &target.namespace, &self.selector(target)?);
        for listed in &objects {
            let meta = &listed.value["metadata"];
            let name = meta["name"].as_str().unwrap_or_default();
            let namespace = meta["namespace"].as_str().unwrap_or_default();
            let object = ObjectRef { kind: target.kind, namespace, name };
            // It fails if another request has deleted the object meanwhile.
            let _ = cluster.delete(object, &Value::Null, dry_run);
        }
        Ok(())
    }

    /// Updates an object. An update of a Lease that does not exist creates it, unless it names a UID, as
    /// `AllowCreateOnUpdate` of its strategy and `defaultUpdatedObjectInfo.Preconditions` have it in kube-apiserver.
    fn update(
        &self,
        target: &Target,
        object: ObjectRef<'_>,
        value: Value,
        dry_run: bool,
    ) -> Result<Response<ResponseBody>, StatusError> {
        let (kind, subresource) = (target.kind, &target.subresource);
        let cluster = &self.writer();
        if *kind == kinds::LEASES && cluster.get(object).is_err() {
            if let Some(uid) = value["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty()) {
                let why = format!(
                    "Precondition failed: UID in precondition: {uid}, UID in object meta: "
                );
                return Err(StatusError::conflict(kind, object.name, &why));
            }
            let stored = cluster.create(kind, &target.namespace, value, dry_run)?;
            return self.object_response(201, object, &stored);
        }
        let stored = cluster.modify(object, dry_run, |now| {
            Ok(resource::merge_subresource(kind, subresource, now, value))
        })?;
        self.object_response(200, object, &stored)
    }

    /// Applies a patch. Server-side apply creates an object that does not exist.
    async fn patch(
        &self,
        target: &Target,
        object: ObjectRef<'_>,
        body: Incoming,
        dry_run: bool,
    ) -> Result<Response<ResponseBody>, StatusError> {
        let content_type = self.header(CONTENT_TYPE.as_str()).unwrap_or_default().to_owned();
        let changes = self.json_body(body).await?;
        let cluster = &self.writer();
        let apply = content_type.starts_with("application/apply-patch");
        let patched = cluster.modify(object, dry_run, |now| {
            let next = patch::apply(now, &content_type, &changes)?;
            Ok(resource::merge_subresource(target.kind, &target.subresource, now, next))
        });
        match patched {
            Err(error) if apply && error.code == 404 && target.subresource.is_empty() => {
                let stored = cluster.create(target.kind, &target.namespace, changes, dry_run)?;
                self.object_response(201, object, &stored)
            }
            patched => self.object_response(200, object, &*patched?),
        }
    }

    async fn pod_subresource(
        &self,
        object: ObjectRef<'_>,
        name: &str,
        body: Incoming,
    ) -> Result<Response<ResponseBody>, StatusError> {
        match name {
            "log" => Ok(tunnel::log(self, object)),
            "exec" | "attach" | "portforward" => tunnel::upgrade(self, object, name, body),
            "eviction" => {
                self.json_body(body).await?;
                let deleted = self.writer().delete(object, &Value::Null, false)?;
                self.negotiate(201, &self.success(&Value::Null, Some(deleted.version)))
            }
            "binding" => {
                let binding = self.json_body(body).await?;
                let bound = self.writer().modify(object, false, |now| {
                    let mut next = now.clone();
                    next["spec"]["nodeName"] = binding["target"]["name"].clone();
                    Ok(next)
                })?;
                self.negotiate(201, &self.success(&Value::Null, Some(bound.version)))
            }
            _ => Err(StatusError::no_such_path()),
        }
    }

    /// Reads an object, from the watch cache if the request names a version.
    async fn get(&self, object: ObjectRef<'_>) -> Result<Arc<Object>, StatusError> {
        let cluster = &self.server.cluster;
        let (lag, stuck_at) = {
            let faults = self.server.faults.borrow();
            (faults.cache_lag, faults.cache_version)
        };
        if let Some(version) = stuck_at {
            self.check_reached(version)?;
        }
        if lag.is_none() {
            self.check_reached(cluster.version())?;
        }
        if lag.is_none() || self.query.get("resourceVersion").is_empty() {
            return cluster.get(object);
        }
        cluster.get_at(object, self.minimum_cached().await?)
    }

    fn watch(&self, target: &Target) -> Result<Response<ResponseBody>, StatusError> {
        let mut formats = vec![Format::Json, Format::Table, Format::Protobuf];
        if !self.server.faults.borrow().cbor_disabled {
            formats.extend([Format::Cbor, Format::CborTable]);
        }
        let format = self.format(&formats)?;
        let selector = self.selector(target)?;
        let accepts_gzip = self.accepts_gzip();
        watch::start(&self.server, target, &self.query, selector, format, accepts_gzip)
    }

    fn selector(&self, target: &Target) -> Result<Selector, StatusError> {
        let selector =
            Selector::parse(self.query.get("labelSelector"), self.query.get("fieldSelector"))?;
        let selector = selector.in_shard(self.shard_selector())?;
        Ok(if target.name.is_empty() { selector } else { selector.named(&target.name) })
    }

    /// The `shardSelector`, empty if there is none or the feature gate is off.
    fn shard_selector(&self) -> &str {
        let is_off = self.server.faults.borrow().sharding_disabled;
        if is_off { "" } else { self.query.get("shardSelector") }
    }

    /// Refuses a request for a version that the cache, which is at `version`, has not reached.
    fn check_reached(&self, version: u64) -> Result<(), StatusError> {
        let minimum = self.minimum_version();
        if minimum <= version {
            return Ok(());
        }
        Err(StatusError::too_large_version(minimum, version))
    }

    fn minimum_version(&self) -> u64 {
        self.query.get("resourceVersion").parse().unwrap_or(0)
    }

    /// The version of the watch cache when it has reached that of the request.
    async fn minimum_cached(&self) -> Result<u64, StatusError> {
        let minimum = self.minimum_version();
        let reached = self.server.wait_until_cached(minimum).await;
        reached.map_err(|current| StatusError::too_large_version(minimum, current))
    }

    /// The objects of a LIST and their version, from the watch cache or from the store.
    async fn listed(&self, target: &Target) -> Result<(Vec<Arc<Object>>, u64), StatusError> {
        let (cluster, selector) = (&self.server.cluster, self.selector(target)?);
        let has = |parameter| !self.query.get(parameter).is_empty();
        if self.query.get("resourceVersionMatch") == "Exact" && !has("continue") {
            let version = self.minimum_version();
            cluster.check_not_compacted(version)?;
            self.check_reached(cluster.version())?;
            let objects = cluster.list_at(target.kind, &target.namespace, &selector, version);
            return Ok((objects, version));
        }
        let lags = self.server.faults.borrow().cache_lag.is_some();
        let cached = if !lags || has("continue") {
            None
        } else if has("resourceVersion") {
            Some(self.minimum_cached().await?)
        } else {
            // kube-apiserver reads from the store if its cache does not reach the present version in time
            // (`storage/cacher/delegator.go`, without `ConsistentListFromCacheSkipTimeoutFallback`).
            self.server.wait_until_cached(cluster.version()).await.ok()
        };
        if let Some(version) = cached {
            let objects = cluster.list_at(target.kind, &target.namespace, &selector, version);
            return Ok((objects, version));
        }
        let (objects, version) = cluster.list(target.kind, &target.namespace, &selector);
        self.check_reached(version)?;
        Ok((objects, version))
    }

    async fn list(&self, target: &Target) -> Result<Response<ResponseBody>, StatusError> {
        let cluster = &self.server.cluster;
        let (mut objects, mut version) = self.listed(target).await?;
        if !self.is_of_prober() {
            self.server.counters.lists.fetch_add(1, Relaxed);
        }
        let token = self.query.get("continue");
        if !token.is_empty() {
            let token = token.split_once(':').and_then(|(v, key)| Some((v.parse().ok()?, key)));
            let Some((list_version, last)) = token else {
                return Err(StatusError::bad_request("continue key is not valid"));
            };
            cluster.check_not_compacted(list_version)?;
            version = list_version;
            objects.retain(|object| object_key(object).as_str() > last);
        }
        let limit = self.query.get("limit").parse().unwrap_or(0);
        let mut meta = json!({ "resourceVersion": version.to_string() });
        if !self.shard_selector().is_empty() {
            meta["shardInfo"]["selector"] = self.shard_selector().into();
        }
        if limit > 0 && objects.len() > limit {
            meta["remainingItemCount"] = (objects.len() - limit).into();
            objects.truncate(limit);
            let last = objects.last().map(|o| object_key(o)).unwrap_or_default();
            meta["continue"] = format!("{version}:{last}").into();
        }
        if self.format(&[Format::Json, Format::Table])? == Format::Table {
            let objects: Vec<_> = objects.iter().map(AsRef::as_ref).collect();
            return Ok(self.table(200, target.kind, &objects, &meta));
        }
        let head = format!(
            "{{\"kind\":\"{}List\",\"apiVersion\":\"{}\",\"metadata\":{meta},\"items\":[",
            target.kind.kind,
            target.kind.api_version()
        );
        let size: usize = objects.iter().map(|o| o.json.len() + 1).sum();
        let mut list = BytesMut::with_capacity(head.len() + size + 2);
        list.extend_from_slice(head.as_bytes());
        for (at, object) in objects.iter().enumerate() {
            if at > 0 {
                list.extend_from_slice(b",");
            }
            list.extend_from_slice(&object.json);
        }
        list.extend_from_slice(b"]}");
        Ok(respond(200, JSON, ResponseBody::full(list.freeze())))
    }

    /// A response with one object, as JSON or as a table with one row.
    fn object_response(
        &self,
        code: u16,
        object: ObjectRef<'_>,
        stored: &Object,
    ) -> Result<Response<ResponseBody>, StatusError> {
        if self.format(&[Format::Json, Format::Table])? == Format::Table {
            let meta = json!({ "resourceVersion": stored.version.to_string() });
            return Ok(self.table(code, object.kind, &[stored], &meta));
        }
        Ok(respond(code, JSON, ResponseBody::full(stored.json.clone())))
    }

    fn table(
        &self,
        code: u16,
        kind: &Kind,
        objects: &[&Object],
        meta: &Value,
    ) -> Response<ResponseBody> {
        let include_object = self.query.get("includeObject");
        let now = self.server.cluster.clock().now();
        let columns = table::definitions(kind);
        let table = table::table(kind, objects, &columns, include_object, meta, now);
        respond(code, JSON, ResponseBody::full(table.to_string()))
    }

    /// The Status of a successful request, which has changed an object to this version.
    fn success(&self, details: &Value, version: Option<u64>) -> Value {
        let mut metadata = json!({});
        if let Some(version) = version.filter(|_| self.server.faults.borrow().status_versions) {
            metadata["resourceVersion"] = version.to_string().into();
        }
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": metadata, "status": "Success",
            "details": details,
        })
    }

    /// A response with this JSON, or 406 if the client does not accept JSON.
    pub(super) fn negotiate(
        &self,
        code: u16,
        value: &Value,
    ) -> Result<Response<ResponseBody>, StatusError> {
        self.format(&[Format::Json])?;
        Ok(respond(code, JSON, ResponseBody::full(value.to_string())))
    }

    /// The first supported format in the `Accept` header, or 406.
    fn format(&self, supported: &[Format]) -> Result<Format, StatusError> {
        let values = self.parts.headers.get_all(ACCEPT).iter().filter_map(|v| v.to_str().ok());
        let mut items = values.flat_map(|v| v.split(',')).map(str::trim).peekable();
        if items.peek().is_none() {
            return Ok(Format::Json);
        }
        let formats = items.filter_map(|item| match item.split(';').next()? {
            "application/json" if item.contains("as=Table") => Some(Format::Table),
            "application/json" if item.contains("as=") => None,
            "application/json" | "application/*" | "*/*" => Some(Format::Json),
            "application/vnd.kubernetes.protobuf" => Some(Format::Protobuf),
            "application/cbor" if item.contains("as=Table") => Some(Format::CborTable),
            "application/cbor" => Some(Format::Cbor),
            _ => None,
        });
        formats.into_iter().find(|format| supported.contains(format)).ok_or_else(|| {
            let message = "only the following media types are accepted: application/json";
            StatusError::new(406, "NotAcceptable", message)
        })
    }

    /// The body of the request as JSON, also from protobuf. An empty body becomes an empty object.
    pub(super) async fn json_body(&self, body: Incoming) -> Result<Value, StatusError> {
        let bytes = body::read(body).await?;
        if bytes.is_empty() {
            return Ok(json!({}));
        }
        if self.header(CONTENT_TYPE.as_str()).is_some_and(|t| t.contains("protobuf")) {
            return protobuf::decode(&bytes).ok_or_else(|| {
                let message = "the demo does not decode this kind from protobuf; send JSON";
                StatusError::new(415, "UnsupportedMediaType", message)
            });
        }
        serde_json::from_slice(&bytes)
            .map_err(|error| StatusError::bad_request(format!("cannot parse the body: {error}")))
    }
}

/// The namespace of a created object: from the path, or from the object if it is posted to the collection of
/// all namespaces.
fn namespace_of(target: &Target, value: &Value) -> String {
    let in_object = value["metadata"]["namespace"].as_str().unwrap_or_default();
    let namespace = if target.namespace.is_empty() { in_object } else { &target.namespace };
    if target.kind.namespaced { namespace.to_owned() } else { String::new() }
}

/// `NAMESPACE/NAME`, by which a list is ordered.
fn object_key(object: &Object) -> String {
    let meta = &object.value["metadata"];
    let part = |field: &str| meta[field].as_str().unwrap_or_default();
    format!("{}/{}", part("namespace"), part("name"))
}
