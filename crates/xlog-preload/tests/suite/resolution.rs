//! Every way to a driver function leads through the library, and no other lookup changes.

use super::{MIB, Program, Scratch, WAYS, command, initialized, preload};

const OURS: &str = "libxlog_preload.so";
const DRIVER: &str = "libcuda.so.1";

#[test]
fn an_allocation_is_counted_in_whatever_way_the_function_was_found() {
    for way in WAYS {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[]);
        let block = program.get("alloc 1000000");
        assert_eq!(scratch.used(), 1_000_192, "{way}");
        assert_eq!(program.call("free 12345").0, 1, "{way}: the driver's own answer");
        program.get(&format!("free {block}"));
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{way}");
        let pooled = program.get("async 1000 0");
        assert_eq!(scratch.used(), 32 * MIB, "{way}");
        program.get(&format!("free-async {pooled} 0"));
        program.get("sync");
        assert_eq!(scratch.used(), 0, "{way}");
        let (status, errors) = program.end();
        assert!(status.success() && errors.is_empty(), "{way}: {errors}");
    }
}

#[test]
fn lookups_lead_where_the_version_and_the_flags_say() {
    let scratch = Scratch::new();
    for way in ["proc", "proc2"] {
        let mut program = Program::start(way, &scratch, &[]);
        for (request, object) in [
            ("where cuMemAlloc 12000 0", OURS),
            ("where cuMemAlloc 3020 1", OURS),
            // The function of CUDA 2 has other arguments.
            ("where cuMemAlloc 2000 0", DRIVER),
            ("where cuMemAllocAsync 12000 2", OURS),
            ("where cuMemAllocAsync 11010 2", "none"),
            ("where cuGetProcAddress 11030 0", OURS),
            ("where cuGetProcAddress 12000 0", OURS),
            ("where cuCtxSynchronize 12000 0", OURS),
            // A version that is not known here.
            ("where cuCtxSynchronize 13000 0", DRIVER),
            ("where cuDeviceGetCount 12000 0", DRIVER),
            ("where cuGraphInstantiate 10000 0", OURS),
            ("where cuGraphInstantiate 11000 0", OURS),
            ("where cuGraphInstantiate 12000 0", OURS),
            ("where cuGraphInstantiateWithFlags 11040 0", OURS),
            ("where cuGraphInstantiateWithParams 12000 2", OURS),
            ("where cuGraphLaunch 12000 2", OURS),
            ("where cuNothing 12000 0", "none"),
            ("symbol cuMemAlloc_v2", OURS),
            ("symbol cuMemAlloc", DRIVER),
            ("symbol cuMemAllocAsync_ptsz", OURS),
            ("symbol cuDeviceGetCount", DRIVER),
            ("symbol cuNothing", "none"),
        ] {
            assert_eq!(program.ask(request), object, "{way}: {request}");
        }
    }
}

#[test]
fn lookups_of_other_names_and_scopes_stay_as_they_are() {
    let scratch = Scratch::new();
    for way in ["dlsym", "linked", "late"] {
        let mut with = Program::start(way, &scratch, &[]);
        let mut bare = Program::spawn(way, command(way, &scratch).env_remove("LD_PRELOAD"));
        for request in [
            "default malloc",
            "next malloc",
            "next dlsym",
            "self main",
            "default cuNothing",
            "default cudaMalloc",
            "default cuMemAlloc_v2x",
            "default c",
            "default cu",
            "next cuDeviceGetCount",
        ] {
            let (with, bare) = (with.ask(request), bare.ask(request));
            let with = if request == "next dlsym" { with.replace(OURS, "libc.so.6") } else { with };
            assert_eq!(with, bare, "{way}: {request}");
        }
    }
    let mut linked = Program::start("linked", &scratch, &[]);
    for request in ["default cuMemAlloc_v2", "self cuMemAlloc_v2", "next cuMemAlloc_v2"] {
        assert_eq!(linked.ask(request), OURS, "{request}");
    }
}

#[test]
fn without_a_driver_its_functions_are_not_found() {
    let scratch = Scratch::new();
    let mut program = Program::start("late", &scratch, &[]);
    for request in ["default cuMemAlloc_v2", "default cuGetProcAddress", "self cuMemAlloc_v2"] {
        assert_eq!(program.ask(request), "none", "{request}");
    }
    assert!(scratch.snapshot().is_none());
}

#[test]
fn nothing_happens_before_cuinit() {
    let scratch = Scratch::new();
    let note = scratch.0.join("note");
    let log = scratch.0.join("log.xtrace");
    let settings =
        [("XLOG_EXEC_NOTE", note.to_str().unwrap()), ("XLOG_EXEC_LOG", log.to_str().unwrap())];
    let mut program = Program::start("dlsym", &scratch, &settings);
    for request in ["alloc 1000", "async 1000 0", "create 2097152", "info", "total"] {
        assert!(program.ask(request).starts_with(['3', '2']), "{request}");
    }
    assert_eq!(program.ask("threads"), "1");
    assert!(!note.exists() && !log.exists() && scratch.snapshot().is_none());
    program.get("init");
    program.get("alloc 1000");
    assert!(note.exists() && log.exists() && scratch.snapshot().is_some());
}

#[test]
fn a_second_preloaded_library_stays_in_the_chain() {
    let scratch = Scratch::new();
    let source = scratch.0.join("other.c");
    let text = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n#include <stddef.h>\n\
        int cuMemAlloc_v2(void *out, size_t bytes) {\n\
        int (*next)(void *, size_t) = (int (*)(void *, size_t))dlsym(RTLD_NEXT, \"cuMemAlloc_v2\");\n\
        fprintf(stderr, \"other %zu\\n\", bytes);\n return next(out, bytes);\n}\n";
    std::fs::write(&source, text).unwrap();
    let other = scratch.0.join("other.so");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([&other, &source]).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    let (ours, other) = (preload().display().to_string(), other.display().to_string());
    for order in [format!("{ours}:{other}"), format!("{other}:{ours}")] {
        let mut program = Program::start("linked", &scratch, &[("LD_PRELOAD", &order)]);
        program.get("init");
        program.get("alloc 5120");
        assert_eq!(scratch.used(), 5120, "{order}");
        let (status, errors) = program.end();
        assert!(status.success() && errors == "other 5120\n", "{order}: {errors}");
    }
}
