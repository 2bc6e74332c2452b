//! Output files that appear only when they are complete.
//!
//! A file is written to a temporary name beside its destination and renamed; so is each file of a folder. A failure or an
//! interruption leaves the destination unchanged and no temporary files. A destination that exists and is not a plain file,
//! such as a pipe or a device, is written in place and never replaced.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::temporary::{self, EmptyFolder, Folder, uninterrupted};

pub(crate) fn is_stdout(output: &Path) -> bool {
    output == Path::new("-")
}

/// Returns whether a refusal reports that the reader of standard output has closed it.
pub(crate) fn has_no_reader(refusal: &str) -> bool {
    let reason = std::io::Error::from(rustix::io::Errno::PIPE).to_string();
    refusal.starts_with("-: ") && refusal.ends_with(&reason)
}

/// A file that becomes the output on commit.
pub(crate) struct AtomicFile {
    /// Temporary file and destination; `None` if the destination is written in place.
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
        // Renaming needs write permission only for the folder, so a read-only file must be refused explicitly.
        if output.metadata().is_ok_and(|metadata| metadata.permissions().readonly()) {
            return Err(format!(
                "{}: it is read-only; expected a file that may be replaced",
                output.display()
            ));
        }
        // A symbolic link stays, and its target is replaced.
        let place = std::fs::canonicalize(output).unwrap_or_else(|_| output.to_owned());
        let folder = match place.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let made = temporary::file(folder, ".part-");
        let (file, path) = made.map_err(|error| blame_unnamed(output, &error))?;
        Ok(Self { moves: Some((path, place)), file })
    }

    /// Writes a whole file and returns its size.
    pub(crate) fn write(output: &Path, bytes: &[u8]) -> Result<u64, String> {
        let part = Self::create(output)?;
        (&part.file).write_all(bytes).map_err(|error| format!("{}: {error}", output.display()))?;
        part.commit(output)
    }

    /// Moves the file to its destination and returns its size.
    pub(crate) fn commit(mut self, output: &Path) -> Result<u64, String> {
        let blame = |error: std::io::Error| format!("{}: {error}", output.display());
        let bytes = self.file.metadata().map_err(blame)?.len();
        if let Some((path, place)) = self.moves.take() {
            path.persist(&place).map_err(blame)?;
        }
        Ok(bytes)
    }
}

/// A folder whose files move to their destination together, when all of them are complete.
pub(crate) struct AtomicFolder {
    /// The temporary folder. It is dropped before the folders created for it.
    folder: Folder,
    /// The destination; `None` if the files are discarded.
    place: Option<PathBuf>,
    /// Folders created for it, the innermost first.
    made: Vec<EmptyFolder>,
}

impl AtomicFolder {
    /// Creates a temporary folder within `output`, which is created with its ancestors if necessary.
    pub(crate) fn create(output: &Path) -> Result<Self, String> {
        let missing = output.ancestors().filter(|path| !path.as_os_str().is_empty());
        let mut missing: Vec<PathBuf> =
            missing.take_while(|path| !path.exists()).map(Path::to_owned).collect();
        missing.reverse();
        let blame = |error: std::io::Error| format!("{}: {error}", output.display());
        let mut made = Vec::new();
        // On failure, the folders created so far are removed again.
        for path in missing {
            made.insert(0, EmptyFolder::create(&path).map_err(blame)?);
        }
        let folder = Folder::create_in(output, ".part-");
        let folder = folder.map_err(|error| blame_unnamed(output, &error))?;
        Ok(Self { folder, place: Some(output.to_owned()), made })
    }

    /// Creates a folder whose files are discarded.
    pub(crate) fn passing(name: &str) -> Result<Self, String> {
        let folder = Folder::create(&format!("{name}-")).map_err(|error| error.to_string())?;
        Ok(Self { folder, place: None, made: Vec::new() })
    }

    /// Returns the temporary path of a file.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Returns the temporary folder.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file, unless files are discarded.
    pub(crate) fn keep(&self, name: &str, text: &str) -> Result<(), String> {
        match &self.place {
            Some(place) => std::fs::write(self.path(name), text)
                .map_err(|error| format!("{}: {error}", place.join(name).display())),
            None => Ok(()),
        }
    }

    /// Moves the files to their destination.
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

/// Describes a failed output without the name of the temporary file, which the user does not know.
fn blame_unnamed(output: &Path, error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split_once(" at path ").map_or(text.as_str(), |(text, _)| text);
    format!("{}: {text}", output.display())
}

/// Returns whether two names refer to one file.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity =
        |path| std::fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    one == other || identity(one).is_some_and(|file| identity(other) == Some(file))
}
