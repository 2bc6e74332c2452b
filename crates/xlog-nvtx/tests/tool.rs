//! A tool in a library of its own, compiled from C, sees what is registered.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use xlog_nvtx::{Domain, INJECTION_VARIABLE, tool};

const CHILD: &str = "XLOG_NVTX_TEST_CHILD";

/// Compiles the fake tool; `None` on a host that only has the test binary.
fn compiled(directory: &Path) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_tool.c");
    if !Path::new(source).exists() {
        eprintln!("{source} is not on this host");
        return None;
    }
    let library = directory.join("fake_tool.so");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .args([library.as_os_str(), source.as_ref()])
        .status();
    assert!(status.unwrap().success(), "the fake tool does not compile");
    Some(library)
}

/// What a program with this tool does.
fn program() {
    let tool = tool().unwrap().unwrap();
    let domain = Domain::new(tool, "xlog");
    let heap = domain.register_heap(0x10_0000, 0x20_0000, "segment").unwrap();
    domain.register_region(&heap, 0x10_0100, 1000, "rows");
    domain.register_region(&heap, 0x10_0500, 7, "keys\0cut");
    domain.unregister_region(0x10_0100);
    for refused in [0xbad000, 0xbad001] {
        assert!(domain.register_heap(refused, 4096, "mapped").is_none());
    }
    domain.unregister_region(0x10_0500);
    domain.unregister_heap(heap);
}

const SEEN: &str = "\
core version 3 domains 1 of 16
extension 1 version 3 segments 1 segment 1 slots 63
domain xlog
heap 0xd0 at 0x100000 size 2097152 usage 1 type 1 name 1 segment
region 0xd0 of 0x4ea9 at 0x100100 size 1000 type 1
name 0xd0 of 0x100100 by 1 is 1 rows
region 0xd0 of 0x4ea9 at 0x100500 size 7 type 1
name 0xd0 of 0x100500 by 1 is 1 keys
region 0xd0 at 0x100100 by 1 gone
heap 0xd0 at 0xbad000 size 4096 usage 1 type 1 name 1 mapped
heap 0xd0 at 0xbad001 size 4096 usage 1 type 1 name 1 mapped
region 0xd0 at 0x100500 by 1 gone
heap 0xd0 0x4ea9 gone
domain 0xd0 gone
";

#[test]
fn a_tool_in_c_sees_every_heap_and_region_as_it_was_registered() {
    if std::env::var_os(CHILD).is_some() {
        return program();
    }
    let directory = std::env::temp_dir().join(format!("xlog-nvtx-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    if let Some(library) = compiled(&directory) {
        let log = directory.join("calls");
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_tool_in_c_sees_every_heap_and_region_as_it_was_registered"])
            .envs([(INJECTION_VARIABLE, &library), ("FAKE_TOOL_LOG", &log)])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert_eq!(std::fs::read_to_string(log).unwrap(), SEEN);
    }
    std::fs::remove_dir_all(directory).unwrap();
}
