//! A folder of a test's own, gone when the test has passed.

// Each test binary uses a part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::{json, text, xlogmem};
use serde_json::Value;

pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        // Tests of several files share a process.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let own = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(format!("xlogmem-{name}-{own}"));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    /// The path of a file here, as an argument.
    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// A file with this text.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The names of the files here.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    xlogmem().args(arguments).output().unwrap()
}

/// The JSON of a command that must be good.
pub(crate) fn good(arguments: &[&str]) -> Value {
    let output = run(&[arguments, &["--json"]].concat());
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {report:#}");
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    assert_eq!((&report["ok"], &report["error"]), (&true.into(), &Value::Null));
    report
}

/// The JSON of a command that succeeds with one warning, which has all of `words`.
pub(crate) fn warned(arguments: &[&str], words: &[&str]) -> Value {
    let output = run(&[arguments, &["--json"]].concat());
    assert_warning(&output, words);
    let report = json(&output);
    assert_eq!(report["ok"], true, "{arguments:?}: {report:#}");
    report
}

/// Exit status 0, and one warning on standard error that has all of `words`.
pub(crate) fn assert_warning(output: &Output, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), error.lines().count()), (Some(0), 1), "{error}");
    assert!(error.starts_with("xlogmem: warning: "), "{error}");
    for word in words {
        assert!(error.contains(word), "{error} does not say {word}");
    }
}

/// The JSON of a command that must fail: exit status 1, and one line on standard error that has all of `words`.
pub(crate) fn bad(arguments: &[&str], words: &[&str]) -> Value {
    let output = run(&[arguments, &["--json"]].concat());
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    for word in words {
        assert!(error.contains(word), "{error} does not say {word}");
    }
    let report = json(&output);
    assert_eq!(report["ok"], false);
    assert!(error.contains(report["error"].as_str().unwrap()), "{error}");
    report
}

/// The page of a command for people: at most 80 columns, no space at an end.
pub(crate) fn page(arguments: &[&str], status: i32) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
    let page = text(&output.stdout).to_owned();
    for line in page.lines() {
        // A word that is longer than a line, such as a path, has one of its own.
        let wide = line.chars().count() > 80 && line.trim().contains(' ');
        assert!(!wide || line.contains('/'), "{line}");
        assert_eq!(line, line.trim_end(), "space at the end of a line");
    }
    page
}
