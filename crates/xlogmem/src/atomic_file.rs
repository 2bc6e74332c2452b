//! Outputs that are there when they are complete, and not before.
//!
//! A file is written beside its place and moved there; so is each file of a folder. What fails on the way, or is interrupted, leaves what
//! was there, and nothing else. What is there already and no plain file, such as a pipe or a device, is written to as it is and
//! never replaced.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::temporary::{self, EmptyFolder, Folder, uninterrupted};

/// Whether an output is standard output, which then has nothing else.
pub(crate) fn is_stdout(output: &Path) -> bool {
    output == Path::new("-")
}

/// Whether a refusal is of an output to `-` whose reader has gone.
pub(crate) fn has_no_reader(refusal: &str) -> bool {
    let reason = std::io::Error::from(rustix::io::Errno::PIPE).to_string();
    refusal.starts_with("-: ") && refusal.ends_with(&reason)
}

/// The file that becomes the output when it is complete.
pub(crate) struct AtomicFile {
    /// Where it is written, and where it goes; `None` when it is there already.
    moves: Option<(temporary::File, PathBuf)>,
    pub(crate) file: File,
}

impl AtomicFile {
    pub(crate) fn create(output: &Path) -> Result<Self, String> {
        let blame = |error: std::io::Error| format!("{}: {error}", output.display());
        if is_stdout(output) {
            let stdout = std::io::stdout().as_fd().try_clone_to_owned().map_err(blame)?;
            return Ok(Self { moves: None, file: stdout.into() });
        }
        if output.is_dir() {
            return Err(format!(
                "{}: it is a folder; expected the name of a file",
                output.display()
            ));
        }
        if output.exists() && !output.is_file() {
            let file = File::options().write(true).open(output).map_err(blame)?;
            return Ok(Self { moves: None, file });
        }
        // Replacing needs no right to write the file itself, only its folder; who took that right away meant it.
        if output.metadata().is_ok_and(|metadata| metadata.permissions().readonly()) {
            return Err(format!(
                "{}: it is read-only; expected a file that may be replaced",
                output.display()
            ));
        }
        // A link stays, and what it leads to is replaced.
        let place = std::fs::canonicalize(output).unwrap_or_else(|_| output.to_owned());
        let folder = match place.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let made = temporary::file(folder, ".part-");
        let (file, path) = made.map_err(|error| blame_unnamed(output, &error))?;
        Ok(Self { moves: Some((path, place)), file })
    }

    /// Writes a whole file; returns its size.
    pub(crate) fn write(output: &Path, bytes: &[u8]) -> Result<u64, String> {
        let part = Self::create(output)?;
        (&part.file).write_all(bytes).map_err(|error| format!("{}: {error}", output.display()))?;
        part.commit(output)
    }

    /// Puts it in place; returns its size.
    pub(crate) fn commit(mut self, output: &Path) -> Result<u64, String> {
        let blame = |error: std::io::Error| format!("{}: {error}", output.display());
        let bytes = self.file.metadata().map_err(blame)?.len();
        if let Some((path, place)) = self.moves.take() {
            path.persist(&place).map_err(blame)?;
        }
        Ok(bytes)
    }
}

/// A folder whose files go to their place together, when all of them are complete.
pub(crate) struct AtomicFolder {
    /// Where files are written. Goes before the folders that were made for it.
    folder: Folder,
    /// Where they go; `None` when they go nowhere.
    place: Option<PathBuf>,
    /// Folders that were made for it, the innermost first.
    made: Vec<EmptyFolder>,
}

impl AtomicFolder {
    /// Files that go to the folder `output`, which is made, with those above it, where it is not there.
    pub(crate) fn create(output: &Path) -> Result<Self, String> {
        let missing = output.ancestors().filter(|path| !path.as_os_str().is_empty());
        let mut missing: Vec<PathBuf> =
            missing.take_while(|path| !path.exists()).map(Path::to_owned).collect();
        missing.reverse();
        let blame = |error: std::io::Error| format!("{}: {error}", output.display());
        let mut made = Vec::new();
        // What was made so far goes again when this fails.
        for path in missing {
            made.insert(0, EmptyFolder::create(&path).map_err(blame)?);
        }
        let folder = Folder::create_in(output, ".part-");
        let folder = folder.map_err(|error| blame_unnamed(output, &error))?;
        Ok(Self { folder, place: Some(output.to_owned()), made })
    }

    /// Files that are not kept.
    pub(crate) fn passing(name: &str) -> Result<Self, String> {
        let folder = Folder::create(&format!("{name}-")).map_err(|error| error.to_string())?;
        Ok(Self { folder, place: None, made: Vec::new() })
    }

    /// The path of a file while it is written.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// The folder that the files are written to.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file, where files are kept.
    pub(crate) fn keep(&self, name: &str, text: &str) -> Result<(), String> {
        match &self.place {
            Some(place) => std::fs::write(self.path(name), text)
                .map_err(|error| format!("{}: {error}", place.join(name).display())),
            None => Ok(()),
        }
    }

    /// Puts the files in place.
    pub(crate) fn commit(self) -> Result<(), String> {
        if let Some(place) = &self.place {
            let blame = |error: std::io::Error| format!("{}: {error}", place.display());
            uninterrupted(|| {
                for entry in std::fs::read_dir(self.folder()).map_err(blame)? {
                    let entry = entry.map_err(blame)?;
                    std::fs::rename(entry.path(), place.join(entry.file_name())).map_err(blame)?;
                }
                Ok::<(), String>(())
            })?;
        }
        self.made.into_iter().for_each(EmptyFolder::keep);
        Ok(())
    }
}

/// Describes a failed output without the name of the temporary file, which means nothing to the user.
fn blame_unnamed(output: &Path, error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split_once(" at path ").map_or(text.as_str(), |(text, _)| text);
    format!("{}: {text}", output.display())
}

/// Whether two names lead to one file.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity =
        |path| std::fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    one == other || identity(one).is_some_and(|file| identity(other) == Some(file))
}
