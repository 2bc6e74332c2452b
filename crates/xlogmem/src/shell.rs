//! `xlogmem completions` and `xlogmem man`: shell completions and manual pages of the command line.

use std::path::{Path, PathBuf};

use clap::Args;
use clap_complete::{Generator, Shell, generate};
use clap_mangen::Man;

use crate::Output;
use crate::atomic_file::{AtomicFile, AtomicFolder};
use crate::cli::{self, Refusal};

/// The arguments of `completions`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    xlogmem completions bash > ~/.local/share/bash-completion/completions/xlogmem\n  \
    xlogmem completions zsh --output ~/.zfunc\n  \
    xlogmem completions fish --output ~/.config/fish/completions")]
pub(crate) struct CompletionsArguments {
    /// The shell: bash, zsh or fish
    #[arg(value_name = "SHELL", value_parser = shell)]
    shell: Shell,

    /// Write a file by the name the shell looks for into this directory, instead of to standard output
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// The arguments of `man`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    xlogmem man | man -l -\n  \
    xlogmem man --output ~/.local/share/man/man1")]
pub(crate) struct ManArguments {
    /// Write a page of every command into this directory, instead of the first page to standard output
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

fn shell(text: &str) -> Result<Shell, String> {
    match text {
        "bash" => Ok(Shell::Bash),
        "zsh" => Ok(Shell::Zsh),
        "fish" => Ok(Shell::Fish),
        _ => Err("expected bash, zsh or fish".to_owned()),
    }
}

fn written(path: &Path) -> Output {
    Output { text: format!("wrote {}\n", path.display()), failure: None, ..Output::default() }
}

fn refuse(error: &dyn std::fmt::Display) -> Refusal {
    Refusal::Line(format!("--output {error}"))
}

/// Runs `completions`. It refuses a directory that cannot be written.
pub(crate) fn completions(arguments: &CompletionsArguments) -> Result<Output, Refusal> {
    let mut text = Vec::new();
    generate(arguments.shell, &mut cli::command(), "xlogmem", &mut text);
    match &arguments.output {
        Some(directory) => {
            let path = directory.join(arguments.shell.file_name("xlogmem"));
            AtomicFile::write(&path, &text).map_err(|error| refuse(&error))?;
            Ok(written(&path))
        }
        None => Ok(Output {
            text: String::from_utf8_lossy(&text).into_owned(),
            failure: None,
            ..Output::default()
        }),
    }
}

/// Runs `man`. It refuses a directory that cannot be written.
pub(crate) fn man(arguments: &ManArguments) -> Result<Output, Refusal> {
    let command = cli::command();
    match &arguments.output {
        Some(directory) if !directory.is_dir() => {
            let directory = directory.display();
            Err(refuse(&format!("{directory}: expected a directory that exists")))
        }
        Some(directory) => {
            let folder = AtomicFolder::create(directory).map_err(|error| refuse(&error))?;
            clap_mangen::generate_to(command, folder.folder())
                .map_err(|error| refuse(&format!("{}: {error}", directory.display())))?;
            folder.commit().map_err(|error| refuse(&error))?;
            Ok(written(directory))
        }
        None => {
            let mut text = Vec::new();
            let rendered = Man::new(command).render(&mut text);
            rendered.map_err(|error| Refusal::Line(error.to_string()))?;
            Ok(Output {
                text: String::from_utf8_lossy(&text).into_owned(),
                failure: None,
                ..Output::default()
            })
        }
    }
}
