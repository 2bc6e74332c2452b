//! Statistics as text that Prometheus reads.

#![allow(clippy::unwrap_used)]

use crate::support::{KEYS, Recycler, STREAM};
use xlog_cuda::device_runtime::statistics::openmetrics_text;
use xlog_cuda::device_runtime::{
    AllocTag, DeviceMemoryResource, StatisticsConfig, StatisticsResource,
};

fn snapshot() -> StatisticsResource<Recycler> {
    let resource = StatisticsResource::over(Recycler::default(), StatisticsConfig::new());
    let odd = AllocTag("a \"quoted\\\" tag\nof two lines");
    let _ = resource.allocate(100, STREAM, odd).unwrap();
    let keys = resource.allocate(1000, STREAM, KEYS).unwrap();
    resource.deallocate(keys).unwrap();
    resource.inner().fails.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(resource.allocate(5, STREAM, KEYS).is_err());
    resource
}

#[test]
fn the_text_is_open_metrics() {
    let text = openmetrics_text(&snapshot().handle().snapshot());
    for line in [
        "# TYPE xlog_device_memory_current_bytes gauge",
        "xlog_device_memory_current_bytes{device=\"3\"} 128",
        "xlog_device_memory_peak_bytes{device=\"3\"} 1152",
        "# TYPE xlog_device_memory_allocations counter",
        "xlog_device_memory_allocations_total{device=\"3\"} 2",
        "xlog_device_memory_tag_deallocations_total{device=\"3\",tag=\"keys\"} 1",
        "xlog_device_memory_tag_current_bytes{device=\"3\",tag=\"a \\\"quoted\\\\\\\" tag\\nof two lines\"} 128",
        "xlog_device_memory_request_bytes_bucket{device=\"3\",le=\"128.0\"} 1",
        "xlog_device_memory_request_bytes_bucket{device=\"3\",le=\"1024.0\"} 2",
        "xlog_device_memory_request_bytes_bucket{device=\"3\",le=\"+Inf\"} 2",
        "xlog_device_memory_request_bytes_sum{device=\"3\"} 1100",
        "xlog_device_memory_failures_by_kind_total{device=\"3\",kind=\"out_of_budget\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    // Every sample belongs to the family above it, and every family is told once.
    let mut family = "";
    let mut seen = std::collections::HashSet::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            family = rest.split(' ').next().unwrap();
            assert!(seen.insert(family.to_owned()), "{family} twice");
        } else if !line.starts_with('#') {
            assert!(line.starts_with(family), "{line} is not of {family}");
        }
    }
}
