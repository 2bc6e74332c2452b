//! What may take long has a span, and what does not has none.

#![allow(clippy::unwrap_used)]

use std::fmt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use xlog_cuda::device_runtime::{
    LedgerSetting, ResourceError, ResourceKind, RuntimeConfig, XlogDeviceRuntime,
};
use xlog_cuda::{ByteSize, DeviceSpec};

use crate::support::{Directory, ROWS, STREAM};

/// Keeps the names of the spans that were entered, with their fields.
#[derive(Clone, Default)]
struct Names {
    entered: Arc<Mutex<Vec<String>>>,
    next: Arc<AtomicU64>,
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!(" {field}={value:?}");
    }
}

impl Subscriber for Names {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields(span.metadata().name().to_owned());
        span.record(&mut fields);
        self.entered.lock().unwrap().push(fields.0);
        Id::from_u64(self.next.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Names {
    /// The spans since the last time.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.entered.lock().unwrap())
    }
}

#[test]
fn slow_paths_have_spans_and_the_hot_path_has_none() {
    let test = "spans::child_enters_them";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--ignored", "--exact", "--nocapture", test]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}\n{errors}");
    assert!(printed.contains("1 passed"), "no test is called {test}:\n{printed}");
}

/// In a process of its own: a span that another test enters for the first time at this moment may not come to know of the subscriber.
#[test]
#[ignore = "run by the test above in a process of its own"]
fn child_enters_them() {
    let directory = Directory::new();
    let ledger = LedgerSetting::File(directory.file("spans.ledger"));
    let ordinal = 13;
    let config = RuntimeConfig::default()
        .with_device(DeviceSpec::Sim)
        .with_resource(ResourceKind::Pool)
        .with_budget(ByteSize::Bytes(256 << 20))
        .with_ledger(ledger);
    XlogDeviceRuntime::configure(ordinal, config).unwrap();
    let names = Names::default();
    tracing::subscriber::with_default(names.clone(), || {
        let runtime = XlogDeviceRuntime::try_get(ordinal).unwrap();
        let seen = names.take();
        assert_eq!(seen.first().map(String::as_str), Some("runtime_build ordinal=13"), "{seen:?}");

        let block = runtime.allocate(1 << 20, STREAM, ROWS).unwrap();
        let seen = names.take();
        let has = |seen: &[String], name: &str| seen.iter().any(|span| span.starts_with(name));
        assert!(has(&seen, "segment_growth bytes=1048576"), "{seen:?}");
        assert!(has(&seen, "ledger_file_lock path="), "{seen:?}");
        runtime.deallocate(block).unwrap();

        // Served from what is at hand.
        names.take();
        for _ in 0..100 {
            let block = runtime.allocate(1 << 20, STREAM, ROWS).unwrap();
            runtime.deallocate(block).unwrap();
        }
        assert_eq!(names.take(), [""; 0]);

        let refused = runtime.allocate(512 << 20, STREAM, ROWS).unwrap_err();
        assert!(matches!(refused, ResourceError::OutOfBudget { .. }), "{refused}");
        let seen = names.take();
        assert!(has(&seen, "reclaim bytes=536870912"), "{seen:?}");

        runtime.reap_pending().unwrap();
        runtime.trim().unwrap();
        let seen = names.take();
        assert_eq!(seen.first().map(String::as_str), Some("reap_pending"), "{seen:?}");
        assert!(has(&seen, "trim"), "{seen:?}");
    });
}
