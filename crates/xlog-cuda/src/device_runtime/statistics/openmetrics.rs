//! OpenMetrics text of a snapshot, for Prometheus.

use std::fmt::Write;

use super::snapshot::{StatisticsSnapshot, Usage};

/// A family of samples: name, kind, help, and the value of an account.
pub(super) type Family = (&'static str, &'static str, &'static str, fn(&Usage) -> u64);

pub(super) const FAMILIES: &[Family] = &[
    ("current_bytes", "gauge", "Bytes of live blocks.", |usage| usage.current_bytes as u64),
    ("current_blocks", "gauge", "Live blocks.", |usage| usage.current_blocks as u64),
    ("peak_bytes", "gauge", "The most bytes that were live at once.", |usage| {
        usage.peak_bytes as u64
    }),
    ("allocated_bytes", "counter", "Bytes handed out so far.", |usage| usage.total_bytes),
    ("allocations", "counter", "Blocks handed out so far.", |usage| usage.allocations),
    ("deallocations", "counter", "Blocks given back so far.", |usage| usage.deallocations),
    ("allocation_failures", "counter", "Allocations that failed so far.", |usage| usage.failures),
];

/// Returns the snapshot as OpenMetrics text: the account of the device, those of the tags, and the histogram of sizes.
///
/// Names begin with `xlog_device_memory_`; the device is a label. Streams and queries are left out: their number is unbounded.
#[must_use]
pub fn openmetrics_text(snapshot: &StatisticsSnapshot) -> String {
    let device = snapshot.device_ordinal;
    let mut out = String::new();
    for (name, kind, help, value) in FAMILIES {
        let suffix = if *kind == "counter" { "_total" } else { "" };
        for (family, of_tag) in [
            (format!("xlog_device_memory_{name}"), false),
            (format!("xlog_device_memory_tag_{name}"), true),
        ] {
            let of = if of_tag { " By tag." } else { "" };
            let _ = writeln!(out, "# TYPE {family} {kind}");
            if name.ends_with("_bytes") {
                let _ = writeln!(out, "# UNIT {family} bytes");
            }
            let _ = writeln!(out, "# HELP {family} {help}{of}");
            if of_tag {
                for (tag, usage) in &snapshot.by_tag {
                    let tag = escape(tag.0);
                    let _ = writeln!(
                        out,
                        "{family}{suffix}{{device=\"{device}\",tag=\"{tag}\"}} {}",
                        value(usage)
                    );
                }
            } else {
                let _ = writeln!(
                    out,
                    "{family}{suffix}{{device=\"{device}\"}} {}",
                    value(&snapshot.total)
                );
            }
        }
    }
    let family = "xlog_device_memory_request_bytes";
    let _ = writeln!(
        out,
        "# TYPE {family} histogram\n# UNIT {family} bytes\n# HELP {family} Sizes asked for."
    );
    let mut below = 0;
    for (log2, count) in snapshot.sizes.classes() {
        below += count;
        let bound = 2_f64.powi(log2 as i32);
        let _ = writeln!(out, "{family}_bucket{{device=\"{device}\",le=\"{bound:?}\"}} {below}");
    }
    let _ = writeln!(out, "{family}_bucket{{device=\"{device}\",le=\"+Inf\"}} {below}");
    let _ = writeln!(out, "{family}_count{{device=\"{device}\"}} {below}");
    let _ = writeln!(out, "{family}_sum{{device=\"{device}\"}} {}", snapshot.requested_bytes);
    let family = "xlog_device_memory_failures_by_kind";
    let _ = writeln!(
        out,
        "# TYPE {family} counter\n# HELP {family} Failed allocations, by kind of error."
    );
    for (kind, count) in &snapshot.failures {
        let _ = writeln!(out, "{family}_total{{device=\"{device}\",kind=\"{kind}\"}} {count}");
    }
    out.push_str("# EOF\n");
    out
}

/// Escapes the value of a label: backslashes, quotes and line breaks.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
