//! `xlogmem top`: all processes on the ledgers, live.
//!
//! Reading takes no slot and no lock that another process waits for, and writes nothing. It shows the physical bytes that the ledger
//! counts per process, and the tags that processes publish while they are watched. If the driver reports them, contexts and
//! modules are shown separately.

mod arguments;
mod card;
mod cluster;
mod fields;
mod screen;
mod view;

use std::io::IsTerminal;

use xlog_cuda::ledger::{LedgerResult, LedgerView, Snapshot};
use xlog_report::text_report;

use crate::Output;
use crate::cli::Refusal;
use crate::ledger::{self, LedgerLocation};
pub(crate) use arguments::TopArguments;
use card::Nvml;
use view::{Before, Picture};

/// Runs the command. It refuses a bad path, a file that is not a ledger, and a live display without a terminal.
pub(crate) fn run(arguments: &TopArguments) -> Result<Output, Refusal> {
    if let Some(place) = &arguments.cluster {
        return cluster::run(place, arguments.json);
    }
    let place = ledger::place(arguments.ledger.as_deref())?;
    place.check()?;
    let (mut before, mut views) = (Before::default(), OpenViews::default());
    let nvml = Nvml::open();
    let mut observe = || {
        let mut picture = observe(&place, &mut before, &mut views);
        picture.add_cards(|uuid| nvml.as_ref()?.memory(uuid));
        picture
    };
    if arguments.once || arguments.json {
        observe();
        std::thread::sleep(arguments.every);
        let mut picture = observe();
        picture.sort(arguments.sort);
        let render = |picture: &Picture| {
            picture
                .lines(text_report::width())
                .iter()
                .map(|line| line.text.clone() + "\n")
                .collect()
        };
        return Ok(Output::of(&picture, arguments.json, render, picture.error.clone()));
    }
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        return Err(Refusal::Line(
            "top needs a terminal for input and output; print one picture with --once".to_owned(),
        ));
    }
    let failure = screen::show(arguments, observe).err();
    Ok(Output {
        text: String::new(),
        failure: failure.map(|error| format!("top: {error}")),
        ..Output::default()
    })
}

fn observe(place: &LedgerLocation, before: &mut Before, views: &mut OpenViews) -> Picture {
    let (shown, found) = place.snapshots();
    views.keep_on(&found);
    Picture::new(shown, found, before)
}

/// Views that stay open between readings, so that processes publish their tags.
#[derive(Default)]
struct OpenViews(Vec<LedgerView>);

impl OpenViews {
    /// Opens all views anew, since a file may have been replaced, and then closes the previous ones.
    fn keep_on(&mut self, found: &[(String, LedgerResult<Snapshot>)]) {
        let open = |(path, snapshot): &(String, LedgerResult<Snapshot>)| {
            snapshot.as_ref().ok()?;
            // A ledger that cannot be watched is shown without tags.
            LedgerView::open(path).ok().filter(|view| view.watch().is_ok())
        };
        self.0 = found.iter().filter_map(open).collect();
    }
}
