//! A summary as a page of text.

use std::fmt;

use crate::summary::{Summary, Usage};

/// Rows shown of each table.
const ROWS: usize = 10;

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = &self.total;
        writeln!(
            f,
            "{} records: {} allocations, {} frees, {} failures",
            self.records, total.allocations, total.frees, total.failures
        )?;
        writeln!(
            f,
            "peak {} bytes at order {}; {} bytes in {} blocks alive at the end",
            total.peak_bytes, self.peak_order, total.live_bytes, total.live_blocks
        )?;
        if self.unknown_frees + self.missing_frees > 0 {
            writeln!(
                f,
                "the log has gaps: {} frees of unknown blocks, {} frees missing",
                self.unknown_frees, self.missing_frees
            )?;
        }
        for (kind, times) in &self.failures {
            writeln!(f, "failed {times} times: {kind}")?;
        }
        table(f, "tag", &self.by_tag)?;
        table(f, "stream", &self.by_stream)?;
        if !self.leaks.is_empty() {
            writeln!(f, "alive at the end, the largest first:")?;
        }
        for leak in self.leaks.iter().take(ROWS) {
            let block = &leak.block;
            writeln!(
                f,
                "  {:#x}  {} bytes  tag {:?}  order {}  age {} ns",
                block.ptr, block.charged, leak.tag, block.order, leak.age_nanos
            )?;
        }
        Ok(())
    }
}

fn table(f: &mut fmt::Formatter<'_>, what: &str, rows: &[(String, Usage)]) -> fmt::Result {
    writeln!(f, "{what:<24} {:>15} {:>15} {:>12}", "peak bytes", "live bytes", "allocations")?;
    for (name, usage) in rows.iter().take(ROWS) {
        let name = if name.is_empty() { "-" } else { name };
        writeln!(
            f,
            "  {name:<22} {:>15} {:>15} {:>12}",
            usage.peak_bytes, usage.live_bytes, usage.allocations
        )?;
    }
    if rows.len() > ROWS {
        writeln!(f, "  and {} more", rows.len() - ROWS)?;
    }
    Ok(())
}
