//! Export of statistics to the recorder of the `metrics` facade, and as a page for Prometheus.
//!
//! The program publishes to the facade ([`publish_metrics`]); operations do not. Each request for the page takes a snapshot.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use metrics::{Label, Unit, counter, describe_counter, describe_gauge, gauge};

use super::core::Statistics;
use super::openmetrics::{FAMILIES, openmetrics_text};
use super::snapshot::{StatisticsSnapshot, Usage};

/// The timeout for a client that does not read or write.
const PATIENCE: Duration = Duration::from_secs(5);
/// The maximum size of a request.
const MAX_REQUEST_BYTES: u64 = 8 << 10;

/// Describes the metrics to the installed recorder of the `metrics` crate. Call it once, before the first publication.
pub fn describe_metrics() {
    for &(name, kind, help, _) in FAMILIES {
        let unit = if name.ends_with("_bytes") { Unit::Bytes } else { Unit::Count };
        for name in [format!("xlog_device_memory_{name}"), format!("xlog_device_memory_tag_{name}")]
        {
            match kind {
                "gauge" => describe_gauge!(name, unit, help),
                _ => describe_counter!(name, unit, help),
            }
        }
    }
}

/// Publishes a snapshot to the installed recorder of the `metrics` crate: gauges and counters named as in the OpenMetrics text,
/// with the device, and for tags the tag, as labels.
pub fn publish_metrics(snapshot: &StatisticsSnapshot) {
    let device = Label::new("device", snapshot.device_ordinal.to_string());
    publish("xlog_device_memory", &snapshot.total, std::slice::from_ref(&device));
    for (tag, usage) in &snapshot.by_tag {
        let tag = Label::new("tag", tag.0);
        publish("xlog_device_memory_tag", usage, &[device.clone(), tag]);
    }
}

fn publish(prefix: &str, usage: &Usage, labels: &[Label]) {
    for &(name, kind, _, value) in FAMILIES {
        let name = format!("{prefix}_{name}");
        let value = value(usage);
        match kind {
            "gauge" => gauge!(name, labels.iter()).set(value as f64),
            _ => counter!(name, labels.iter()).absolute(value),
        }
    }
}

/// A page of metrics, served until this is dropped.
#[derive(Debug)]
#[must_use = "the page is served until this is dropped"]
pub struct MetricsServer {
    address: SocketAddr,
    is_closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Serves `/metrics` on `address` for Prometheus, one client at a time, on a separate thread.
///
/// It is plain HTTP without authentication: bind it to an address that only permitted clients can reach. Port 0 selects a free port. If
/// the address cannot be bound, the error names it.
pub fn serve_metrics(
    address: impl ToSocketAddrs + std::fmt::Debug,
    statistics: Statistics,
) -> io::Result<MetricsServer> {
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("metrics cannot be served on {address:?}: {error}"))
    };
    let listener = TcpListener::bind(&address).map_err(named)?;
    let bound = listener.local_addr().map_err(named)?;
    let is_closing = Arc::new(AtomicBool::new(false));
    let flag = is_closing.clone();
    let thread = std::thread::Builder::new()
        .name("xlog-metrics".to_owned())
        .spawn(move || {
            for stream in listener.incoming() {
                if flag.load(Ordering::Acquire) {
                    break;
                }
                // The failure of one client does not affect the others.
                let _ = stream.and_then(|stream| answer(stream, &statistics));
            }
        })
        .map_err(named)?;
    Ok(MetricsServer { address: bound, is_closing, thread: Some(thread) })
}

impl MetricsServer {
    /// The address that it is bound to.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.is_closing.store(true, Ordering::Release);
        // The thread waits for a client: connect to end the wait. An unspecified address is reached through the loopback.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        if TcpStream::connect_timeout(&address, PATIENCE).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn answer(mut stream: TcpStream, statistics: &Statistics) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = BufReader::new((&stream).take(MAX_REQUEST_BYTES));
    let mut first = String::new();
    request.read_line(&mut first)?;
    // Reads and ignores the rest of the request, so that closing does not cut off the answer.
    let mut line = String::new();
    while request.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut words = first.split_whitespace();
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics")) => (
            "200 OK",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            openmetrics_text(&statistics.snapshot()),
        ),
        (Some("GET"), _) => ("404 Not Found", "text/plain", "metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "only GET is answered\n".to_owned()),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}
