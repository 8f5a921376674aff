//! Secrets of TLS sessions for packet captures (cargo feature `keylog`). A build without the feature has no code that
//! writes them.

use std::sync::Arc;

use rustls::KeyLog;

/// Whether this process writes the secrets: the build can, and `$SSLKEYLOGFILE` names the file.
pub fn is_active() -> bool {
    cfg!(feature = "keylog") && std::env::var_os("SSLKEYLOGFILE").is_some()
}

/// Where TLS configurations write their secrets: to `$SSLKEYLOGFILE` in the format of NSS, or nowhere.
pub fn key_log() -> Arc<dyn KeyLog> {
    #[cfg(feature = "keylog")]
    return Arc::new(rustls::KeyLogFile::new());
    #[cfg(not(feature = "keylog"))]
    Arc::new(rustls::NoKeyLog)
}
