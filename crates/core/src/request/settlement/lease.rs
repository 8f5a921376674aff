//! A Lease in protobuf as a JSON value. The numbers of the fields are those of `generated.proto` in `k8s.io/api/coordination/v1`
//! and `k8s.io/apimachinery/pkg/apis/meta/v1`.

use serde_json::{Map, Value};

use crate::watch::codec::protobuf::{self, Field, for_each_field};

/// The type of a field.
#[derive(Clone, Copy)]
enum Type {
    Text,
    Integer,
    Bool,
    /// A `MicroTime`, in microseconds since 1970.
    Time,
    /// Text to text.
    TextMap,
    Message(&'static [(u32, &'static str, Type)]),
    Texts,
    Messages(&'static [(u32, &'static str, Type)]),
    /// It is not compared.
    Ignored,
}

type Fields = &'static [(u32, &'static str, Type)];

const LEASE: Fields = &[(1, "metadata", Type::Message(METADATA)), (2, "spec", Type::Message(SPEC))];

const METADATA: Fields = &[
    (1, "name", Type::Text),
    (2, "generateName", Type::Text),
    (3, "namespace", Type::Text),
    (4, "selfLink", Type::Text),
    (5, "uid", Type::Text),
    (6, "resourceVersion", Type::Text),
    (7, "generation", Type::Integer),
    (8, "creationTimestamp", Type::Ignored),
    (9, "deletionTimestamp", Type::Ignored),
    (10, "deletionGracePeriodSeconds", Type::Integer),
    (11, "labels", Type::TextMap),
    (12, "annotations", Type::TextMap),
    (13, "ownerReferences", Type::Messages(OWNER_REFERENCE)),
    (14, "finalizers", Type::Texts),
    (17, "managedFields", Type::Ignored),
];

const OWNER_REFERENCE: Fields = &[
    (1, "kind", Type::Text),
    (3, "name", Type::Text),
    (4, "uid", Type::Text),
    (5, "apiVersion", Type::Text),
    (6, "controller", Type::Bool),
    (7, "blockOwnerDeletion", Type::Bool),
];

const SPEC: Fields = &[
    (1, "holderIdentity", Type::Text),
    (2, "leaseDurationSeconds", Type::Integer),
    (3, "acquireTime", Type::Time),
    (4, "renewTime", Type::Time),
    (5, "leaseTransitions", Type::Integer),
    (6, "strategy", Type::Text),
    (7, "preferredHolder", Type::Text),
];

/// The Lease in a body; `None` if it is malformed, or has fields that are not known here.
pub fn value(body: &[u8]) -> Option<Value> {
    message(protobuf::object(body)?, LEASE)
}

fn message(bytes: &[u8], fields: Fields) -> Option<Value> {
    let mut members = Map::new();
    for_each_field(bytes, |number, field| {
        let (_, name, kind) = *fields.iter().find(|(known, ..)| *known == number)?;
        match (kind, field) {
            (Type::Ignored, _) => {}
            (Type::Texts, Field::Bytes(bytes)) => append(&mut members, name, text(bytes)?)?,
            (Type::Messages(fields), Field::Bytes(bytes)) => {
                append(&mut members, name, message(bytes, fields)?)?;
            }
            (Type::TextMap, Field::Bytes(bytes)) => {
                let [key, value] = protobuf::bytes_fields(bytes, [1, 2])?;
                let map =
                    members.entry(name).or_insert_with(|| Map::new().into()).as_object_mut()?;
                let key = std::str::from_utf8(key.unwrap_or_default()).ok()?;
                map.insert(key.to_owned(), text(value.unwrap_or_default())?);
            }
            (kind, field) => {
                members.insert(name.to_owned(), single(kind, &field)?);
            }
        }
        Some(())
    })?;
    Some(members.into())
}

/// The value of a field that occurs once. Of several, the last one counts.
fn single(kind: Type, field: &Field<'_>) -> Option<Value> {
    Some(match (kind, field) {
        (Type::Text, Field::Bytes(bytes)) => text(bytes)?,
        // Negative integers are sign-extended to 64 bits.
        (Type::Integer, Field::Number(number)) => number.cast_signed().into(),
        (Type::Bool, Field::Number(number)) => (*number != 0).into(),
        (Type::Time, Field::Bytes(bytes)) => time(bytes)?.into(),
        (Type::Message(fields), Field::Bytes(bytes)) => message(bytes, fields)?,
        _ => return None,
    })
}

fn text(bytes: &[u8]) -> Option<Value> {
    std::str::from_utf8(bytes).ok().map(Value::from)
}

fn append(members: &mut Map<String, Value>, name: &str, item: Value) -> Option<()> {
    let list = members.entry(name).or_insert_with(|| Vec::<Value>::new().into());
    list.as_array_mut()?.push(item);
    Some(())
}

/// Seconds in field 1, nanoseconds in field 2.
fn time(bytes: &[u8]) -> Option<i64> {
    let (mut seconds, mut nanoseconds) = (0, 0);
    for_each_field(bytes, |number, field| {
        match (number, field) {
            (1, Field::Number(number)) => seconds = number.cast_signed(),
            (2, Field::Number(number)) => nanoseconds = number.cast_signed(),
            _ => return None,
        }
        Some(())
    })?;
    seconds.checked_mul(1_000_000)?.checked_add(nanoseconds / 1_000)
}
