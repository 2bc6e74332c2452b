//! Quotas: the limit of one process, and the share that is kept free for it.

use xlog_ledger::{Ledger, LedgerError, LedgerResult, LedgerView, Quota, SlotSnapshot, UNIT};

use crate::support::{Process, Random, TestDirectory, role_command, run_python, seed, wait_until};

fn over_quota(result: LedgerResult<()>) -> u64 {
    match result {
        Err(LedgerError::OverQuota { available, .. }) => available,
        other => panic!("expected a refusal by the quota, got {other:?}"),
    }
}

fn full(result: LedgerResult<()>) -> u64 {
    match result {
        Err(LedgerError::Full { available, .. }) => available,
        other => panic!("expected a refusal by the limit, got {other:?}"),
    }
}

fn slot_of(ledger: &Ledger) -> SlotSnapshot {
    let shown = ledger.snapshot().unwrap();
    shown.slots.into_iter().find(|slot| slot.index == ledger.slot()).unwrap()
}

fn units(limit: u64) -> Quota {
    Quota::limited_to(limit * UNIT)
}

#[test]
fn a_process_gets_exactly_its_quota_and_not_one_byte_more() {
    let directory = TestDirectory::new();
    for chunk in [0, 10, 100] {
        let config = directory.config(100).with_chunk(chunk * UNIT).with_quota(units(40));
        let ledger = Ledger::open(config).unwrap();
        assert_eq!((ledger.limit().unwrap(), ledger.limit_here().unwrap()), (25600, 40 * UNIT));
        ledger.charge(40 * UNIT).unwrap();
        match ledger.charge(1) {
            Err(LedgerError::OverQuota { requested, available, quota, own, path }) => {
                let numbers = (requested, available, quota, own);
                assert_eq!(numbers, (1, 0, 40 * UNIT, 40 * UNIT));
                assert_eq!(path, directory.ledger_path());
            }
            other => panic!("{other:?}"),
        }
        ledger.release(40 * UNIT).unwrap();
        assert!(ledger.granted() <= 40 * UNIT);
        assert_eq!(over_quota(ledger.charge(40 * UNIT + 1)), 40 * UNIT);
        ledger.charge(39 * UNIT + 1).unwrap();
        ledger.charge(0).unwrap();
    }
}

#[test]
fn a_quota_of_nothing_refuses_every_byte_and_one_above_the_limit_adds_nothing() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_quota(units(0))).unwrap();
    assert_eq!(over_quota(ledger.charge(1)), 0);
    ledger.charge(0).unwrap();
    ledger.set_quota(&units(5000)).unwrap();
    assert_eq!(full(ledger.charge(101 * UNIT)), 100 * UNIT);
    assert_eq!(ledger.limit_here().unwrap(), 100 * UNIT);
}

#[test]
fn a_quota_lowered_while_the_process_runs_holds_from_its_next_call_also_against_its_grant() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(1000).with_chunk(64 * UNIT)).unwrap();
    let administrator = directory.open(1000);
    ledger.charge(10 * UNIT).unwrap();
    assert_eq!(ledger.granted(), 64 * UNIT);
    administrator.set_quota_of(&slot_of(&ledger), &units(12)).unwrap();
    assert_eq!(over_quota(ledger.charge(3 * UNIT)), 2 * UNIT);
    ledger.charge(2 * UNIT).unwrap();
    // Below what is used: nothing more until enough was returned, also not what was returned.
    administrator.set_quota_of(&slot_of(&ledger), &units(5)).unwrap();
    ledger.release(4 * UNIT).unwrap();
    assert_eq!((ledger.used(), ledger.granted()), (8 * UNIT, 0));
    assert_eq!(over_quota(ledger.charge(1)), 0);
    ledger.release(5 * UNIT).unwrap();
    assert_eq!((ledger.used(), ledger.granted()), (3 * UNIT, 2 * UNIT));
    assert_eq!(over_quota(ledger.charge(3 * UNIT)), 2 * UNIT);
    administrator.set_quota_of(&slot_of(&ledger), &Quota::default()).unwrap();
    ledger.charge(900 * UNIT).unwrap();
}

