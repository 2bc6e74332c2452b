//! Forwards signals to the program of a run.
//!
//! The terminal sends SIGINT and SIGQUIT to its whole foreground process group, which includes the program. So these two
//! are not forwarded in the foreground. A signal ignored at the start (`nohup`) stays ignored, here and in the program.
//!
//! The signals are caught before the first temporary file exists. One that arrives before the program starts ends the
//! command, after its files are removed.

use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Catches the signals that a program is sent through this process.
pub(super) fn catch() -> std::io::Result<Signals> {
    let ignored = ignored();
    let handled = [SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];
    // A handler is reset to the default in the program, but an ignored signal stays ignored.
    Signals::new(handled.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0))
}

/// Ends this process by the default action of a signal.
pub(super) fn end(signal: i32) {
    let _ = emulate_default_handler(signal);
}

/// Runs a command until it ends.
pub(super) fn wait(command: &mut Command, mut signals: Signals) -> std::io::Result<ExitStatus> {
    let handle = signals.handle();
    let mut child = command.spawn()?;
    let process = Pid::from_child(&child);
    let has_ended = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&has_ended);
    let forward = move || {
        for signal in signals.forever() {
            let signal = match signal {
                SIGTERM => Signal::TERM,
                SIGHUP => Signal::HUP,
                SIGUSR1 => Signal::USR1,
                SIGUSR2 => Signal::USR2,
                SIGINT if !is_in_foreground() => Signal::INT,
                SIGQUIT if !is_in_foreground() => Signal::QUIT,
                _ => continue,
            };
            if !ended.load(Ordering::Acquire) {
                // The process may have just ended.
                let _ = kill_process(process, signal);
            }
        }
    };
    let forwarding = std::thread::Builder::new().name("signals".to_owned()).spawn(forward)?;
    let status = child.wait();
    has_ended.store(true, Ordering::Release);
    handle.close();
    let _ = forwarding.join();
    status
}

/// Returns the ignored signals of this process as a bit mask.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Returns whether this process is in the terminal's foreground process group.
fn is_in_foreground() -> bool {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name: state, parent, group, session, terminal, the terminal's foreground group.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let field = |number: usize| fields.split_whitespace().nth(number);
    field(2).is_some() && field(2) == field(5)
}
