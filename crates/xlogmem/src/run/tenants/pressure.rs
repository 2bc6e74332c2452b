//! `run tenants --pressure`: requests memory that another process has cached while that is idle, busy, killed or stopped.
//!
//! Each case has its own ledger and its own second process. The verdict includes the latency of the request on a GPU. On
//! a simulated device, whose machine may be under load, the latency is only shown.

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::Serialize;
use xlog_cuda::device_runtime::{
    AllocTag, OomPolicy, ResourceError, ResourceKind, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};
use xlog_cuda::{ByteSize, CudaDevice, Result, XlogError};
use xlog_report::text_report::{TextReport, size};

use super::holder::{HolderLine, KEPT, NO_BUDGET, PARTS, PEAK};
use super::watch::Scratch;
use super::{TenantsArguments, worker};
use crate::Output;
use crate::doctor::Selected;
use crate::run::report::{RunHead, RunReport};
use crate::temporary::{self, Registered};

/// The request of this process, in twentieths of the limit: 70 %.
const ASKED: u64 = 14;
const TAG: AllocTag = AllocTag("asked");
/// The deadline of a request that must be served.
const DEADLINE: Duration = Duration::from_secs(30);
/// The deadline of a request that must be refused.
const SHORT_DEADLINE: Duration = Duration::from_secs(1);
/// How long after its deadline a refusal may come on a GPU.
const LATENESS: Duration = Duration::from_millis(500);

#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
enum State {
    Idle,
    Busy,
    Killed,
    Stopped,
}

impl State {
    const ALL: [Self; 4] = [Self::Idle, Self::Busy, Self::Killed, Self::Stopped];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Killed => "killed",
            Self::Stopped => "stopped",
        }
    }

    /// Returns the maximum latency of the grant or the refusal on a GPU.
    fn goal(self) -> Duration {
        match self {
            Self::Idle | Self::Killed => Duration::from_millis(300),
            Self::Busy => Duration::from_millis(1500),
            Self::Stopped => SHORT_DEADLINE + LATENESS,
        }
    }
}

#[derive(Serialize, Debug)]
struct Case {
    state: State,
    /// Bytes that the other process published as cached.
    cached_bytes: u64,
    asked_bytes: u64,
    served: bool,
    milliseconds: f64,
    goal_milliseconds: u64,
    in_time: bool,
    /// The message of the refusal.
    refusal: Option<String>,
    /// The median time of a pair in a busy process, before the request and after.
    pair_before_ns: Option<u64>,
    pair_after_ns: Option<u64>,
    /// The difference from the expectation.
    problem: Option<String>,
}

#[derive(Serialize, Debug)]
struct Report {
    #[serde(flatten)]
    head: RunHead,
    limit_bytes: Option<u64>,
    /// Whether the latency goals are part of the verdict.
    timed: bool,
    cases: Vec<Case>,
}

pub(super) fn run(selection: &Selected, budget: ByteSize, arguments: &TenantsArguments) -> Output {
    let mut report = Report {
        head: RunHead::new("tenants", selection.describe(), &arguments.resource),
        limit_bytes: None,
        timed: !selection.spec.is_simulated(),
        cases: Vec::new(),
    };
    if let Err(error) = measure(selection, budget, arguments, &mut report) {
        report.head.error = Some(format!("{}: {error}", selection.spec));
    }
    report.finish(arguments.json)
}

fn measure(
    selection: &Selected,
    budget: ByteSize,
    arguments: &TenantsArguments,
    report: &mut Report,
) -> Result<()> {
    let device = Arc::new(CudaDevice::open_spec(selection.spec)?);
    report.head.device_name = Some(device.properties().name.clone());
    let limit = budget.of(device.properties().total_bytes);
    for state in State::ALL {
        let scratch = Scratch::new().map_err(|error| failed(&error))?;
        let path = scratch.ledger();
        let directory = path.parent().map(Path::to_owned).unwrap_or_default();
        let key = DeviceKey::new("tenants").map_err(|error| failed(&error))?;
        let config = LedgerConfig::new(key).with_directory(directory).with_limit(limit);
        let ledger = Ledger::open(config).map_err(|error| failed(&error))?;
        report.limit_bytes = Some(ledger.limit().map_err(|error| failed(&error))?);
        let case = ask(state, &device, &path, arguments, report)?;
        report.cases.push(case);
    }
    Ok(())
}

fn failed(error: &dyn std::fmt::Display) -> XlogError {
    XlogError::Kernel(error.to_string())
}

