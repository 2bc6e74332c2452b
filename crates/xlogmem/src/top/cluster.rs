//! `xlogmem top --cluster`: the workers of all nodes, from the metrics that Ray or Dask collects.
//!
//! Each target is a metrics page in Prometheus's text format, read by one plain HTTP request. It may prefix the gauges of
//! `xlogmem.ray` and `xlogmem.dask` with anything. A target that cannot be read is reported; the others are shown.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use xlog_report::escape;
use xlog_report::text_report::size;

use crate::Output;
use crate::cli::Refusal;

const SCHEMA: u32 = 1;
const TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum size of a page.
const MOST: u64 = 64 << 20;
/// The file in which Ray's head node lists the pages of all nodes.
pub(super) const RAY: &str = "/tmp/ray/prom_metrics_service_discovery.json";

#[derive(Serialize, Debug, Default, PartialEq)]
struct Row {
    node: String,
    device: String,
    process: String,
    tag: String,
    used_bytes: u64,
    peak_bytes: u64,
    quota_bytes: u64,
    guaranteed_bytes: u64,
    device_limit_bytes: u64,
}

impl Row {
    /// Returns whether its worker has withdrawn it with zeroes: gauges cannot be removed, and a live worker's device has a limit.
    fn is_withdrawn(&self) -> bool {
        self.used_bytes == 0 && self.quota_bytes == 0 && self.device_limit_bytes == 0
    }
}

#[derive(Serialize, Debug)]
struct ClusterPicture {
    schema: u32,
    ok: bool,
    /// The reason why a target could not be read, in one line.
    error: Option<String>,
    targets: Vec<String>,
    processes: Vec<Row>,
}

pub(super) fn run(place: &str, json: bool) -> Result<Output, Refusal> {
    let targets = targets(place).map_err(Refusal::Line)?;
    let (mut rows, mut errors) = (BTreeMap::new(), Vec::new());
    for target in &targets {
        match fetch(target) {
            Ok(text) => collect(&text, &mut rows),
            Err(error) => errors.push(format!("{target}: {error}")),
        }
    }
    let error = (!errors.is_empty()).then(|| errors.join("; "));
    let processes = rows.into_values().filter(|row| !row.is_withdrawn()).collect();
    let picture = ClusterPicture { schema: SCHEMA, ok: error.is_none(), error, targets, processes };
    Ok(Output::of(&picture, json, render, picture.error.clone()))
}

/// Returns the pages to read: addresses separated by commas, or those in a Prometheus service discovery file.
fn targets(place: &str) -> Result<Vec<String>, String> {
    if !Path::new(place).is_absolute() {
        return Ok(place.split(',').filter(|part| !part.is_empty()).map(str::to_owned).collect());
    }
    let refuse = |reason: String| {
        format!(
            "--cluster {place}: {reason}; expected addresses such as HOST:PORT, or a file of service discovery"
        )
    };
    let text = std::fs::read_to_string(place).map_err(|error| refuse(error.to_string()))?;
    #[derive(serde::Deserialize)]
    struct Group {
        targets: Vec<String>,
    }
    let groups: Vec<Group> =
        serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    Ok(groups.into_iter().flat_map(|group| group.targets).collect())
}

/// Fetches the body of a page; the default path is `/metrics`.
fn fetch(target: &str) -> Result<String, String> {
    let plain = target.strip_prefix("http://").unwrap_or(target);
    let (host, path) = match plain.split_once('/') {
        Some((host, path)) => (host, format!("/{path}")),
        None => (plain, "/metrics".to_owned()),
    };
    let text = |error: std::io::Error| error.to_string();
    let address = host.to_socket_addrs().map_err(text)?.next().ok_or("it has no address")?;
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT).map_err(text)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(text)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(text)?;
    // A server answers HTTP/1.0 without chunks and closes the connection.
    let request = format!("GET {path} HTTP/1.0\r\nHost: {host}\r\nAccept: text/plain\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut bytes = Vec::new();
    stream.take(MOST).read_to_end(&mut bytes).map_err(text)?;
    let answer = String::from_utf8_lossy(&bytes);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("it does not answer by HTTP")?;
    let status = head.lines().next().unwrap_or_default();
    match status.split_whitespace().nth(1) {
        Some("200") => Ok(body.to_owned()),
        _ => Err(format!("it answers {status:?}")),
    }
}

type Key = (String, String, String, String);

/// Adds the gauges of a page to the rows. A process on two pages is one row.
fn collect(text: &str, rows: &mut BTreeMap<Key, Row>) {
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, labels, value)) = sample(line) else { continue };
        let Some(at) = name.find("xlogmem_") else { continue };
        let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
        let (node, device) = (label("node"), label("device"));
        let (process, tag) = (label("process"), label("tag"));
        let key = (node.clone(), device.clone(), process.clone(), tag.clone());
        let new = || Row { node, device, process, tag, ..Row::default() };
        // A gauge is a float; bytes below 2^53 are exact.
        let bytes = value.max(0.0) as u64;
        let row = rows.entry(key).or_insert_with(new);
        match name.get(at..) {
            Some("xlogmem_used_bytes") => row.used_bytes = bytes,
            Some("xlogmem_peak_bytes") => row.peak_bytes = bytes,
            Some("xlogmem_quota_bytes") => row.quota_bytes = bytes,
            Some("xlogmem_guaranteed_bytes") => row.guaranteed_bytes = bytes,
            Some("xlogmem_device_limit_bytes") => row.device_limit_bytes = bytes,
            _ => {}
        }
    }
}

