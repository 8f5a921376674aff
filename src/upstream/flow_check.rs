//! Checks the flow of one upgrade until it is dead. The flows of mode `passthrough` are checked by a table.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::flow_health::{
    FlowDecision, FlowHealth, FlowThresholds, IDLE_CHECK_INTERVAL, LOSSY_AFTER, LOSSY_SERVER,
    SERVER,
};
use jackstay_core::line_pacing::{LOOK_INTERVAL, LinePacing};
use jackstay_sys::clock;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use tokio::time::sleep;

use super::endpoint::Endpoint;

/// Detects that the TCP flow of an upgrade is dead.
#[derive(Debug, Clone)]
pub struct FlowHealthCheck {
    pub(in crate::upstream) observer: StreamObserver,
    /// Whether the flow is a tunnel whose request was answered, to which `tunnel_dead_after` applies. Before, and if it is a
    /// watch, it has the thresholds of any flow to an apiserver.
    pub(in crate::upstream) is_tunnel: Rc<Cell<bool>>,
    pub(in crate::upstream) tunnel_dead_after: Duration,
    pub(in crate::upstream) endpoint: Arc<Endpoint>,
}

impl FlowHealthCheck {
    /// Waits until the flow is dead; returns the reason.
    pub async fn wait_until_dead(&self) -> &'static str {
        let mut health = FlowHealth::new(clock::now());
        let (mut refuted, mut pacing) = (0, LinePacing::default());
        loop {
            refuted += u32::from(health.take_refuted_suspicion());
            let thresholds = match self.is_tunnel.get() {
                true => FlowThresholds::tunnel(self.tunnel_dead_after),
                false if refuted >= LOSSY_AFTER => LOSSY_SERVER,
                false => SERVER,
            };
            let info = self.observer.tcp_info();
            if let Ok(info) = &info {
                let bound = |bounds| self.observer.socket().bound_in_flight(bounds);
                self.endpoint.pace(&mut pacing, info, clock::now(), bound);
            }
            let pause = match info {
                // Without TCP_INFO (before Linux 4.6) there is no evidence and no verdict.
                Err(_) => IDLE_CHECK_INTERVAL,
                Ok(info) => {
                    let now = clock::now();
                    let thresholds = thresholds.at_distance(self.endpoint.line_delay(now));
                    match health.check(&info, &thresholds, now) {
                        FlowDecision::Dead(death) => return death.as_str(),
                        FlowDecision::CheckAgain { after, probe } => {
                            if probe {
                                let _ = self.observer.send_keepalive_probe();
                            }
                            after
                        }
                    }
                }
            };
            sleep(if pacing.is_active() { pause.min(LOOK_INTERVAL) } else { pause }).await;
        }
    }
}
