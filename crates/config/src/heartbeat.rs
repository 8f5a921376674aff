//! A resource whose updates are heartbeats.

use std::fmt;

use jackstay_core::discovery::address::is_dns_name;

use super::value_error::ValueError;

/// A resource whose updates and patches are heartbeats, written as `resource.group/subresource`. The core group and
/// the absence of a subresource are left out, as in `configmaps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeartbeatResource {
    /// The API group; empty for the core group.
    pub group: String,
    /// The resource in its plural.
    pub resource: String,
    /// The subresource; empty for the object itself.
    pub subresource: String,
}

impl HeartbeatResource {
    /// Reads a resource.
    ///
    /// # Errors
    /// The text is not a resource.
    pub fn parse(text: &str) -> Result<Self, ValueError> {
        let (object, subresource) = match text.split_once('/') {
            Some((object, subresource)) => (object, Some(subresource)),
            None => (text, None),
        };
        let (resource, group) = match object.split_once('.') {
            Some((resource, group)) => (resource, Some(group)),
            None => (object, None),
        };
        let is_lower =
            |name: &str| is_dns_name(name) && !name.chars().any(|c| c.is_ascii_uppercase());
        let is_label = |name: &str| is_lower(name) && !name.contains('.');
        if !is_label(resource) || !group.is_none_or(is_lower) || !subresource.is_none_or(is_label) {
            let expected = "a resource such as configmaps or machines.example.com/status";
            return Err(ValueError::not(text, expected));
        }
        Ok(Self {
            group: group.unwrap_or_default().to_owned(),
            resource: resource.to_owned(),
            subresource: subresource.unwrap_or_default().to_owned(),
        })
    }
}

impl fmt::Display for HeartbeatResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        if !self.subresource.is_empty() {
            write!(f, "/{}", self.subresource)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_reads_what_display_writes() {
        for (text, group, resource, subresource) in [
            ("configmaps", "", "configmaps", ""),
            ("nodes/status", "", "nodes", "status"),
            ("machines.example.com", "example.com", "machines", ""),
            ("machines.a.example.com/status", "a.example.com", "machines", "status"),
        ] {
            let parsed = HeartbeatResource::parse(text).unwrap();
            assert_eq!(
                (&*parsed.group, &*parsed.resource, &*parsed.subresource),
                (group, resource, subresource)
            );
            assert_eq!(parsed.to_string(), text);
        }
        for text in ["", "/status", "Nodes", "nodes/", "nodes/a/b", "a.", ".b", "*", "nodes status"]
        {
            let error = HeartbeatResource::parse(text).unwrap_err().to_string();
            assert!(error.contains("machines.example.com/status"), "{error}");
        }
    }
}
