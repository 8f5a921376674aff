//! What clients may take: the account of all memory that they make the process hold, the turns in which they are served,
//! and why they are refused.

mod byte_budget;
pub mod fair_queue;
mod holders;
mod memory_budget;
mod memory_labels;
mod places;
mod refusal;
pub mod turns;

pub use self::byte_budget::{ByteAccount, ByteBudget};
pub use self::holders::Holders;
pub use self::memory_budget::{
    DEFAULT_LIMIT, Level, MemoryBudget, MemoryCharge, MemoryStatus, SourceMemory,
};
pub use self::memory_labels::{MemoryKind, Shed};
pub use self::places::Places;
pub use self::refusal::{Answer, Counted, Refusal};