/// Requests memory while the other process is in a state.
fn ask(
    state: State,
    device: &Arc<CudaDevice>,
    ledger: &Path,
    arguments: &TenantsArguments,
    report: &Report,
) -> Result<Case> {
    let limit = report.limit_bytes.unwrap_or(0);
    let config = worker::config(ledger, NO_BUDGET, &ResourceKind::Pool.to_string())?;
    let runtime = XlogDeviceRuntime::with_config(device.clone(), &config)?;
    let deadline = if state == State::Stopped { SHORT_DEADLINE } else { DEADLINE };
    if let Some(budget) = runtime.budget() {
        budget.set_policy(OomPolicy::default().with_deadline(deadline));
    }
    // The first allocation of a process is slower and must not be measured.
    runtime.deallocate(runtime.allocate(1 << 20, StreamId::DEFAULT, TAG)?)?;
    runtime.reap_pending()?;
    runtime.trim()?;
    let mut holder = Holder::start(state, &report.head.selection.spec, ledger, arguments)?;
    let cached_bytes = holder.ready()?;
    match state {
        State::Killed => holder.signal(Signal::KILL)?,
        State::Stopped => holder.signal(Signal::STOP)?,
        State::Idle | State::Busy => {}
    }
    let asked_bytes = limit / PARTS * ASKED;
    let began = Instant::now();
    let asked = runtime.allocate(asked_bytes as usize, StreamId::DEFAULT, TAG);
    let took = began.elapsed();
    let mut case = Case {
        state,
        cached_bytes,
        asked_bytes,
        served: asked.is_ok(),
        milliseconds: (took.as_secs_f64() * 1e6).round() / 1e3,
        goal_milliseconds: state.goal().as_millis() as u64,
        in_time: took <= state.goal(),
        refusal: asked.as_ref().err().map(ToString::to_string),
        pair_before_ns: None,
        pair_after_ns: None,
        problem: None,
    };
    case.problem = match &asked {
        Ok(_) if state == State::Stopped => Some("was served beside a stopped process".to_owned()),
        Ok(_) => None,
        Err(error) if state == State::Stopped => unnamed(error, holder.pid(), took),
        Err(error) => Some(format!("was refused: {error}")),
    };
    if let Ok(block) = asked {
        runtime.deallocate(block)?;
        runtime.reap_pending()?;
        runtime.trim()?;
    }
    if matches!(state, State::Idle | State::Busy) {
        match holder.finish() {
            Ok(pairs) => (case.pair_before_ns, case.pair_after_ns) = pairs,
            Err(error) => case.problem = case.problem.or(Some(error.to_string())),
        }
    }
    if report.timed && !case.in_time && case.problem.is_none() {
        let (time, goal) = (case.milliseconds, case.goal_milliseconds);
        case.problem = Some(format!("took {time:.1} ms, and may take {goal}"));
    }
    Ok(case)
}

/// Returns what the refusal beside a stopped process fails to name.
fn unnamed(error: &ResourceError, pid: u32, took: Duration) -> Option<String> {
    let Some(report) = error.report() else {
        return Some(format!("the refusal has no report: {error}"));
    };
    let named = report.processes.iter().find(|other| other.pid == pid);
    match named {
        Some(other) if other.cached.unwrap_or(0) == 0 => {
            Some("the refusal does not say what the process has cached".to_owned())
        }
        Some(other) if other.has_answered => {
            Some("the refusal does not say that the process is silent".to_owned())
        }
        Some(_) if took < SHORT_DEADLINE / 2 => Some("was refused before its deadline".to_owned()),
        Some(_) => None,
        None => Some(format!("the refusal does not name process {pid}: {error}")),
    }
}

/// The other process, killed on drop.
struct Holder {
    child: std::process::Child,
    _registered: Registered,
    input: Option<ChildStdin>,
    lines: Option<Lines<BufReader<ChildStdout>>>,
}

