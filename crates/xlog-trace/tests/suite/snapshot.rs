//! The snapshot loads in Python and has what PyTorch's viewer looks for.

use std::process::Command;

use xlog_trace::export::{SnapshotCounts, write_torch_snapshot};
use xlog_trace::{Action, Failure, Format, Names, Record, Strictness};

use crate::support::{Random, Scratch, any_record, encode, for_seeds, reader};
use crate::tools::left_out;

fn export(records: &[Record], names: &Names) -> (Vec<u8>, SnapshotCounts) {
    let bytes = encode(Format::Binary, records, names);
    let mut out = Vec::new();
    let counts = write_torch_snapshot(|| Ok(reader(&bytes, Strictness::Strict)), &mut out).unwrap();
    (out, counts)
}

/// Loads the file and walks it as the viewer does, backwards from the end: every live block at
/// every time lies in a segment. Prints the counts.
const CHECK: &str = r#"
import pickle, sys, bisect
snap = pickle.load(open(sys.argv[1], "rb"))
assert set(snap) == {"segments", "device_traces", "allocator_settings", "external_annotations"}, set(snap)
entries = 0
live_total = 0
for device, trace in enumerate(snap["device_traces"]):
    segments = sorted((s for s in snap["segments"] if s["device"] == device), key=lambda s: s["address"])
    starts = [s["address"] for s in segments]
    def segment_of(addr):
        i = bisect.bisect_right(starts, addr) - 1
        assert i >= 0 and addr < segments[i]["address"] + segments[i]["total_size"], hex(addr)
    live = {}
    for s in segments:
        assert {"total_size", "stream", "segment_type", "segment_pool_id", "allocated_size",
                "active_size", "requested_size", "is_expandable", "frames", "blocks"} <= set(s)
        at = s["address"]
        for b in s["blocks"]:
            assert b["address"] == at and b["size"] > 0, (b, at)
            assert b["state"] in ("active_allocated", "inactive")
            if b["state"] == "active_allocated":
                live[b["address"]] = b
                live_total += 1
                assert b["frames"]
            at += b["size"]
        assert at == s["address"] + s["total_size"]
    for e in reversed(trace):
        entries += 1
        assert e["action"] in ("alloc", "free_requested", "free_completed", "oom"), e
        assert isinstance(e["size"], int) and isinstance(e["stream"], int) and isinstance(e["time_us"], int)
        for f in e["frames"]:
            assert set(f) == {"filename", "line", "name"} and isinstance(f["name"], str)
        if e["action"] == "oom":
            assert "device_free" in e
            continue
        segment_of(e["addr"])
        if e["action"] == "free_completed":
            live[e["addr"]] = e
        elif e["action"] == "free_requested":
            assert e["addr"] in live
        else:
            live.pop(e["addr"], None)
print(entries, len(snap["segments"]), live_total)
if len(sys.argv) > 2:
    exec(sys.argv[2])
"#;

/// What the check prints, or none when there is no Python here.
fn python(bytes: &[u8], more: &str) -> Option<String> {
    let scratch = Scratch::new(&format!("snapshot-{:p}", bytes));
    let path = scratch.path("snapshot.pickle");
    std::fs::write(&path, bytes).unwrap();
    let output = match Command::new("python3").arg("-c").arg(CHECK).arg(&path).arg(more).output() {
        Ok(output) => output,
        Err(error) => {
            left_out("reading a snapshot back", &format!("python3 cannot be run: {error}"));
            return None;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_snapshot_has_the_keys_and_the_blocks() {
    let mut names = Names::new();
    let tag = names.intern("join");
    let failure = Failure { kind: names.intern("OutOfBudget"), message: names.intern("full") };
    let base = |action, device, order: u64| {
        Record::new(action, device, order, order * 1000).with_stream(3).with_tag(tag)
    };
    let address = 0x7f12_3456_7800;
    let records = [
        base(Action::Allocate, 0, 0).with_ptr(address).with_bytes(1000).with_granted(1024),
        base(Action::Allocate, 1, 1).with_ptr(256).with_bytes(300_000).with_query_id(77),
        base(Action::Allocate, 0, 2).with_bytes(1 << 50).with_failure(failure),
        base(Action::Deallocate, 0, 3).with_ptr(address).with_bytes(1000),
        base(Action::Allocate, 99, 4).with_ptr(256).with_bytes(1),
    ];
    let (bytes, counts) = export(&records, &names);
    assert_eq!((counts.trace_entries, counts.segments), (5, 2));
    assert_eq!((counts.live_blocks, counts.left_out), (1, 1));
    let more = format!(
        "t = snap['device_traces'][0]\n\
         assert [e['action'] for e in t] == ['alloc', 'oom', 'free_requested', 'free_completed']\n\
         assert t[0]['addr'] == {address} and t[0]['size'] == 1000 and t[0]['stream'] == 3\n\
         assert t[0]['frames'][0]['name'] == 'join'\n\
         assert t[1]['size'] == 1 << 50\n\
         e = snap['device_traces'][1][0]\n\
         assert e['size'] == 300000 and e['frames'][1]['line'] == 77\n\
         assert len(snap['device_traces']) == 2\n"
    );
    if let Some(printed) = python(&bytes, &more) {
        assert_eq!(printed.trim(), "5 2 1");
    }
}

#[test]
fn any_log_becomes_a_snapshot_the_viewer_can_walk() {
    for_seeds(4, |seed| {
        let mut random = Random::new(seed);
        let mut names = Names::new();
        let records: Vec<Record> = (0..800)
            .map(|_| {
                let size = 1 + random.below_u64(3 << 20);
                any_record(&mut random, &mut names)
                    .with_ptr((1 + random.below_u64(50)) << 22)
                    .with_bytes(size)
                    .with_granted(size)
            })
            .collect();
        let (bytes, counts) = export(&records, &names);
        if let Some(printed) = python(&bytes, "") {
            let numbers: Vec<u64> =
                printed.split_whitespace().map(|number| number.parse().unwrap()).collect();
            assert_eq!(numbers, [counts.trace_entries, counts.segments, counts.live_blocks]);
        }
    });
}

#[test]
fn numbers_of_every_length_survive_the_pickle() {
    let sizes: Vec<u64> =
        (0..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit]).chain([u64::MAX]).collect();
    let records: Vec<Record> = (0..)
        .zip(&sizes)
        .map(|(order, &size)| Record::new(Action::AllocateFailure, 0, order, 0).with_bytes(size))
        .collect();
    let (bytes, _) = export(&records, &Names::new());
    let more = format!("assert [e['size'] for e in snap['device_traces'][0]] == {sizes:?}");
    python(&bytes, &more);
}
