//! Holds watches while no apiserver can be reached.
//!
//! If watches ended or failed in a total outage, all clients of all nodes would list again at the
//! moment when the control plane returns and can bear it least. So a running watch waits for an
//! apiserver until its own deadline, and a new watch waits for up to [`NEW_WATCH`].
//!
//! A held watch waits for one notification of its pool. It has no stream and no timer but its
//! deadline, and it dials nothing: the pool dials once for all of them.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::pool::ClassPool;

/// How long a new watch is held before it is answered with 429.
pub const NEW_WATCH: Duration = Duration::from_secs(30);
/// Pause of a watch that gets no connection although an apiserver can be reached, ±50 %.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits until a watch should ask for a stream again, and returns how long that took.
///
/// In an outage it waits for the end of the outage. Without one the class has no connection although
/// an apiserver can be reached; then it waits for about [`PAUSE`].
pub async fn hold(client: Rc<UpstreamClient>, class: Rc<ClassPool>) -> Duration {
    let began = Instant::now();
    let _held = client.watches.held().add();
    if client.pool.is_total_outage() {
        client.pool.outage_ended(&class).await;
    } else {
        sleep(PAUSE.mul_f64(0.5 + fastrand::f64())).await;
    }
    began.elapsed()
}
