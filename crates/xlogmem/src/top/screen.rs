//! The terminal: redrawn at every reading, at every key and when its size changes.
//!
//! However the command ends, by a key, a signal, an error or a panic, the terminal is restored.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, poll, read};
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode, size,
};
use crossterm::{cursor, execute, queue, style};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::TopArguments;
use super::view::{Column, Picture, Shown, Tone};

/// The maximum delay until a signal is noticed.
const PATIENCE: Duration = Duration::from_millis(100);

/// The terminal in raw mode, restored on drop.
struct Borrowed;

impl Borrowed {
    fn new() -> io::Result<Self> {
        let previous = std::panic::take_hook();
        // The message of a panic belongs on the main screen.
        std::panic::set_hook(Box::new(move |info| {
            restore_terminal();
            previous(info);
        }));
        enable_raw_mode()?;
        let borrowed = Self;
        execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
        Ok(borrowed)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the terminal. Failures are ignored: there is no terminal to report them on.
fn restore_terminal() {
    let _ = execute!(io::stdout(), cursor::Show, LeaveAlternateScreen);
    let _ = disable_raw_mode();
}

/// The text of the help.
const HELP: [&str; 18] = [
    "Keys",
    "  q, Esc           quit",
    "  p                pause, and go on",
    "  s                sort by the next column",
    "  arrows, pages    scroll; Home and End: to the first and the last line",
    "  h, ?             this help, and back",
    "",
    "Columns",
    "  used             bytes of the card that the process holds: live, cached and pending together",
    "  live             bytes of live blocks, with what their granules have beyond them",
    "  cached           bytes in no block; another process gets them on request",
    "  pending          bytes of freed blocks that wait for work on streams",
    "  peak             the most that it has held",
    "  rate /s          by how much used grew in the last second",
    "  granted          bytes that the ledger has promised and the process does not hold",
    "  since            how long it has been on the ledger",
    "  below            the live blocks by tag",
    "A narrow terminal shows fewer columns. (silent): the process does not answer, it may be stopped.",
];

/// The settings that keys change.
struct State {
    sort: Column,
    paused: bool,
    helping: bool,
    first: usize,
    lines: usize,
    height: usize,
}

impl Default for State {
    fn default() -> Self {
        let sort = Column::Used;
        Self { sort, paused: false, helping: false, first: 0, lines: 0, height: 24 }
    }
}

#[derive(PartialEq)]
enum KeyAction {
    Quit,
    Draw,
    Nothing,
}

impl State {
    fn key(&mut self, key: KeyEvent) -> KeyAction {
        if key.kind == KeyEventKind::Release {
            return KeyAction::Nothing;
        }
        let page = self.height.saturating_sub(2).max(1);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyAction::Quit,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return KeyAction::Quit;
            }
            KeyCode::Char('h' | '?') => self.helping = !self.helping,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Up => self.first = self.first.saturating_sub(1),
            KeyCode::Down => self.first += 1,
            KeyCode::PageUp | KeyCode::Left => self.first = self.first.saturating_sub(page),
            KeyCode::PageDown | KeyCode::Right => self.first += page,
            KeyCode::Home => self.first = 0,
            KeyCode::End => self.first = usize::MAX,
            _ => return KeyAction::Nothing,
        }
        KeyAction::Draw
    }
}

/// Shows the live display until the user or a signal ends it.
pub(super) fn show(
    arguments: &TopArguments,
    mut observe: impl FnMut() -> Picture,
) -> io::Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let _terminal = Borrowed::new()?;
    let mut state = State { sort: arguments.sort, ..State::default() };
    let mut picture = observe();
    let mut next = Instant::now() + arguments.every;
    draw(&mut picture, &mut state)?;
    while !ended.load(Ordering::Relaxed) {
        let wait = if state.paused { PATIENCE } else { next.duration_since(Instant::now()) };
        if poll(wait.min(PATIENCE))? {
            let wish = match read()? {
                Event::Key(key) => state.key(key),
                Event::Resize(..) => KeyAction::Draw,
                _ => KeyAction::Nothing,
            };
            match wish {
                KeyAction::Quit => break,
                KeyAction::Draw => draw(&mut picture, &mut state)?,
                KeyAction::Nothing => {}
            }
        }
        if !state.paused && Instant::now() >= next {
            next = Instant::now() + arguments.every;
            picture = observe();
            draw(&mut picture, &mut state)?;
        }
    }
    Ok(())
}

