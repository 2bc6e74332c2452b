//! The report as text: aligned, and at most 80 columns wide unless a name is longer.
use xlog_report::text_report::{TextReport, size};

use super::limits;
use super::report::{Device, Report};

pub(super) fn render(report: &Report) -> String {
    let mut page = TextReport::default();
    page.title("Selected");
    page.line("device", &report.selection.spec);
    page.line("why", &report.selection.reason);

    page.title("Versions");
    page.line("xlog", report.xlog_version);
    let cuda = &report.cuda;
    page.line("CUDA driver API", cuda.driver_api_version.as_deref().unwrap_or("none"));
    page.line("kernel module", cuda.kernel_module_version.as_deref().unwrap_or("none"));
    page.line("driver library", cuda.library.as_deref().unwrap_or("not found"));
    match cuda.gpu_count {
        Some(count) => page.line("GPUs", &count.to_string()),
        None => page.line("GPUs", "not known"),
    }

    if let Some(device) = &report.device {
        describe(&mut page, device);
    }
    limits::render(&mut page, report.limit.as_ref(), report.ledger.as_ref());
    if let Some(check) = &report.check {
        page.title("Check");
        page.line("what", "allocate, fill, copy in, copy across, read back, compare");
        match &check.error {
            None => page.line(
                "result",
                &format!(
                    "ok, {} in {:.1} ms",
                    size(check.bytes as u64),
                    check.microseconds as f64 / 1e3
                ),
            ),
            Some(error) => page.line("result", &format!("failed: {error}")),
        }
    }
    if !report.missing.is_empty() {
        page.title("Missing");
        for missing in &report.missing {
            page.line("what", &missing.what);
            page.line("how to get it", &missing.remedy);
        }
    }
    match &report.error {
        None => page.close(&format!("{} works", report.selection.spec)),
        Some(error) => page.close(error),
    }
}

fn describe(page: &mut TextReport, device: &Device) {
    page.title("Device");
    page.line("name", &format!("{} ({} {})", device.name, device.kind, device.ordinal));
    page.line("uuid", &device.uuid);
    page.line(
        "memory",
        &format!(
            "{} total, {} free",
            size(device.memory_total_bytes),
            size(device.memory_free_bytes)
        ),
    );
    // The simulated device has no multiprocessors.
    if device.multiprocessors > 0 {
        let compute = format!(
            "capability {}, {} multiprocessors",
            device.compute_capability, device.multiprocessors
        );
        page.line("compute", &compute);
    }
    page.line("async pools", if device.async_pools { "yes" } else { "no" });
    page.line(
        "virtual memory",
        &match device.virtual_memory {
            true => format!("yes, granularity {}", size(device.granularity_bytes as u64)),
            false => "no".to_owned(),
        },
    );
    page.line("alignment", &size(device.allocation_alignment_bytes as u64));
    page.line(
        "stream priorities",
        &format!("{} (most urgent) to {}", device.greatest_priority, device.least_priority),
    );
}
