//! The results of a run.
use std::fmt;

/// The outcome of one check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The resource follows the rule.
    Passed,
    /// The resource breaks the rule, as the text describes.
    Failed(String),
    /// The rule does not apply, for the given reason.
    Skipped(String),
}

/// One check and its outcome.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckReport {
    /// The rule, as `group::rule`.
    pub name: &'static str,
    /// The outcome.
    pub outcome: Outcome,
}

/// The results of a run of the suite. Its display is one line per check.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "a report that nobody reads proves nothing; see assert_passed"]
pub struct Report {
    device: String,
    checks: Vec<CheckReport>,
}

impl Report {
    pub(crate) fn new(device: &str, checks: Vec<CheckReport>) -> Self {
        Self { device: device.to_owned(), checks }
    }

    /// Returns every check, in execution order.
    pub fn checks(&self) -> &[CheckReport] {
        &self.checks
    }

    /// Returns the failed checks.
    pub fn failed(&self) -> impl Iterator<Item = &CheckReport> {
        self.checks.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_)))
    }

    /// Returns the skipped checks.
    pub fn skipped(&self) -> impl Iterator<Item = &CheckReport> {
        self.checks.iter().filter(|check| matches!(check.outcome, Outcome::Skipped(_)))
    }

    /// Returns true if at least one check passed and none failed.
    pub fn passed(&self) -> bool {
        self.failed().next().is_none()
            && self.checks.iter().any(|check| check.outcome == Outcome::Passed)
    }

    /// Panics with the whole report unless the suite passed. For tests.
    ///
    /// # Panics
    /// If a check failed, or none passed.
    #[allow(clippy::panic)]
    pub fn assert_passed(&self) {
        if !self.passed() {
            panic!("the resource does not conform\n{self}");
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for CheckReport { name, outcome } in &self.checks {
            match outcome {
                Outcome::Passed => writeln!(f, "passed   {name}")?,
                Outcome::Skipped(reason) => writeln!(f, "skipped  {name}: {reason}")?,
                Outcome::Failed(reason) => writeln!(f, "FAILED   {name}: {reason}")?,
            }
        }
        let (failed, skipped) = (self.failed().count(), self.skipped().count());
        let passed = self.checks.len() - failed - skipped;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped on {}", self.device)
    }
}