fn draw(picture: &mut Picture, state: &mut State) -> io::Result<()> {
    picture.sort(state.sort);
    let (width, height) = size()?;
    state.height = usize::from(height);
    let lines = match state.helping {
        true => HELP.iter().map(|line| Shown::plain((*line).to_owned())).collect(),
        false => picture.lines(usize::from(width)),
    };
    state.lines = lines.len();
    let room = state.height.saturating_sub(1).max(1);
    state.first = state.first.min(state.lines.saturating_sub(room));
    let heading = format!(
        "xlogmem top{}  sorted by {}  keys: q quit, p pause, s sort, h help, arrows scroll",
        if state.paused { " (paused)" } else { "" },
        state.sort
    );
    let mut out = io::stdout().lock();
    queue!(out, cursor::MoveTo(0, 0), style::SetAttribute(style::Attribute::Reverse))?;
    line(&mut out, &heading, width)?;
    queue!(out, style::SetAttribute(style::Attribute::Reset))?;
    let is_coloured = is_coloured(std::env::var_os("NO_COLOR").as_deref());
    for (at, shown) in lines.iter().skip(state.first).take(room).enumerate() {
        let Ok(row) = u16::try_from(at + 1) else { break };
        if row >= height {
            break;
        }
        queue!(out, cursor::MoveTo(0, row))?;
        match shown.tone {
            Tone::Plain => {}
            Tone::Heading => queue!(out, style::SetAttribute(style::Attribute::Bold))?,
            Tone::Faint => queue!(out, style::SetAttribute(style::Attribute::Dim))?,
            tone if is_coloured => queue!(out, style::SetForegroundColor(colour(tone)))?,
            Tone::Good | Tone::Warning | Tone::Bad => {}
        }
        line(&mut out, &shown.text, width)?;
        queue!(out, style::SetAttribute(style::Attribute::Reset))?;
    }
    queue!(out, Clear(ClearType::FromCursorDown))?;
    out.flush()
}

/// Returns whether to use colours: a non-empty `NO_COLOR` disables them.
fn is_coloured(no_color: Option<&std::ffi::OsStr>) -> bool {
    no_color.is_none_or(std::ffi::OsStr::is_empty)
}

fn colour(tone: Tone) -> style::Color {
    match tone {
        Tone::Good => style::Color::Green,
        Tone::Warning => style::Color::Yellow,
        Tone::Bad => style::Color::Red,
        Tone::Plain | Tone::Heading | Tone::Faint => style::Color::Reset,
    }
}

/// Writes one line, cut at the edge, and clears the rest.
fn line(out: &mut impl Write, text: &str, width: u16) -> io::Result<()> {
    let shown: String = text.chars().take(usize::from(width)).collect();
    queue!(out, style::Print(shown), Clear(ClearType::UntilNewLine))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(state: &mut State, code: KeyCode) -> KeyAction {
        state.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_pause_sort_scroll_and_end() {
        let mut state = State { height: 10, ..State::default() };
        assert!(press(&mut state, KeyCode::Char('p')) == KeyAction::Draw && state.paused);
        assert!(press(&mut state, KeyCode::Char('h')) == KeyAction::Draw && state.helping);
        assert!(press(&mut state, KeyCode::Char('?')) == KeyAction::Draw && !state.helping);
        assert!(press(&mut state, KeyCode::Char('s')) == KeyAction::Draw);
        assert_eq!(state.sort, Column::Peak);
        press(&mut state, KeyCode::Up);
        assert_eq!(state.first, 0);
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::PageDown);
        assert_eq!(state.first, 9);
        assert!(press(&mut state, KeyCode::Char('x')) == KeyAction::Nothing);
        assert!(press(&mut state, KeyCode::Char('q')) == KeyAction::Quit);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(state.key(interrupt) == KeyAction::Quit);
    }
}
