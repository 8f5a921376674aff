//! Bulk in both directions, for clients with a certificate and for clients with a token. jackstay serves them on
//! different threads: a client with a configured identity on the identity lane, any other on the worker.

use tokio::time::Instant;

use crate::{
    Result,
    client::{Client, TOKEN},
    origin,
    phases::Bench,
    proxies::Proxy,
    report::{Metric, Samples},
};

/// Uploads of [`origin::UPLOAD_BYTES`] that move as many bytes as one download.
const UPLOADS: u64 = origin::BULK_BYTES / origin::UPLOAD_BYTES;

/// One credential and one direction.
pub struct Transfer {
    token: bool,
    upload: bool,
    /// CPU-seconds per GB.
    cpu: Metric,
    /// MB per second.
    speed: Metric,
}

impl Transfer {
    /// All transfers. The first one is measured in every round, the others in the first [`crate::phases::Plan::bulk_rounds`].
    pub const ALL: [Self; 4] = [
        Self { token: false, upload: false, cpu: Metric::BulkCpu, speed: Metric::BulkSpeed },
        Self {
            token: true,
            upload: false,
            cpu: Metric::TokenBulkCpu,
            speed: Metric::TokenBulkSpeed,
        },
        Self { token: false, upload: true, cpu: Metric::UploadCpu, speed: Metric::UploadSpeed },
        Self {
            token: true,
            upload: true,
            cpu: Metric::TokenUploadCpu,
            speed: Metric::TokenUploadSpeed,
        },
    ];
}

impl Bench<'_> {
    /// CPU of all threads and speed of one transfer.
    pub async fn bulk(
        &self,
        proxy: Option<&Proxy>,
        transfer: &Transfer,
        samples: &mut Samples,
    ) -> Result<()> {
        let (target, address) = self.target_and_address(proxy);
        let (tls, token) = if transfer.token {
            (self.tls_without_certificate, Some(TOKEN))
        } else {
            (self.tls, None)
        };
        let mut client = Client::connect(address, tls).await?.with_token(token);
        client.get(origin::OBJECT).await?;
        let cpu = || proxy.map(|proxy| proxy.process.thread_cpu_seconds()).transpose();
        let before = cpu()?;
        let start = Instant::now();
        for _ in 0..self.plan.bulk_bodies {
            if transfer.upload {
                for _ in 0..UPLOADS {
                    client.put(origin::LIST, origin::UPLOAD_BYTES).await?;
                }
            } else {
                let len = client.get(origin::BULK).await?;
                if len != origin::BULK_BYTES {
                    return Err(format!("{}: {len} bytes of the body", target.name()).into());
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let bytes = f64::from(self.plan.bulk_bodies) * origin::BULK_BYTES as f64;
        if let (Some(before), Some(after)) = (before, cpu()?) {
            samples.add(transfer.cpu, target, (after - before) / (bytes / 1e9));
        }
        samples.add(transfer.speed, target, bytes / 1e6 / seconds);
        Ok(())
    }
}
