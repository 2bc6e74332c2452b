//! The report for people: aligned, and no wider than 80 columns where a name allows it.

use std::fmt::Write;

use super::report::{Device, Report};

const WIDTH: usize = 80;
const LABEL: usize = 20;

/// The whole report.
pub(super) fn render(report: &Report) -> String {
    let mut page = Page::default();
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
        page.device(device);
    }
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
    page.verdict(report);
    page.0
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn title(&mut self, title: &str) {
        if !self.0.is_empty() {
            self.0.push('\n');
        }
        self.0.push_str(title);
        self.0.push('\n');
    }

    /// A label and its value, wrapped at spaces and indented under itself.
    fn line(&mut self, label: &str, value: &str) {
        let mut label = label;
        for piece in wrap(value, WIDTH - LABEL - 2) {
            // Writing to a string cannot fail.
            let _ = writeln!(self.0, "  {label:<LABEL$}{piece}");
            label = "";
        }
    }

    fn device(&mut self, device: &Device) {
        self.title("Device");
        self.line("name", &format!("{} ({} {})", device.name, device.kind, device.ordinal));
        self.line("uuid", &device.uuid);
        self.line(
            "memory",
            &format!(
                "{} total, {} free",
                size(device.memory_total_bytes),
                size(device.memory_free_bytes)
            ),
        );
        // The simulated device has no processors to speak of.
        if device.multiprocessors > 0 {
            let compute = format!(
                "capability {}, {} multiprocessors",
                device.compute_capability, device.multiprocessors
            );
            self.line("compute", &compute);
        }
        self.line("async pools", if device.async_pools { "yes" } else { "no" });
        self.line(
            "virtual memory",
            &match device.virtual_memory {
                true => format!("yes, granularity {}", size(device.granularity_bytes as u64)),
                false => "no".to_owned(),
            },
        );
        self.line("alignment", &size(device.allocation_alignment_bytes as u64));
        self.line(
            "stream priorities",
            &format!("{} (most urgent) to {}", device.greatest_priority, device.least_priority),
        );
    }

    fn verdict(&mut self, report: &Report) {
        self.0.push('\n');
        let verdict = match &report.error {
            None => format!("{} works", report.selection.spec),
            Some(error) => error.clone(),
        };
        for line in wrap(&verdict, WIDTH) {
            self.0.push_str(&line);
            self.0.push('\n');
        }
    }
}

/// Lines of at most `width` characters; a longer word has a line of its own.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// Bytes in the largest unit that leaves at least one.
fn size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) if bytes.is_multiple_of(*unit) => format!("{} {name}", bytes / unit),
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_loses_no_word_and_keeps_the_width() {
        let text = "one two three four-and-a-very-long-word five";
        let lines = wrap(text, 10);
        assert_eq!(lines.join(" "), text);
        assert!(lines.iter().all(|line| line.len() <= 10 || !line.contains(' ')), "{lines:?}");
        assert_eq!(wrap("", 10), [""]);
    }

    #[test]
    fn sizes_have_the_unit_people_use() {
        let sizes = [(256, "256 bytes"), (2 << 20, "2 MiB"), (32 << 30, "32 GiB")];
        for (bytes, text) in sizes {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(size((139 << 30) + (512 << 20)), "139.5 GiB");
    }
}
