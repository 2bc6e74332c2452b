//! The log file of a runtime: its name and its format.
//!
//! A path is a pattern. `%p` stands for the process and `%d` for the device's ordinal, so that runtimes with one setting write
//! separate files; `%%` is a percent sign. The ending selects the format. A file has one writer.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(feature = "trace")]
use xlog_trace::TraceError;

use super::RuntimeConfig;
use crate::device_runtime::logging::LoggingSink;
#[cfg(feature = "trace")]
use crate::device_runtime::logging::{BinarySink, CsvSink, SinkError, default_config};
use crate::{Result, XlogError};

const ACCEPTED: &str = "the path of a file that ends in .xtrace or .csv, where %p is the process, %d the device and %% a percent sign";

/// A valid pattern: its ending names a format, and every `%` in it has a meaning.
pub(super) struct LogFile(pub(super) PathBuf);

impl std::str::FromStr for LogFile {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        let path = PathBuf::from(text);
        format_of(&path)?;
        expand(&path, 0)?;
        Ok(Self(path))
    }
}

/// The format of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LogFormat {
    Binary,
    Csv,
}

fn refuse(path: &Path, reason: &'static str) -> XlogError {
    XlogError::bad_setting("a log file", path.to_string_lossy(), reason, ACCEPTED)
}

fn format_of(path: &Path) -> Result<LogFormat> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("xtrace") => Ok(LogFormat::Binary),
        Some("csv") => Ok(LogFormat::Csv),
        _ => Err(refuse(path, "its ending says nothing about the format")),
    }
}

/// Returns the path of a pattern in this process, for this device.
fn expand(pattern: &Path, device_ordinal: u32) -> Result<PathBuf> {
    if !pattern.as_os_str().as_encoded_bytes().contains(&b'%') {
        return Ok(pattern.to_owned());
    }
    let text = pattern.to_str().ok_or_else(|| refuse(pattern, "it has a % and is not UTF-8"))?;
    let mut parts = text.split('%');
    let mut path = parts.next().unwrap_or_default().to_owned();
    while let Some(part) = parts.next() {
        match part.chars().next() {
            Some('p') => path.push_str(&std::process::id().to_string()),
            Some('d') => path.push_str(&device_ordinal.to_string()),
            // `%%`: the part between the two signs is empty, and the next part follows the sign unchanged.
            None => match parts.next() {
                Some(after) => {
                    path.push('%');
                    path.push_str(after);
                    continue;
                }
                None => return Err(refuse(pattern, "it ends in a single %")),
            },
            Some(_) => return Err(refuse(pattern, "a % in it has no meaning")),
        }
        path.push_str(&part[1..]);
    }
    Ok(PathBuf::from(OsString::from(path)))
}

/// Opens the log file that a pattern names for a device. The ending selects the format: `.xtrace` or `.csv`. An existing file is
/// replaced.
///
/// In the pattern `%p` stands for the process, `%d` for `device_ordinal` and `%%` for a percent sign; any other `%` is
/// [`XlogError::BadSetting`]. A file that has a writer, in this process or another, is [`XlogError::LogInUse`] and stays unchanged.
/// The sink counts later failures; they fail no allocation.
pub fn open_log(pattern: &Path, device_ordinal: u32) -> Result<Arc<dyn LoggingSink>> {
    open_rotated_log(pattern, device_ordinal, &RuntimeConfig::default())
}

/// [`open_log`] with the rotation of a configuration.
pub(super) fn open_rotated_log(
    pattern: &Path,
    device_ordinal: u32,
    config: &RuntimeConfig,
) -> Result<Arc<dyn LoggingSink>> {
    let format = format_of(pattern)?;
    let path = expand(pattern, device_ordinal)?;
    open(format, path, config)
}

/// Refuses: this build writes no log files.
#[cfg(not(feature = "trace"))]
fn open(
    _format: LogFormat,
    path: PathBuf,
    _config: &RuntimeConfig,
) -> Result<Arc<dyn LoggingSink>> {
    Err(XlogError::Kernel(format!(
        "the log {} cannot be opened: this program was built without log files; build it with the feature `trace` of xlog-cuda",
        path.display()
    )))
}

#[cfg(feature = "trace")]
fn open(format: LogFormat, path: PathBuf, config: &RuntimeConfig) -> Result<Arc<dyn LoggingSink>> {
    let mut recorder = default_config();
    if let Some(bytes) = config.log_rotate_bytes {
        if bytes < 4096 || config.log_keep > 10_000 {
            return Err(XlogError::bad_setting(
                "the rotation of a log",
                format!("{bytes} bytes, {} files", config.log_keep),
                "it is out of range",
                "at least 4096 bytes, and at most 10000 finished files",
            ));
        }
        recorder = recorder.with_rotation(bytes, config.log_keep);
    }
    let opened: std::result::Result<Arc<dyn LoggingSink>, _> = match format {
        LogFormat::Binary => {
            BinarySink::with_config(&path, recorder).map(|sink| Arc::new(sink) as _)
        }
        LogFormat::Csv => CsvSink::with_config(&path, recorder).map(|sink| Arc::new(sink) as _),
    };
    opened.map_err(|error| match error {
        SinkError::Refused(_) => XlogError::LogInUse { path },
        // The text names the file.
        SinkError::Io(text) => XlogError::Kernel(format!("the log cannot be written: {text}")),
    })
}

/// Tests whether [`open_log`] would open the log of this pattern. An existing file stays unchanged, and no file is left behind.
pub fn check_log(pattern: &Path, device_ordinal: u32) -> Result<()> {
    let path = expand(pattern, device_ordinal)?;
    if path.symlink_metadata().is_err() {
        drop(open_log(pattern, device_ordinal)?);
        // Just created; it may stay if it cannot be removed.
        let _ = std::fs::remove_file(&path);
        return Ok(());
    }
    check_writable(format_of(pattern)?, path)
}

/// Refuses: this build writes no log files.
#[cfg(not(feature = "trace"))]
fn check_writable(format: LogFormat, path: PathBuf) -> Result<()> {
    open(format, path, &RuntimeConfig::default()).map(|_| ())
}

#[cfg(feature = "trace")]
fn check_writable(_format: LogFormat, path: PathBuf) -> Result<()> {
    xlog_trace::check_writable(&path).map_err(|error| match error {
        TraceError::InUse { .. } => XlogError::LogInUse { path },
        error => XlogError::Kernel(format!("the log cannot be written: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_process_and_device_and_refuses_what_has_no_meaning() {
        let means = |text: &str| expand(Path::new(text), 7).unwrap();
        let process = std::process::id();
        assert_eq!(means("a.csv"), Path::new("a.csv"));
        assert_eq!(means("%p-%d.csv"), PathBuf::from(format!("{process}-7.csv")));
        assert_eq!(means("%d%d.csv"), Path::new("77.csv"));
        assert_eq!(means("100%%.csv"), Path::new("100%.csv"));
        assert_eq!(means("%%p%%%d%%.csv"), Path::new("%p%7%.csv"));
        assert_eq!(means("ä%dö.csv"), Path::new("ä7ö.csv"));
        for bad in ["%q.csv", "%", "a%", "%D.csv", "% p.csv", "%%%", "%ä.csv"] {
            let error = expand(Path::new(bad), 7).unwrap_err();
            assert!(matches!(error, XlogError::BadSetting { .. }), "{bad}: {error:?}");
            assert!(error.to_string().contains(bad) && error.to_string().contains("%p"), "{error}");
        }
        assert!("%q.csv".parse::<LogFile>().is_err() && "%p.csv".parse::<LogFile>().is_ok());
    }
}
