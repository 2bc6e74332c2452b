//! The state word of a block: uses on its own stream, unshared, biased and under the lock, and the free.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::state_word::{Attempt, OwnStamps, StateWord};

#[test]
fn of_two_threads_that_free_twins_one_wins() {
    loom::model(|| {
        let state = Arc::new(StateWord::<()>::default());
        state.begin(5);
        let other = {
            let state = Arc::clone(&state);
            thread::spawn(move || state.retire(5))
        };
        let mine = state.retire(5);
        assert!(mine ^ other.join().unwrap());
        assert!(!state.is_live(5));
    });
}

/// The part of a block's metadata that the lock guards.
#[derive(Default)]
struct Locked {
    free_on_close: bool,
    freed: u32,
}

struct Block {
    state: StateWord,
    stamps: OwnStamps,
    locked: Mutex<Locked>,
}

impl Block {
    /// Closes a use of the own stream like the resource.
    fn close(&self, writes: bool) {
        if self.state.close(5, writes, 1, &self.stamps) == Attempt::Done {
            return;
        }
        self.close_locked(writes);
    }

    fn close_locked(&self, writes: bool) {
        let mut locked = self.locked.lock().unwrap();
        // Stamped before the count drops, because from then on the block can be freed without the lock.
        self.state.stamp_counted(writes, 1, &self.stamps);
        assert!(self.state.close_counted(5, writes), "the use was open");
        if locked.free_on_close && !self.state.has_open() {
            locked.free_on_close = false;
            locked.freed += 1;
        }
    }

    /// Frees a block like the resource.
    fn free(&self) {
        let mut locked = self.locked.lock().unwrap();
        assert!(self.state.retire(5));
        if self.state.has_open() {
            locked.free_on_close = true;
        } else {
            locked.freed += 1;
        }
    }
}

#[test]
fn a_block_returned_while_uses_close_is_freed_once_and_not_before_the_last() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let block = Arc::new(Block {
            state: StateWord::<()>::default(),
            stamps: OwnStamps::default(),
            locked: Mutex::new(Locked::default()),
        });
        block.state.begin(5);
        assert_eq!(block.state.open(5, false), Attempt::Done);
        assert_eq!(block.state.open(5, true), Attempt::Done);
        let reader = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.close(false))
        };
        let writer = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.close(true))
        };
        block.free();
        reader.join().unwrap();
        writer.join().unwrap();
        let locked = block.locked.lock().unwrap();
        assert_eq!((locked.freed, locked.free_on_close), (1, false));
        assert!(!block.state.has_open());
    });
}

/// Frees a block that may be unshared, like a pool: under the lock of its stream's memory, or by the state word.
fn free_from_home(state: &StateWord, memory: &Mutex<u32>) -> bool {
    {
        let mut freed = memory.lock().unwrap();
        if state.is_live_and_unshared(5) {
            state.end();
            *freed += 1;
            return true;
        }
    }
    state.retire_own_stream_only(5) == Attempt::Done
}

fn publish_block(state: &StateWord, memory: &Mutex<u32>) {
    if state.is_unshared() {
        let _held = memory.lock().unwrap();
        state.publish();
    }
}

#[test]
fn a_block_at_home_is_used_or_freed_and_never_both() {
    loom::model(|| {
        let block = Arc::new((StateWord::<()>::default(), Mutex::new(0)));
        block.0.begin_unshared(5);
        let user = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (state, memory) = &*block;
                publish_block(state, memory);
                state.open(5, true)
            })
        };
        let (state, memory) = &*block;
        let freed = free_from_home(state, memory);
        let opened = user.join().unwrap();
        assert!(freed ^ (opened == Attempt::Done), "freed {freed}, and the use was {opened:?}");
        assert_eq!(state.has_open(), !freed);
    });
}

#[test]
fn twins_of_a_block_at_home_are_freed_once() {
    loom::model(|| {
        let block = Arc::new((StateWord::<()>::default(), Mutex::new(0)));
        block.0.begin_unshared(5);
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (state, memory) = &*block;
                publish_block(state, memory);
                state.retire_own_stream_only(5) == Attempt::Done
            })
        };
        let mine = free_from_home(&block.0, &block.1);
        assert!(mine ^ other.join().unwrap());
        assert!(!block.0.is_live(5));
    });
}

