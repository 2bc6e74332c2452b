//! The permitted owners and modes of a ledger and its directory.
//!
//! A private ledger belongs to one user. A shared ledger belongs to a group whose members trust each other, and any member may have created
//! the file. Read permission is not restricted: a reader could delay users by holding a lock, but not falsify their counts. This file
//! performs no input or output.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::config::Sharing;
use crate::error::{LedgerError, LedgerResult};

/// The sharing mode and the expected owners.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) sharing: Sharing,
    pub(super) user: u32,
    pub(super) group: u32,
}

/// The owners and the mode of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    user: u32,
    group: u32,
    mode: u32,
}

impl From<&Metadata> for Facts {
    fn from(metadata: &Metadata) -> Self {
        Self { user: metadata.uid(), group: metadata.gid(), mode: metadata.mode() & 0o7777 }
    }
}

/// Checks a directory and returns the group of its files.
pub(super) fn check_directory(
    path: &Path,
    facts: Facts,
    sharing: Sharing,
    user: u32,
) -> LedgerResult<u32> {
    match sharing {
        Sharing::Private => {
            check_owner(path, "user", facts.user, user)?;
            check_closed(path, facts.mode, 0o022, "others", 0o700)?;
            Ok(facts.group)
        }
        Sharing::Group { gid } => {
            let group = gid.unwrap_or(facts.group);
            check_owner(path, "group", facts.group, group)?;
            check_closed(path, facts.mode, 0o002, "everybody", 0o2770)?;
            Ok(group)
        }
    }
}

/// Checks a file that is opened for writing.
pub(super) fn check_file(path: &Path, facts: Facts, access: Access) -> LedgerResult<()> {
    let needed = match access.sharing {
        Sharing::Private => {
            check_owner(path, "user", facts.user, access.user)?;
            check_closed(path, facts.mode, 0o022, "others", 0o600)?;
            0o200
        }
        Sharing::Group { .. } => {
            check_owner(path, "group", facts.group, access.group)?;
            check_closed(path, facts.mode, 0o002, "everybody", 0o660)?;
            0o220
        }
    };
    if facts.mode & needed != needed {
        let reason = format!("mode {:04o}", facts.mode);
        return Err(LedgerError::ReadOnly { path: path.to_owned(), reason });
    }
    Ok(())
}

fn check_owner(path: &Path, kind: &str, found: u32, expected: u32) -> LedgerResult<()> {
    if found == expected {
        return Ok(());
    }
    Err(LedgerError::WrongOwner {
        path: path.to_owned(),
        found: format!("{kind} {found}"),
        expected: format!("{kind} {expected}"),
    })
}

fn check_closed(
    path: &Path,
    mode: u32,
    forbidden: u32,
    who: &'static str,
    expected: u32,
) -> LedgerResult<()> {
    if mode & forbidden == 0 {
        return Ok(());
    }
    Err(LedgerError::TooOpen { path: path.to_owned(), mode, who, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: u32 = 1000;
    const TEAM: u32 = 50;

    fn file(facts: Facts, sharing: Sharing) -> LedgerResult<()> {
        check_file(Path::new("/d/k.ledger"), facts, Access { sharing, user: ME, group: TEAM })
    }

    #[test]
    fn a_private_ledger_is_owned_and_closed() {
        let mine = Facts { user: ME, group: 7, mode: 0o600 };
        let check = |facts| file(facts, Sharing::Private);
        assert!(check(mine).is_ok());
        assert!(matches!(check(Facts { user: 0, ..mine }), Err(LedgerError::WrongOwner { .. })));
        for mode in [0o620, 0o602, 0o666] {
            let error = check(Facts { mode, ..mine });
            assert!(matches!(error, Err(LedgerError::TooOpen { .. })), "{mode:o}");
        }
        for mode in [0o400, 0o000] {
            let error = check(Facts { mode, ..mine });
            assert!(matches!(error, Err(LedgerError::ReadOnly { .. })), "{mode:o}");
        }
    }

    #[test]
    fn a_shared_ledger_belongs_to_the_group_whoever_made_it() {
        let shared = Facts { user: 4242, group: TEAM, mode: 0o660 };
        let check = |facts| file(facts, Sharing::Group { gid: Some(TEAM) });
        assert!(check(shared).is_ok());
        assert!(matches!(check(Facts { group: 8, ..shared }), Err(LedgerError::WrongOwner { .. })));
        assert!(matches!(check(Facts { mode: 0o662, ..shared }), Err(LedgerError::TooOpen { .. })));
        assert!(matches!(
            check(Facts { mode: 0o600, ..shared }),
            Err(LedgerError::ReadOnly { .. })
        ));
    }

    #[test]
    fn a_directory_others_can_write_to_is_refused() {
        let path = Path::new("/d");
        let check = |facts, sharing| check_directory(path, facts, sharing, ME);
        let mine = Facts { user: ME, group: TEAM, mode: 0o700 };
        let group = |gid| Sharing::Group { gid };
        assert_eq!(check(mine, Sharing::Private).expect("mine"), TEAM);
        assert_eq!(
            check(Facts { user: 0, mode: 0o2770, ..mine }, group(None)).expect("ours"),
            TEAM
        );
        let foreign = check(Facts { user: 0, ..mine }, Sharing::Private);
        assert!(matches!(foreign, Err(LedgerError::WrongOwner { .. })));
        for mode in [0o720, 0o1777] {
            let error = check(Facts { mode, ..mine }, Sharing::Private);
            assert!(matches!(error, Err(LedgerError::TooOpen { .. })), "{mode:o}");
        }
        assert!(matches!(check(mine, group(Some(9))), Err(LedgerError::WrongOwner { .. })));
        let open = check(Facts { mode: 0o2777, ..mine }, group(None));
        assert!(matches!(open, Err(LedgerError::TooOpen { .. })));
    }
}
