//! Installs jackstay on a node beside kubelet, and removes it (`jackstay install`, `jackstay uninstall`).
//!
//! ```text
//! kubelet ──> plan ──> journal ──> transaction ──> node Ready ──> journal: installed
//!                         │              │ any error, or the end of the process
//!                         └──────────────┴──> undo ──> node as before
//! ```
//!
//! * [`kubelet`] finds kubelet: its unit, its kubeconfig, its directory of static pods.
//! * [`bypass`] finds a kubelet whose kubeconfig was written again and names another server.
//! * [`host`] says where the program can stay, and which hosts need another way.
//! * [`service`] renders the units or the manifest, from the files in `deploy/`.
//! * [`journal`] stores on disk, before the first change, every path that will change with its old content, and every
//!   unit that will be enabled. So the change can be undone by a process that knows nothing else.
//! * [`steps`] is the order of the changes, as data: `--dry-run` prints it.
//! * [`transaction`] writes and restores files. [`undo`] restores the node: first kubelet gets a kubeconfig
//!   that works without jackstay, then jackstay stops.
//! * [`upgrade`] changes a complete installation to the version of this program, or to the one of before after an error.
//!
//! An interrupted change is undone by the first of these: the guard, which waits until the installing process ends; the
//! recovery unit, which runs at boot before kubelet; the next `jackstay install` or `jackstay uninstall`.

pub mod bypass;
pub mod dependents;
pub mod host;
pub mod journal;
pub mod kubelet;
pub mod service;
pub mod steps;
pub mod transaction;
pub mod undo;
pub mod upgrade;
