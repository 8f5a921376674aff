//! Finds the bearer token of a request as kube-apiserver does, so that the token is known by what the apiserver
//! checks, and not by the header around it.
//!
//! | header | token | source |
//! |---|---|---|
//! | the first `Authorization` | of its value without white space at both ends, the second of the fields that single spaces separate, if the first is `Bearer` in any case; the third field is ignored | `bearertoken.go` |
//! | `Sec-WebSocket-Protocol` of an upgrade to WebSocket | the subprotocol `base64url.bearer.authorization.k8s.io.…`, decoded | `websocket/protocol.go` |
//!
//! An empty token is none. The apiserver treats a request without a token as anonymous.

use std::borrow::Cow;

use base64::Engine as _;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::{HeaderMap, header};
use jackstay_core::request::hygiene::list_items;

/// The beginning of a subprotocol that contains a token.
const SUBPROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";

/// Like Go's `base64.RawURLEncoding`, which ignores the unused bits of the last character.
const BASE64URL: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireNone),
);

/// The bearer token of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum BearerToken<'a> {
    /// The only token of the request.
    One(Cow<'a, [u8]>),
    /// There are several tokens, or one that is invalid. The apiserver tries one after the other, so a response
    /// does not show which of them it accepts.
    Ambiguous,
}

impl<'a> BearerToken<'a> {
    /// The token in a request's headers. `upgrade` says whether the request asks for an upgrade.
    pub fn find(headers: &'a HeaderMap, upgrade: bool) -> Option<Self> {
        let authorization = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| token_of_authorization(value.as_bytes()));
        // The apiserver compares only the first value (`wsstream.IsWebSocketRequest`).
        let is_websocket = upgrade
            && headers
                .get(header::UPGRADE)
                .is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(b"websocket"));
        let mut subprotocols = list_items(headers.get_all(header::SEC_WEBSOCKET_PROTOCOL))
            .filter_map(|protocol| protocol.strip_prefix(SUBPROTOCOL.as_bytes()))
            .filter(|_| is_websocket);
        match (authorization, subprotocols.next(), subprotocols.next()) {
            (Some(token), None, None) => Some(Self::One(Cow::Borrowed(token))),
            (None, Some(encoded), None) => match BASE64URL.decode(encoded) {
                Ok(token) => (!token.is_empty()).then_some(Self::One(Cow::Owned(token))),
                Err(_) => Some(Self::Ambiguous),
            },
            (None, None, _) => None,
            _ => Some(Self::Ambiguous),
        }
    }
}

/// The token in a value of `Authorization`, parsed as by Go's `strings.SplitN(strings.TrimSpace(value), " ", 3)`.
fn token_of_authorization(value: &[u8]) -> Option<&[u8]> {
    let mut fields = trim_space(value).splitn(3, |&byte| byte == b' ');
    let (scheme, token) = (fields.next()?, fields.next()?);
    (scheme.eq_ignore_ascii_case(b"bearer") && !token.is_empty()).then_some(token)
}

/// Removes what Go's `strings.TrimSpace` removes: white space as Unicode defines it, such as U+00A0 in UTF-8.
fn trim_space(value: &[u8]) -> &[u8] {
    if value.is_ascii() {
        return value.trim_ascii();
    }
    let mut chunks = value.utf8_chunks();
    let start = chunks.next().map_or("", |chunk| chunk.valid());
    let value = &value[start.len() - start.trim_start().len()..];
    match value.utf8_chunks().last() {
        Some(end) if end.invalid().is_empty() => {
            &value[..value.len() - (end.valid().len() - end.valid().trim_end().len())]
        }
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn authorization_is_parsed_as_by_the_apiserver() {
        for (value, token) in [
            (&b"Bearer abc"[..], Some(&b"abc"[..])),
            (b"bearer abc", Some(b"abc")),
            (b"BEARER abc random", Some(b"abc")),
            (b"Bearer abc random more", Some(b"abc")),
            (b" \tBearer abc \t", Some(b"abc")),
            (b"Bearer a\tb", Some(b"a\tb")),
            (b"Bearer abc\xc2\xa0", Some(b"abc")),
            (b"\xe2\x80\x83Bearer abc\xc2\xa0 \xc2\x85", Some(b"abc")),
            (b"Bearer abc\xc2\xa0x", Some(b"abc\xc2\xa0x")),
            (b"Bearer abc\xa0", Some(b"abc\xa0")),
            (b"Bearer \xff\xc2\xa0", Some(b"\xff")),
            (b"Bearer  abc", None),
            (b"Bearer", None),
            (b"Bearer ", None),
            (b"Bearer\tabc", None),
            (b"Basic abc", None),
            (b"Bearerabc", None),
            (b"", None),
            (b"\xc2\xa0", None),
        ] {
            assert_eq!(token_of_authorization(value), token, "{}", value.escape_ascii());
        }
    }

    #[test]
    fn find_uses_the_subprotocol_of_a_websocket_only() {
        let token = "base64url.bearer.authorization.k8s.io.QUJD";
        let unclear = Some(None);
        let one = |token: &'static str| Some(Some(token));
        for (upgrade, headers, expected) in [
            (true, &[("sec-websocket-protocol", token), ("upgrade", "WebSocket")][..], one("ABC")),
            (true, &[("sec-websocket-protocol", token), ("upgrade", "SPDY/3.1")], None),
            (true, &[("sec-websocket-protocol", token)], None),
            (false, &[("sec-websocket-protocol", token), ("upgrade", "websocket")], None),
            (
                true,
                &[
                    ("upgrade", "websocket"),
                    ("sec-websocket-protocol", "v5.channel.k8s.io"),
                    ("sec-websocket-protocol", "x, base64url.bearer.authorization.k8s.io.QUJ"),
                ],
                one("AB"),
            ),
            (
                true,
                &[
                    ("upgrade", "websocket"),
                    ("sec-websocket-protocol", token),
                    ("authorization", "Basic x"),
                ],
                one("ABC"),
            ),
            (
                true,
                &[
                    ("upgrade", "websocket"),
                    ("sec-websocket-protocol", token),
                    ("authorization", "Bearer x"),
                ],
                unclear,
            ),
            (
                true,
                &[
                    ("upgrade", "websocket"),
                    ("sec-websocket-protocol", token),
                    ("sec-websocket-protocol", token),
                ],
                unclear,
            ),
            (
                true,
                &[
                    ("upgrade", "websocket"),
                    ("sec-websocket-protocol", "base64url.bearer.authorization.k8s.io.%"),
                ],
                unclear,
            ),
            (true, &[("authorization", "Bearer x"), ("upgrade", "SPDY/3.1")], one("x")),
            (false, &[("authorization", "Bearer x"), ("authorization", "Bearer y")], one("x")),
            (false, &[("authorization", "Basic x"), ("authorization", "Bearer y")], None),
        ] {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.append(*name, HeaderValue::from_static(value));
            }
            let found = BearerToken::find(&map, upgrade);
            let found = found.as_ref().map(|token| match token {
                BearerToken::One(token) => Some(std::str::from_utf8(token).unwrap()),
                BearerToken::Ambiguous => None,
            });
            assert_eq!(found, expected, "{upgrade} {headers:?}");
        }
    }
}
