//! Statistics as text that Prometheus reads.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString,
    Unit,
};

use crate::support::{KEYS, Recycler, STREAM};
use xlog_cuda::device_runtime::statistics::{
    describe_metrics, openmetrics_text, publish_metrics, serve_metrics,
};
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

/// Keeps the last value of each metric, by its name and labels.
#[derive(Default)]
struct Values {
    values: Arc<Mutex<HashMap<String, f64>>>,
    units: Mutex<HashMap<String, Unit>>,
}

struct Value(String, Arc<Mutex<HashMap<String, f64>>>);

impl Value {
    fn set(&self, value: f64) {
        self.1.lock().unwrap().insert(self.0.clone(), value);
    }
}

impl CounterFn for Value {
    fn increment(&self, _: u64) {
        unreachable!("totals are published, not steps");
    }
    fn absolute(&self, value: u64) {
        self.set(value as f64);
    }
}

impl GaugeFn for Value {
    fn increment(&self, _: f64) {
        unreachable!("gauges are set");
    }
    fn decrement(&self, _: f64) {
        unreachable!("gauges are set");
    }
    fn set(&self, value: f64) {
        Value::set(self, value);
    }
}

impl Values {
    fn value(&self, key: &Key) -> Arc<Value> {
        let labels: Vec<_> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        Arc::new(Value(format!("{}{{{}}}", key.name(), labels.join(",")), self.values.clone()))
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>) {
        self.units.lock().unwrap().insert(name.as_str().to_owned(), unit.unwrap());
    }
}

impl Recorder for Values {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, unit);
    }
    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, unit);
    }
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.value(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.value(key))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn the_facade_is_told_the_same_values() {
    let recorder = Values::default();
    metrics::with_local_recorder(&recorder, || {
        describe_metrics();
        publish_metrics(&snapshot().handle().snapshot());
    });
    let values = recorder.values.lock().unwrap();
    assert_eq!(values["xlog_device_memory_current_bytes{device=3}"], 128.0);
    assert_eq!(values["xlog_device_memory_allocations{device=3}"], 2.0);
    assert_eq!(values["xlog_device_memory_tag_deallocations{device=3,tag=keys}"], 1.0);
    let units = recorder.units.lock().unwrap();
    assert_eq!(units["xlog_device_memory_peak_bytes"], Unit::Bytes);
    // Every name that is published was described.
    assert!(values.keys().all(|name| units.contains_key(name.split('{').next().unwrap())));
}

fn ask(address: std::net::SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_page_is_served_until_the_server_is_dropped() {
    let resource = snapshot();
    let statistics = resource.handle();
    let server = serve_metrics("127.0.0.1:0", statistics.clone()).unwrap();
    let address = server.local_addr();
    let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    assert_eq!(body, openmetrics_text(&statistics.snapshot()));
    assert!(ask(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(ask(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    let taken = serve_metrics(address, statistics).unwrap_err();
    assert!(taken.to_string().contains(&address.port().to_string()), "{taken}");
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}