#[test]
fn a_use_opened_at_the_moment_of_the_free_is_refused_or_waited_for() {
    loom::model(|| {
        let block = Arc::new(Block {
            state: StateWord::<()>::default(),
            stamps: OwnStamps::default(),
            locked: Mutex::new(Locked::default()),
        });
        block.state.begin(5);
        let user = {
            let block = Arc::clone(&block);
            thread::spawn(move || match block.state.open(5, true) {
                Attempt::Done => {
                    assert_eq!(block.locked.lock().unwrap().freed, 0, "freed under an open use");
                    block.close(true);
                    true
                }
                _ => false,
            })
        };
        block.free();
        user.join().unwrap();
        assert_eq!(block.locked.lock().unwrap().freed, 1);
    });
}

#[test]
fn another_stream_that_comes_in_sees_every_use_the_quick_way_finished_before() {
    loom::model(|| {
        let block = Arc::new((StateWord::<()>::default(), OwnStamps::default()));
        block.0.begin(5);
        let own = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (state, stamps) = &*block;
                if state.open(5, true) != Attempt::Done {
                    return false;
                }
                state.close(5, true, 4, stamps) == Attempt::Done
            })
        };
        assert!(block.0.inflate(5));
        let seen = block.1.swap_out().0;
        let quick = own.join().unwrap();
        // Closed without the lock means closed before the other stream's use.
        if quick {
            assert_eq!(seen, 4);
        }
    });
}

/// Makes a block that is biased to this thread.
fn granted() -> Arc<Block> {
    let block = Arc::new(Block {
        state: StateWord::<()>::default(),
        stamps: OwnStamps::default(),
        locked: Mutex::new(Locked::default()),
    });
    block.state.begin(5);
    {
        let _locked = block.locked.lock().unwrap();
        block.state.bias_to_current(5);
    }
    block
}

#[test]
fn a_block_taken_from_its_owner_while_it_opens_a_use_is_not_freed_under_it() {
    loom::model(|| {
        let block = granted();
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.free())
        };
        if block.state.open(5, true) == Attempt::Done {
            assert_eq!(block.locked.lock().unwrap().freed, 0, "freed under an open use");
            block.close(true);
        }
        other.join().unwrap();
        assert_eq!(block.locked.lock().unwrap().freed, 1);
        assert!(!block.state.has_open());
    });
}

impl Block {
    /// Opens a use like the resource: without the lock, or with it if the block is biased to another thread.
    fn open(&self, writes: bool) {
        if self.state.open(5, writes) == Attempt::Done {
            return;
        }
        let _locked = self.locked.lock().unwrap();
        self.state.revoke_bias();
        assert_eq!(self.state.open(5, writes), Attempt::Done);
    }
}

#[test]
fn an_owner_and_another_thread_lose_no_use_of_each_other() {
    loom::model(|| {
        let block = granted();
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.open(false))
        };
        block.open(true);
        other.join().unwrap();
        assert!(block.state.has_counted(5, false), "the use of the other thread was lost");
        assert!(block.state.has_counted(5, true), "the use of the owner was lost");
    });
}

#[test]
fn a_block_is_granted_while_another_thread_opens_a_use() {
    loom::model(|| {
        let block = Arc::new(Block {
            state: StateWord::<()>::default(),
            stamps: OwnStamps::default(),
            locked: Mutex::new(Locked::default()),
        });
        block.state.begin(5);
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.state.open(5, false) == Attempt::Done)
        };
        {
            let _locked = block.locked.lock().unwrap();
            block.state.bias_to_current(5);
        }
        assert_eq!(block.state.open(5, true), Attempt::Done);
        let opened = other.join().unwrap();
        assert_eq!(block.state.has_counted(5, false), opened);
        assert!(block.state.has_counted(5, true));
    });
}

#[test]
fn a_thread_that_lost_its_block_while_it_entered_does_not_hide_the_next_owner() {
    loom::model(|| {
        let block = granted();
        let next = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                {
                    let _locked = block.locked.lock().unwrap();
                    block.state.revoke_bias();
                    block.state.bias_to_current(5);
                }
                block.open(false);
            })
        };
        block.open(true);
        next.join().unwrap();
        assert!(block.state.has_counted(5, false), "the use of the next owner was lost");
        assert!(block.state.has_counted(5, true), "the use of the first owner was lost");
    });
}

