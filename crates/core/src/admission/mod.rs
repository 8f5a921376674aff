//! What clients may take: the account of all memory that they make the process hold.

mod byte_budget;
mod memory_budget;
mod memory_labels;

pub use self::byte_budget::{ByteAccount, ByteBudget};
pub use self::memory_budget::{
    DEFAULT_LIMIT, Level, MemoryBudget, MemoryCharge, MemoryClass, MemoryStatus, SourceMemory,
};
pub use self::memory_labels::{MemoryKind, Shed};
