//! Formats by name and by file extension.
use std::path::Path;

use xlog_trace::Format;

/// The formats that can be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFormat {
    /// The binary log.
    Xtrace,
    /// The log as text.
    Csv,
    /// RMM's log.
    RmmCsv,
    /// Trace events for Perfetto, write-only.
    Chrome,
    /// A memory snapshot of PyTorch.
    Torch,
}

const ENDINGS: [(&str, LogFormat); 6] = [
    (".rmm.csv", LogFormat::RmmCsv),
    (".xtrace", LogFormat::Xtrace),
    (".csv", LogFormat::Csv),
    (".json", LogFormat::Chrome),
    (".pickle", LogFormat::Torch),
    (".pkl", LogFormat::Torch),
];

impl LogFormat {
    const ALL: [Self; 5] = [Self::Xtrace, Self::Csv, Self::RmmCsv, Self::Chrome, Self::Torch];

    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xtrace => "xtrace",
            Self::Csv => "csv",
            Self::RmmCsv => "rmm-csv",
            Self::Chrome => "chrome",
            Self::Torch => "torch",
        }
    }

    /// Parses the name of a format.
    pub fn parse(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            format!("there is no format {name:?}; expected xtrace, csv, rmm-csv, chrome or torch")
        })
    }

    /// Parses the name of a format that can be read.
    pub fn parse_input(name: &str) -> Result<Self, String> {
        match Self::parse(name) {
            Ok(format) if format.log().is_some() => Ok(format),
            Ok(Self::Torch) => Err(
                "a snapshot is recognised by its first bytes, and \"torch\" is otherwise only written; expected xtrace, csv or rmm-csv"
                    .to_owned(),
            ),
            Ok(format) => {
                Err(format!("{:?} is only written; expected xtrace, csv or rmm-csv", format.name()))
            }
            Err(_) => Err(format!("there is no format {name:?}; expected xtrace, csv or rmm-csv")),
        }
    }

    /// Returns the format that a file's extension implies.
    pub fn of_path(path: &Path) -> Result<Self, String> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let found = ENDINGS.iter().find(|(ending, _)| name.ends_with(ending));
        found.map(|(_, format)| *format).ok_or_else(|| {
            format!(
                "{:?} does not say its format; expected a name that ends in .xtrace, .csv, .rmm.csv, .json or .pickle, or --to",
                path.display().to_string()
            )
        })
    }

    /// Returns the log format, which can also be read; `None` for exports.
    pub fn log(self) -> Option<Format> {
        match self {
            Self::Xtrace => Some(Format::Binary),
            Self::Csv => Some(Format::Csv),
            Self::RmmCsv => Some(Format::RmmCsv),
            Self::Chrome | Self::Torch => None,
        }
    }
}

impl From<Format> for LogFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Csv => Self::Csv,
            Format::RmmCsv => Self::RmmCsv,
            _ => Self::Xtrace,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_ending_decides_and_case_does_not() {
        for (path, format) in [
            ("a/b.xtrace", LogFormat::Xtrace),
            ("b.CSV", LogFormat::Csv),
            ("b.rmm.csv", LogFormat::RmmCsv),
            ("b.json", LogFormat::Chrome),
            ("b.pkl", LogFormat::Torch),
        ] {
            assert_eq!(LogFormat::of_path(Path::new(path)), Ok(format), "{path}");
            assert_eq!(LogFormat::parse(format.name()), Ok(format));
        }
        for path in ["", "log", "a.csv/", "x.txt"] {
            let found = LogFormat::of_path(Path::new(path));
            assert!(path == "a.csv/" || found.is_err(), "{path}: {found:?}");
        }
    }
}
