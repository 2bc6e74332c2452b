//! `xlogmem top`: all processes on the ledgers, live.
//!
//! Looking takes no part: no slot, no lock, no write. It shows what the ledger says, which is bytes of processes, not of tags.

mod arguments;
mod screen;
mod view;

use std::io::IsTerminal;

use crate::cli::Refusal;
use crate::ledger::{self, Place};
use crate::{Output, json_text};
pub(crate) use arguments::TopArguments;
use view::{Before, Picture};

/// Runs the command. A bad path is refused, as is a file that is no ledger, and a picture without a terminal to show it.
pub(crate) fn run(arguments: &TopArguments) -> Result<Output, Refusal> {
    let place = ledger::place(arguments.ledger.as_deref())?;
    place.check()?;
    let mut before = Before::default();
    if arguments.once || arguments.json {
        look(&place, &mut before);
        std::thread::sleep(arguments.every);
        let mut picture = look(&place, &mut before);
        picture.sort(arguments.sort);
        let text = match arguments.json {
            true => json_text(&picture),
            false => Ok(picture.lines().join("\n") + "\n"),
        };
        return Ok(Output::new(text, picture.error));
    }
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        return Err(Refusal::Line(
            "top needs a terminal for input and output; print one picture with --once".to_owned(),
        ));
    }
    let failure = screen::show(arguments, || look(&place, &mut before)).err();
    Ok(Output { text: String::new(), failure: failure.map(|error| format!("top: {error}")) })
}

fn look(place: &Place, before: &mut Before) -> Picture {
    let (shown, found) = place.snapshots();
    Picture::new(shown, found, before)
}