#[test]
fn what_the_lock_gave_to_the_quick_way_is_seen_by_the_next_stream() {
    loom::model(|| {
        // The own stream finished at 7 through the lock; its next use and one of another stream are concurrent.
        let (state, stamps) = (StateWord::<()>::default(), OwnStamps::default());
        let block = Arc::new((state, stamps, Mutex::new(false)));
        block.0.begin(5);
        assert!(block.0.inflate(5));
        let own = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (state, stamps, others) = &*block;
                {
                    let others = others.lock().unwrap();
                    if *others {
                        return None;
                    }
                    stamps.stamp(true, 7);
                    assert!(state.deflate_and_open(true));
                }
                Some(state.close(5, true, 8, stamps))
            })
        };
        let (state, stamps, others) = &*block;
        let seen = {
            let mut others = others.lock().unwrap();
            *others = true;
            assert!(state.inflate(5));
            stamps.swap_out().0
        };
        match own.join().unwrap() {
            // It found the other stream's use and would continue through the lock.
            None => assert_eq!(seen, 0),
            Some(Attempt::Done) => assert_eq!(seen, 8, "closed without the lock is closed before"),
            Some(attempt) => {
                assert_eq!(attempt, Attempt::NeedsLock);
                assert!(seen >= 7 && state.has_counted(5, true));
            }
        }
    });
}

#[test]
fn a_block_freed_without_the_lock_has_the_stamps_of_all_its_uses() {
    loom::model(|| {
        let block = granted();
        assert!(block.state.open_biased(5, true));
        let closer = {
            let block = Arc::clone(&block);
            // Closes under the lock, as beside a thread that owns the block.
            thread::spawn(move || block.close_locked(true))
        };
        let freed = block.state.retire_own_stream_only(5) == Attempt::Done;
        if freed {
            assert_eq!(block.stamps.swap_out().0, 1, "the work of the use would be forgotten");
        }
        closer.join().unwrap();
    });
}

/// Starts a use of another stream like the resource. Returns the own stream's write stamp, and whether it was announced.
fn come_in(state: &StateWord, stamps: &OwnStamps) -> (u64, bool) {
    assert!(state.inflate(5));
    (stamps.swap_out().0, state.is_announced())
}

/// Makes a block allocated at stamp 1, with `readers` open reads of the own stream.
fn read_by(readers: u32) -> Arc<(StateWord, OwnStamps)> {
    let block = Arc::new((StateWord::<()>::default(), OwnStamps::default()));
    block.1.begin(1);
    block.0.begin(5);
    for _ in 0..readers {
        assert_eq!(block.0.open(5, false), Attempt::Done);
    }
    block
}

#[test]
fn a_first_read_that_is_being_announced_stands_for_the_writes_before_it_or_for_nothing() {
    loom::model(|| {
        let block = read_by(1);
        let reader = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.0.close(5, false, 2, &block.1))
        };
        let (write, announced) = come_in(&block.0, &block.1);
        assert!(!announced || write == 2, "announced, but only up to stamp {write}");
        let quick = reader.join().unwrap() == Attempt::Done;
        assert_eq!(quick, announced, "closed without the lock is announced before");
    });
}

#[test]
fn of_two_first_reads_the_one_that_returned_is_announced() {
    loom::model(|| {
        let block = read_by(2);
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.0.close(5, false, 2, &block.1))
        };
        assert_eq!(block.0.close(5, false, 2, &block.1), Attempt::Done);
        assert_eq!(come_in(&block.0, &block.1), (2, true));
        other.join().unwrap();
    });
}

#[test]
fn a_use_that_is_finished_twice_announces_nothing_of_the_next_block() {
    loom::model(|| {
        let block = read_by(1);
        let twin = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.0.close(5, false, 1, &block.1))
        };
        let (state, stamps) = &*block;
        let mine = state.close(5, false, 1, stamps) == Attempt::Done;
        if state.retire_own_stream_only(5) == Attempt::Done {
            state.end();
            stamps.begin(1);
            state.begin(6);
        }
        let other = twin.join().unwrap() == Attempt::Done;
        assert!(mine ^ other, "one use, closed by {mine} and {other}");
        assert!(state.inflate(6));
        assert!(!state.is_announced(), "nobody has announced a use of the next block");
    });
}

#[test]
fn a_use_that_is_finished_twice_closes_none_of_the_next_block() {
    loom::model(|| {
        let block = read_by(1);
        // The twin holds the block's lock; closing and freeing need no lock.
        let twin = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.0.close_counted(5, false))
        };
        let (state, stamps) = &*block;
        let mine = state.close(5, false, 1, stamps) == Attempt::Done;
        let is_freed = state.retire_own_stream_only(5) == Attempt::Done;
        if is_freed {
            state.end();
            stamps.begin(1);
            state.begin(6);
            assert_eq!(state.open(6, false), Attempt::Done);
        }
        let other = twin.join().unwrap();
        assert!(mine ^ other, "one use, closed by {mine} and {other}");
        assert!(!is_freed || state.has_counted(6, false), "the twin closed the next block's use");
    });
}
