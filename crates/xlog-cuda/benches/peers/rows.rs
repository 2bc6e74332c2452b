//! What a program of the comparison accepts, and how it prints what it measured.
//!
//! A row is asked for as `VARIANT:WORKLOAD:PARAMETER`, on the command line or, with `--serve`, line by line on standard input.
//! What was measured goes to standard output as `peer,variant,workload,parameter,value,unit`; a row that could not be measured has
//! no value, and its unit says why. With `--serve` a line with a single dot ends the answer to each request.

use std::path::PathBuf;

/// The command line.
#[derive(Debug)]
pub struct Options {
    /// How long one row may be measured.
    pub seconds: f64,
    /// The folder of the plans to replay.
    pub plans: Option<PathBuf>,
    /// Which program this is to be, where it can be several.
    pub peer: Option<String>,
    /// The device to measure on.
    pub device: String,
    /// Whether requests come on standard input.
    pub serve: bool,
    /// The rows to measure.
    pub rows: Vec<String>,
}

impl Options {
    /// The options in `arguments`, or what is wrong with them.
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            seconds: 1.0,
            plans: None,
            peer: None,
            device: "cuda:0".to_owned(),
            serve: false,
            rows: Vec::new(),
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| format!("argument '{argument}' has no value"));
            match argument.as_str() {
                "--serve" => options.serve = true,
                // Cargo says so to every bench; kernels come with the program.
                "--bench" => {}
                "--ptx" => drop(value()?),
                "--seconds" => {
                    let text = value()?;
                    options.seconds = match text.parse() {
                        Ok(seconds) if seconds > 0.0 => seconds,
                        _ => return Err(format!("bad number of seconds '{text}'")),
                    };
                }
                "--plans" => options.plans = Some(value()?.into()),
                "--peer" => options.peer = Some(value()?),
                "--device" => options.device = value()?,
                flag if flag.starts_with('-') => return Err(format!("unknown argument '{flag}'")),
                row => options.rows.push(row.to_owned()),
            }
        }
        Ok(options)
    }
}

/// Which variant of the peer, which workload, and its parameter.
#[derive(Debug)]
pub struct Request {
    pub variant: String,
    pub workload: String,
    pub parameter: usize,
}

impl Request {
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let [variant, workload, parameter] = parts[..] else {
            return Err(format!("'{text}' is not VARIANT:WORKLOAD:PARAMETER"));
        };
        match parameter.parse() {
            Ok(parameter) if parameter > 0 => {
                Ok(Self { variant: variant.to_owned(), workload: workload.to_owned(), parameter })
            }
            _ => Err(format!("'{parameter}' is not a number above 0")),
        }
    }
}

/// Where the answer to one request goes.
#[derive(Debug)]
pub struct Rows<'a> {
    pub peer: &'a str,
    pub request: &'a Request,
    pub options: &'a Options,
}

impl Rows<'_> {
    /// The row that was asked for.
    pub fn value(&self, value: f64, unit: &str) {
        self.also("", self.request.parameter, value, unit);
    }

    /// A row beside it, named after it.
    pub fn also(&self, suffix: &str, parameter: usize, value: f64, unit: &str) {
        let Request { variant, workload, .. } = self.request;
        println!("{},{variant},{workload}{suffix},{parameter},{value:.4},{unit}", self.peer);
    }

    /// The row without a value; the reason takes the place of the unit.
    pub fn skipped(&self, reason: &str) {
        let Request { variant, workload, parameter } = self.request;
        skipped(self.peer, variant, workload, *parameter, reason);
    }
}

/// A row without a value.
pub fn skipped(peer: &str, variant: &str, workload: &str, parameter: usize, reason: &str) {
    let clean: String = reason
        .chars()
        .map(|letter| if ",\n\r\"".contains(letter) { ' ' } else { letter })
        .take(160)
        .collect();
    println!("{peer},{variant},{workload},{parameter},,skipped: {clean}");
}