#[test]
fn what_is_guaranteed_to_a_process_is_left_to_it() {
    let directory = TestDirectory::new();
    let guaranteed = Quota::default().with_guaranteed(30 * UNIT);
    let owner = Ledger::open(directory.config(100).with_quota(guaranteed)).unwrap();
    let other = Ledger::open(directory.config(100).with_chunk(64 * UNIT)).unwrap();
    assert_eq!(full(other.charge(71 * UNIT)), 70 * UNIT);
    assert_eq!(other.snapshot().unwrap().kept_free(), 30 * UNIT);
    other.charge(60 * UNIT).unwrap();
    assert!(other.granted() <= 10 * UNIT, "a grant leaves the share free");
    other.charge(10 * UNIT).unwrap();
    owner.charge(20 * UNIT).unwrap();
    assert_eq!(full(other.charge(1)), 0, "also the rest of the share");
    owner.charge(10 * UNIT).unwrap();
    assert_eq!(full(owner.charge(1)), 0);
    other.release(30 * UNIT).unwrap();
    owner.charge(30 * UNIT).expect("more than its share, if there is room");
    assert_eq!(full(other.charge(1)), 0);
}

#[test]
fn a_share_guaranteed_while_others_hold_it_fills_as_they_return_bytes() {
    let directory = TestDirectory::new();
    let (owner, other) = (directory.open(100), directory.open(100));
    other.charge(90 * UNIT).unwrap();
    owner.set_quota(&Quota::default().with_guaranteed(40 * UNIT)).unwrap();
    assert_eq!(full(owner.charge(40 * UNIT)), 10 * UNIT);
    other.release(20 * UNIT).unwrap();
    assert_eq!(full(other.charge(1)), 0, "what it returned is kept for the owner");
    other.release(10 * UNIT).unwrap();
    owner.charge(40 * UNIT).unwrap();
}

#[test]
fn a_request_of_its_owner_does_not_end_the_pressure_while_others_hold_a_part_of_a_share() {
    let directory = TestDirectory::new();
    let owner = directory.open(100);
    let other = Ledger::open(directory.config(100).with_chunk(64 * UNIT)).unwrap();
    other.charge(61 * UNIT).unwrap();
    owner.set_quota(&Quota::default().with_guaranteed(40 * UNIT)).unwrap();
    owner.charge(5 * UNIT).unwrap();
    other.release(20 * UNIT).unwrap();
    assert_eq!(
        full(other.charge(20 * UNIT)),
        19 * UNIT,
        "one unit of what it returned is the owner's"
    );
    owner.charge(35 * UNIT).unwrap();
}

#[test]
fn shares_that_the_device_cannot_keep_together_are_refused() {
    let directory = TestDirectory::new();
    let (first, second) = (directory.open(100), directory.open(100));
    let share = |share: u64| Quota::default().with_guaranteed(share * UNIT);
    first.set_quota(&share(60)).unwrap();
    match second.set_quota(&share(41)) {
        Err(LedgerError::Guarantee { requested, available, limit, .. }) => {
            assert_eq!((requested, available, limit), (41 * UNIT, 40 * UNIT, 100 * UNIT));
        }
        other => panic!("{other:?}"),
    }
    assert!(second.quota().unwrap().is_empty(), "nothing was changed");
    second.set_quota(&share(40)).unwrap();
    match first.set_limit(99 * UNIT) {
        Err(LedgerError::BelowGuarantees { requested, guaranteed, .. }) => {
            assert_eq!((requested, guaranteed), (99 * UNIT, 100 * UNIT));
        }
        other => panic!("{other:?}"),
    }
    let opened = Ledger::open(directory.config(100).with_quota(share(1)));
    assert!(matches!(opened, Err(LedgerError::Guarantee { .. })), "{opened:?}");
    drop(first);
    assert_eq!(second.snapshot().unwrap().slots.len(), 1, "a refused opener keeps no slot");
    second.set_limit(99 * UNIT).unwrap();
}

