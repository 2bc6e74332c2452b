//! Python's pickle, protocol 4, for plain data: numbers, texts, lists and dicts.
//!
//! It is written as a stream: every list element is appended with its own opcode, so nothing is buffered. The pickle's
//! memo holds repeated texts. The viewer's own unpickler implements all opcodes used here.

const PROTO: u8 = 0x80;
const STOP: u8 = b'.';
const NEWFALSE: u8 = 0x89;
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const BININT: u8 = b'J';
const LONG1: u8 = 0x8a;
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';
const EMPTY_LIST: u8 = b']';
const APPEND: u8 = b'a';
const EMPTY_DICT: u8 = b'}';
const MARK: u8 = b'(';
const SETITEMS: u8 = b'u';
const TUPLE2: u8 = 0x86;
const LONG_BINPUT: u8 = b'r';
const LONG_BINGET: u8 = b'j';

/// An index in the pickle's memo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memo(u32);

/// A pickle being written.
#[derive(Debug)]
pub(super) struct Pickle {
    pub(super) out: Vec<u8>,
    next_memo: u32,
    keys: Vec<(&'static str, Memo)>,
}

impl Pickle {
    pub(super) fn new() -> Self {
        Self { out: vec![PROTO, 4], next_memo: 0, keys: Vec::new() }
    }

    pub(super) fn stop(&mut self) {
        self.out.push(STOP);
    }

    pub(super) fn no(&mut self) {
        self.out.push(NEWFALSE);
    }

    pub(super) fn number(&mut self, value: u64) {
        if let Ok(value) = u8::try_from(value) {
            self.out.extend_from_slice(&[BININT1, value]);
        } else if let Ok(value) = u16::try_from(value) {
            self.out.push(BININT2);
            self.out.extend_from_slice(&value.to_le_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.out.push(BININT);
            self.out.extend_from_slice(&value.to_le_bytes());
        } else {
            // Two's complement: a set top bit needs a zero byte above it.
            let bytes = value.to_le_bytes();
            let len = (64 - value.leading_zeros() as usize) / 8 + 1;
            self.out.extend_from_slice(&[LONG1, len as u8]);
            self.out.extend_from_slice(&bytes[..len.min(8)]);
            if len > 8 {
                self.out.push(0);
            }
        }
    }

    pub(super) fn text(&mut self, text: &str) {
        if let Ok(len) = u8::try_from(text.len()) {
            self.out.extend_from_slice(&[SHORT_BINUNICODE, len]);
        } else {
            self.out.push(BINUNICODE);
            self.out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        }
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Writes a static text, the first time in full and later as a memo reference.
    pub(super) fn key(&mut self, key: &'static str) {
        match self.keys.iter().find(|(known, _)| *known == key) {
            Some(&(_, memo)) => self.recall(memo),
            None => {
                self.text(key);
                let memo = self.memorize();
                self.keys.push((key, memo));
            }
        }
    }

    /// Writes a key and its number.
    pub(super) fn number_at(&mut self, key: &'static str, value: u64) {
        self.key(key);
        self.number(value);
    }

    /// Writes a key and a static text.
    pub(super) fn word_at(&mut self, key: &'static str, word: &'static str) {
        self.key(key);
        self.key(word);
    }

    /// Stores the last written value in the memo.
    pub(super) fn memorize(&mut self) -> Memo {
        let memo = Memo(self.next_memo);
        self.next_memo += 1;
        self.out.push(LONG_BINPUT);
        self.out.extend_from_slice(&memo.0.to_le_bytes());
        memo
    }

    pub(super) fn recall(&mut self, memo: Memo) {
        self.out.push(LONG_BINGET);
        self.out.extend_from_slice(&memo.0.to_le_bytes());
    }

    pub(super) fn list(&mut self) {
        self.out.push(EMPTY_LIST);
    }

    /// Appends the last written value to the list before it.
    pub(super) fn append(&mut self) {
        self.out.push(APPEND);
    }

    /// Begins a dict; keys and values follow alternately.
    pub(super) fn dict(&mut self) {
        self.out.extend_from_slice(&[EMPTY_DICT, MARK]);
    }

    pub(super) fn end_dict(&mut self) {
        self.out.push(SETITEMS);
    }

    /// Makes a pair of the last two values.
    pub(super) fn pair(&mut self) {
        self.out.push(TUPLE2);
    }
}