/// Parses the name, labels and value of a line of the text format.
fn sample(line: &str) -> Option<(&str, BTreeMap<String, String>, f64)> {
    let (name, mut rest) = line.split_once('{')?;
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            let value = after.split_whitespace().next()?;
            return Some((name, labels, value.parse().ok()?));
        }
        let (label, after) = rest.split_once("=\"")?;
        let (value, after) = quoted(after)?;
        labels.insert(label.to_owned(), value);
        rest = after;
    }
}

/// Parses a quoted text, unescaped, and returns it with the rest.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            _ => value.push(letter),
        }
    }
    None
}

fn render(picture: &ClusterPicture) -> String {
    let mut text = String::new();
    let mut last = None;
    if picture.processes.is_empty() {
        text.push_str("no worker of the cluster publishes device memory\n");
    }
    for row in &picture.processes {
        let place = (&row.node, &row.device);
        if last != Some(place) {
            let is_here = |other: &&Row| (&other.node, &other.device) == place;
            let used: u64 =
                picture.processes.iter().filter(is_here).map(|row| row.used_bytes).sum();
            let limit = row.device_limit_bytes;
            let share = used as f64 / limit.max(1) as f64 * 100.0;
            let gap = if last.is_some() { "\n" } else { "" };
            text.push_str(&format!("{gap}{}  {}\n", line(&row.node), line(&row.device)));
            text.push_str(&format!("{share:.0} % of {} used\n", size(limit)));
            text.push_str("       pid      used     limit      peak  tag\n");
            last = Some(place);
        }
        let (used, quota, peak) =
            (size(row.used_bytes), size(row.quota_bytes), size(row.peak_bytes));
        let (process, tag) = (line(&row.process), line(&row.tag));
        text.push_str(&format!("{process:>10}{used:>10}{quota:>10}{peak:>10}  {tag}\n"));
    }
    text
}

/// Escapes a label for printing.
fn line(label: &str) -> String {
    escape::line(label).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP ray_xlogmem_used_bytes Device memory.
# TYPE ray_xlogmem_used_bytes gauge
ray_xlogmem_used_bytes{Version=\"2\",node=\"n1\",device=\"GPU-0\",process=\"7\",tag=\"a \\\"job\\\", 1\"} 1.048576e+06
ray_xlogmem_quota_bytes{node=\"n1\",device=\"GPU-0\",process=\"7\",tag=\"a \\\"job\\\", 1\"} 2097152.0 1700000000
ray_xlogmem_device_limit_bytes{node=\"n1\",device=\"GPU-0\",process=\"7\",tag=\"a \\\"job\\\", 1\"} 4194304
xlogmem_used_bytes{node=\"n2\",device=\"GPU-0\",process=\"7\",tag=\"\\u{1b}[2J\"} 5
other_used_bytes{node=\"n1\"} 3
xlogmem_used_bytes{node=\"broken
";

    #[test]
    fn gauges_are_taken_whatever_is_before_their_names_and_between_them() {
        let mut rows = BTreeMap::new();
        collect(PAGE, &mut rows);
        collect(PAGE, &mut rows);
        let rows: Vec<Row> = rows.into_values().collect();
        assert_eq!(rows.len(), 2, "{rows:?}");
        assert_eq!((rows[0].tag.as_str(), rows[0].used_bytes), ("a \"job\", 1", 1 << 20));
        assert_eq!((rows[0].quota_bytes, rows[0].device_limit_bytes), (2 << 20, 4 << 20));
        let (ok, error) = (true, None);
        let picture = ClusterPicture { schema: 1, ok, error, targets: Vec::new(), processes: rows };
        let text = render(&picture);
        assert!(text.contains("25 % of 4 MiB used") && text.contains("a \"job\", 1"), "{text}");
        assert!(!text.contains('\u{1b}'), "a label cannot steer a terminal: {text:?}");
    }

    #[test]
    fn a_series_that_its_worker_has_withdrawn_is_no_process() {
        let mut rows = BTreeMap::new();
        let labels = "{node=\"n1\",device=\"GPU-0\",process=\"7\",tag=\"an earlier task\"}";
        let gauges = ["used", "peak", "quota", "guaranteed", "device_limit"];
        let page = |value: u8| {
            gauges.map(|name| format!("ray_xlogmem_{name}_bytes{labels} {value}\n")).concat()
        };
        collect(&page(0), &mut rows);
        assert!(rows.values().all(Row::is_withdrawn) && rows.len() == 1, "{rows:?}");
        collect(&page(1), &mut rows);
        assert!(!rows.values().any(Row::is_withdrawn), "{rows:?}");
    }

    #[test]
    fn a_page_is_read_by_one_request_and_an_error_names_the_target() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            for status in ["200 OK", "404 Not Found"] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let read = stream.read(&mut request).unwrap();
                assert!(request[..read].starts_with(b"GET /metrics HTTP/1.0\r\n"));
                write!(stream, "HTTP/1.0 {status}\r\nContent-Type: text/plain\r\n\r\n{PAGE}")
                    .unwrap();
            }
        });
        assert_eq!(fetch(&address).unwrap(), PAGE);
        assert!(fetch(&format!("http://{address}/metrics")).unwrap_err().contains("404"));
        server.join().unwrap();
        assert!(fetch("127.0.0.1:1").is_err());
        let refused = targets("/nowhere/discovery.json").unwrap_err();
        assert!(refused.contains("/nowhere/discovery.json") && refused.contains("HOST:PORT"));
        assert_eq!(targets("a:1,b:2").unwrap(), ["a:1", "b:2"]);
    }
}