#[test]
fn a_dead_process_keeps_neither_its_share_nor_its_quota() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = Process::spawn(role_command("take-60-and-wait", directory.path()));
    wait_until("the other process holds its bytes", || directory.path().join("ready").exists());
    let named = |shown: &SlotSnapshot| shown.name == "take-60-and-wait";
    let shown = ledger.snapshot().unwrap().slots.into_iter().find(named).unwrap();
    let quota = units(90).with_guaranteed(80 * UNIT).with_name("job 7");
    ledger.set_quota_of(&shown, &quota).unwrap();
    assert_eq!(ledger.snapshot().unwrap().slots.into_iter().find(named).unwrap().quota, quota);
    assert_eq!(full(ledger.charge(21 * UNIT)), 20 * UNIT);
    other.kill();
    let late = ledger.set_quota_of(&shown, &units(1));
    assert!(matches!(late, Err(LedgerError::NoProcess { .. })), "{late:?}");
    ledger.charge(100 * UNIT).expect("one request is enough");
    ledger.set_quota(&Quota::default().with_guaranteed(100 * UNIT)).expect("no share is left over");
    let next = directory.open(100);
    assert!(next.quota().unwrap().is_empty(), "the slot is another's now");
}

#[test]
fn a_quota_ends_with_its_owner_and_reaches_no_later_process() {
    let directory = TestDirectory::new();
    let administrator = directory.open(100);
    let first =
        Ledger::open(directory.config(100).with_quota(units(7).with_name("first"))).unwrap();
    let shown = slot_of(&first);
    assert_eq!(shown.quota.name.as_deref(), Some("first"));
    drop(first);
    let second = directory.open(100);
    assert_eq!(second.slot(), shown.index);
    assert!(second.quota().unwrap().is_empty());
    let late = administrator.set_quota_of(&shown, &units(1));
    assert!(matches!(late, Err(LedgerError::NoProcess { .. })), "{late:?}");
    second.charge(100 * UNIT).unwrap();
}

#[test]
fn a_damaged_quota_is_never_used() {
    use std::os::unix::fs::FileExt;
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_quota(units(7))).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(directory.ledger_path()).unwrap();
    let at = 4096 + 256 * 128 + u64::from(ledger.slot()) * 64;
    file.write_all_at(&[0xff; 8], at).unwrap();
    for _ in 0..2 {
        assert!(matches!(ledger.charge(1), Err(LedgerError::Damaged { .. })));
    }
    ledger.set_quota(&units(9)).unwrap();
    ledger.charge(9 * UNIT).unwrap();
}

#[test]
fn pressure_on_others_is_not_asked_for_what_the_quota_refuses() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_quota(units(10))).unwrap();
    let other = directory.open(100);
    other.charge(95 * UNIT).unwrap();
    other.publish_memory(95 * UNIT, 0);
    // A process that publishes memory and does not answer would be waited for.
    let begin = std::time::Instant::now();
    assert!(!ledger.request_cached(11 * UNIT, std::time::Duration::from_secs(600)));
    assert!(begin.elapsed() < std::time::Duration::from_secs(300));
}

#[test]
fn both_clients_read_set_and_keep_the_quotas_of_each_other() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_chunk(50 * UNIT)).unwrap();
    ledger.charge(UNIT).unwrap();
    let program = "
Quota, OverQuota = xlog_ledger.Quota, xlog_ledger.OverQuota
with Ledger(path, quota=Quota(limit=30 * 256, guaranteed=20 * 256, name='python')) as ledger:
    refusal = raises(OverQuota, ledger.charge, 30 * 256 + 1)
    assert (refusal.available, refusal.limit) == (30 * 256, 30 * 256)
    assert ledger.quota == Quota(limit=30 * 256, guaranteed=20 * 256, name='python')
    [other] = [slot for slot in ledger.slots() if slot.pid != os.getpid()]
    ledger.set_quota(Quota(limit=40 * 256, guaranteed=10 * 256, name='rust'), other)
    raises(LedgerError, ledger.set_quota, Quota(guaranteed=91 * 256))
    raises(ValueError, Quota, limit=256, guaranteed=512)
    limit, slots = xlog_ledger.read(path)
    assert limit == 25600 and {slot.quota.name for slot in slots} == {'python', 'rust'}
    ledger.charge(30 * 256)
    os.kill(os.getpid(), signal.SIGKILL)
";
    if run_python(&directory.ledger_path(), program).is_none_or(|output| output.status.success()) {
        return;
    }
    let shown = LedgerView::open(directory.ledger_path()).unwrap().snapshot().unwrap();
    assert_eq!(shown.left_by_the_dead(), 30 * UNIT, "the program came to its end: {shown:?}");
    let expected = units(40).with_guaranteed(10 * UNIT).with_name("rust");
    assert_eq!(ledger.quota().unwrap(), expected);
    assert_eq!(over_quota(ledger.charge(40 * UNIT)), 39 * UNIT);
    ledger.charge(39 * UNIT).unwrap();
    directory.open(100).charge(60 * UNIT).expect("the dead one's share is free");
}