impl Holder {
    fn start(
        state: State,
        spec: &str,
        ledger: &Path,
        arguments: &TenantsArguments,
    ) -> Result<Self> {
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let mut command = Command::new(program);
        let kind = if state == State::Busy { "busy" } else { "idle" };
        command
            .args(["run", "tenants", "--device", spec, "--holder", kind])
            .args(["--resource", &arguments.resource])
            .arg("--ledger")
            .arg(ledger)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let (mut child, _registered) =
            temporary::process(&mut command).map_err(|error| failed(&error))?;
        let input = child.stdin.take();
        let lines = child.stdout.take().map(|output| BufReader::new(output).lines());
        Ok(Self { child, _registered, input, lines })
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn next(&mut self) -> Result<HolderLine> {
        let line = self.lines.as_mut().and_then(Iterator::next);
        let line = line.and_then(std::result::Result::ok);
        let line = line.ok_or_else(|| failed(&"the other process ended early"))?;
        serde_json::from_str(&line).map_err(|error| failed(&error))
    }

    /// Waits until it has cached memory, and returns the published bytes.
    fn ready(&mut self) -> Result<u64> {
        match self.next()? {
            HolderLine::Ready(cached) => Ok(cached),
            other => Err(failed(&format!("unexpected: {other:?}"))),
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).map_err(|error| failed(&error))?;
        if signal == Signal::STOP {
            // `kill` returns before all threads of the process have stopped.
            waitpid(Some(pid), WaitOptions::UNTRACED).map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    /// Ends it and returns the times of its pairs.
    fn finish(&mut self) -> Result<(Option<u64>, Option<u64>)> {
        drop(self.input.take());
        match self.next()? {
            HolderLine::Done { pair_before_ns, pair_after_ns } => {
                Ok((pair_before_ns, pair_after_ns))
            }
            other => Err(failed(&format!("unexpected: {other:?}"))),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It has already ended, unless it is stopped or this run failed.
        if self.input.is_some() || self.lines.is_none() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

impl RunReport for Report {
    fn head(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn problem(&self) -> Option<String> {
        let bad = self.cases.iter().find_map(|case| {
            let problem = case.problem.as_ref()?;
            Some(format!("a request beside a process that is {} {problem}", case.state.name()))
        });
        let missing = self.cases.len() != State::ALL.len();
        bad.or_else(|| missing.then(|| "not every case was run".to_owned()))
    }

    fn render(&self) -> String {
        let mut page = self.head.begin("Pressure");
        let share = |parts: u64| 100 * parts / PARTS;
        let resource = &self.head.resource;
        page.line("resource", &format!("pool; of the other process {resource}, in a ledger"));
        page.line(
            "work",
            &format!(
                "another process peaks at {} % of the limit and keeps {} %; this one asks for {} %",
                share(PEAK),
                share(KEPT),
                share(ASKED)
            ),
        );
        page.line("limit of both", &size(self.limit_bytes.unwrap_or(0)));
        if !self.cases.is_empty() {
            self.figures(&mut page);
        }
        let verdict = "other processes gave up their cached memory, and a stopped one was named";
        self.head.end(page, verdict)
    }
}

impl Report {
    fn figures(&self, page: &mut TextReport) {
        page.title("Result");
        page.row("other process     cached      asked         time       goal  outcome");
        for case in &self.cases {
            let outcome = if case.served { "served" } else { "refused" };
            page.row(&format!(
                "{:<13} {:>10} {:>10} {:>9.1} ms {:>7} ms  {outcome}",
                case.state.name(),
                size(case.cached_bytes),
                size(case.asked_bytes),
                case.milliseconds,
                case.goal_milliseconds,
            ));
        }
        if !self.timed {
            page.line("goals", "are for a GPU; here the times are only shown");
        }
        for case in &self.cases {
            if let (Some(before), Some(after)) = (case.pair_before_ns, case.pair_after_ns) {
                page.line("pair, when busy", &format!("{before} ns before, {after} ns after"));
            }
            if let Some(refusal) = case.refusal.as_ref().filter(|_| case.problem.is_none()) {
                page.line(case.state.name(), refusal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Cuda, select};

    fn case(state: State) -> Case {
        Case {
            state,
            cached_bytes: 55,
            asked_bytes: 70,
            served: state != State::Stopped,
            milliseconds: 10.0,
            goal_milliseconds: 300,
            in_time: true,
            refusal: None,
            pair_before_ns: Some(40),
            pair_after_ns: Some(41),
            problem: None,
        }
    }

    #[test]
    fn the_verdict_names_the_case_that_went_wrong() {
        let report = |problem: Option<&str>, states: &[State]| {
            let selection = select(Some("sim"), &Cuda::find()).unwrap().describe();
            let mut cases: Vec<Case> = states.iter().copied().map(case).collect();
            if let (Some(problem), Some(last)) = (problem, cases.last_mut()) {
                last.problem = Some(problem.to_owned());
            }
            let head = RunHead::new("tenants", selection, "pool");
            let mut report = Report { head, limit_bytes: Some(100), timed: false, cases };
            report.judge();
            report
        };
        let good = report(None, &State::ALL);
        assert!(good.head.ok, "{:?}", good.head.error);
        let page = good.render();
        for part in ["idle", "busy", "killed", "stopped", "41 ns after", "only shown"] {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
        let bad = report(Some("was refused: full"), &State::ALL);
        let error = bad.head.error.unwrap_or_default();
        assert!(error.contains("that is stopped was refused: full"), "{error}");
        let error = report(None, &[State::Idle]).head.error.unwrap_or_default();
        assert!(error.contains("not every case"), "{error}");
    }
}