/// What the model knows of one opener, in units.
#[derive(Default)]
struct Known {
    held: Vec<u64>,
    quota: Option<u64>,
    guaranteed: u64,
}

impl Known {
    fn used(&self) -> u64 {
        self.held.iter().map(|bytes| bytes.div_ceil(UNIT)).sum()
    }
}

/// Several openers with quotas against the plain rule: a request succeeds exactly if its quota and the limit, less what others use or
/// are guaranteed, allow it.
#[test]
fn any_history_with_quotas_agrees_with_a_plain_sum() {
    let mut random = Random::new(seed("any_history_with_quotas_agrees_with_a_plain_sum"));
    for _ in 0..40 {
        let directory = TestDirectory::new();
        let limit = 50 + random.below_u64(2000);
        let openers = 2 + random.below_u64(3) as usize;
        let open = |random: &mut Random| {
            let chunk = random.below_u64(200) * UNIT;
            Ledger::open(directory.config(limit).with_chunk(chunk)).unwrap()
        };
        let mut ledgers: Vec<Ledger> = (0..openers).map(|_| open(&mut random)).collect();
        let mut known: Vec<Known> = (0..openers).map(|_| Known::default()).collect();
        for _ in 0..400 {
            let who = random.below_u64(openers as u64) as usize;
            match random.below_u64(20) {
                0..=8 => {
                    let bytes = 1 + random.below_u64(limit * UNIT / 3);
                    let units = bytes.div_ceil(UNIT);
                    let reserved = known.iter().enumerate().filter(|(other, _)| *other != who);
                    let reserved: u64 =
                        reserved.map(|(_, all)| all.used().max(all.guaranteed)).sum();
                    let used = known[who].used();
                    let free = limit.saturating_sub(reserved + used);
                    let left =
                        known[who].quota.map_or(u64::MAX, |quota| quota.saturating_sub(used));
                    let result = ledgers[who].charge(bytes);
                    if units > left {
                        assert_eq!(over_quota(result), left * UNIT);
                    } else if units > free {
                        assert_eq!(full(result), free * UNIT);
                    } else {
                        result.expect("it fits");
                        known[who].held.push(bytes);
                    }
                }
                9..=15 if !known[who].held.is_empty() => {
                    let index = random.below_u64(known[who].held.len() as u64) as usize;
                    ledgers[who].release(known[who].held.swap_remove(index)).unwrap();
                }
                16..=18 => {
                    let administrator = random.below_u64(openers as u64) as usize;
                    let quota = (random.below_u64(3) > 0).then(|| random.below_u64(limit + 10));
                    let most = quota.unwrap_or(limit).min(limit);
                    let guaranteed = random.below_u64(most + 1) / (1 + random.below_u64(4));
                    let others = known.iter().enumerate().filter(|(other, _)| *other != who);
                    let taken: u64 = others.map(|(_, all)| all.guaranteed).sum();
                    let mut set = Quota::default().with_guaranteed(guaranteed * UNIT);
                    set.limit = quota.map(|quota| quota * UNIT);
                    let shown = slot_of(&ledgers[who]);
                    match ledgers[administrator].set_quota_of(&shown, &set) {
                        Ok(()) => {
                            assert!(guaranteed == 0 || guaranteed + taken <= limit);
                            (known[who].quota, known[who].guaranteed) = (quota, guaranteed);
                        }
                        Err(LedgerError::Guarantee { available, .. }) => {
                            assert_eq!(available, limit.saturating_sub(taken) * UNIT);
                            assert!(guaranteed + taken > limit);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                19 => {
                    drop(ledgers.remove(who));
                    ledgers.insert(who, open(&mut random));
                    known[who] = Known::default();
                }
                _ => {}
            }
            for (ledger, known) in ledgers.iter().zip(&known) {
                assert_eq!(ledger.used(), known.used() * UNIT);
                let granted =
                    known.quota.map_or(u64::MAX, |quota| quota.saturating_sub(known.used()));
                assert!(ledger.granted() / UNIT <= granted, "a grant above the quota");
            }
        }
    }
}
