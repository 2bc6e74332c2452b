//! A reader of Python's pickle, protocols 2 to 5, for plain data: numbers, texts, lists, tuples, dicts and sets.
//!
//! It runs no code: opcodes that import, call or build objects are refused by name. Values are in flat tables and refer to
//! each other by index, so nesting and cycles need no recursion. Memory is bounded by [`MAX_VALUE_BYTES`]; texts stay in the input.

use std::ops::Range;

/// The maximum size of a pickle's values in memory.
pub(super) const MAX_VALUE_BYTES: usize = 1 << 30;
/// The maximum number of open marks.
const MAX_MARKS: usize = 1 << 10;

/// The reason why a pickle cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// An unsupported opcode: it would run code, or belongs to another protocol.
    #[error(
        "pickle opcode {name} at byte {offset} is refused: expected plain data (numbers, texts, lists, dicts)"
    )]
    Refused {
        /// Its name, or its number.
        name: String,
        /// Its offset.
        offset: usize,
    },
    /// The input ends within an opcode, or before the end of the pickle.
    #[error("the pickle is cut off at byte {offset}, in opcode {name}")]
    CutOff {
        /// The opcode.
        name: String,
        /// Its offset.
        offset: usize,
    },
    /// An opcode does not find the values it needs.
    #[error("pickle opcode {name} at byte {offset}: expected {expected}")]
    Misplaced {
        /// The opcode.
        name: String,
        /// Its offset.
        offset: usize,
        /// The values it needs.
        expected: &'static str,
    },
    /// The values exceed a limit.
    #[error("pickle opcode {name} at byte {offset}: more than {limit} {what}")]
    TooLarge {
        /// The opcode.
        name: String,
        /// Its offset.
        offset: usize,
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

/// A value; containers by index, texts by range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    /// An integer, saturated.
    Int(i64),
    Float(f64),
    /// A text or bytes: a range of the input.
    Text(u32, u32),
    /// A list, tuple or set.
    List(u32),
    Dict(u32),
}

/// A loaded pickle.
#[derive(Debug)]
pub(super) struct Loaded<'a> {
    input: &'a [u8],
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    pub(super) root: Value,
}

impl<'a> Loaded<'a> {
    /// Returns the elements of a list; `None` for another value.
    pub(super) fn list(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::List(at) => self.lists.get(at as usize).map(Vec::as_slice),
            _ => None,
        }
    }

    /// Returns the items of a dict; `None` for another value.
    pub(super) fn dict(&self, value: Value) -> Option<&[(Value, Value)]> {
        match value {
            Value::Dict(at) => self.dicts.get(at as usize).map(Vec::as_slice),
            _ => None,
        }
    }

    pub(super) fn bytes(&self, value: Value) -> Option<&'a [u8]> {
        match value {
            Value::Text(from, len) => {
                self.input.get(from as usize..(from as usize).checked_add(len as usize)?)
            }
            _ => None,
        }
    }

    /// Returns the value of a key in a dict; the last one wins, as in Python.
    pub(super) fn get(&self, dict: Value, key: &str) -> Option<Value> {
        let items = self.dict(dict)?;
        let found = items.iter().rev().find(|(name, _)| self.bytes(*name) == Some(key.as_bytes()));
        found.map(|(_, value)| *value)
    }

    /// Returns the value of a key as a number.
    pub(super) fn number(&self, dict: Value, key: &str) -> Option<u64> {
        match self.get(dict, key)? {
            Value::Int(number) => u64::try_from(number).ok(),
            Value::Float(number) if number >= 0.0 => Some(number as u64),
            _ => None,
        }
    }
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    /// Offset of the current opcode.
    opcode_at: usize,
    opcode: u8,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    charged: usize,
    limit: usize,
}

/// Loads the pickle at the beginning of `input`, with at most `limit` bytes of values.
pub(super) fn load(input: &[u8], limit: usize) -> Result<Loaded<'_>, PickleError> {
    let mut machine = Machine {
        input,
        at: 0,
        opcode_at: 0,
        opcode: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        lists: Vec::new(),
        dicts: Vec::new(),
        charged: 0,
        limit,
    };
    if input.len() > u32::MAX as usize {
        return Err(machine.too_large("bytes of input", u32::MAX as usize));
    }
    let root = machine.run()?;
    Ok(Loaded { input, lists: machine.lists, dicts: machine.dicts, root })
}

impl Machine<'_> {
    fn name(&self) -> String {
        opcode_name(self.opcode).map_or_else(|| format!("{:#04x}", self.opcode), str::to_owned)
    }

    fn too_large(&self, what: &'static str, limit: usize) -> PickleError {
        PickleError::TooLarge { name: self.name(), offset: self.opcode_at, what, limit }
    }

    fn misplaced(&self, expected: &'static str) -> PickleError {
        PickleError::Misplaced { name: self.name(), offset: self.opcode_at, expected }
    }

    fn charge(&mut self, bytes: usize) -> Result<(), PickleError> {
        self.charged = self.charged.saturating_add(bytes);
        if self.charged > self.limit {
            return Err(self.too_large("bytes of values", self.limit));
        }
        Ok(())
    }

    fn take(&mut self, len: usize) -> Result<Range<usize>, PickleError> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.input.len());
        let Some(end) = end else {
            return Err(PickleError::CutOff { name: self.name(), offset: self.opcode_at });
        };
        let range = self.at..end;
        self.at = end;
        Ok(range)
    }

    /// Reads a little-endian number of up to eight bytes.
    fn number(&mut self, len: usize) -> Result<u64, PickleError> {
        let range = self.take(len)?;
        let bytes = self.input.get(range).unwrap_or(&[]);
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn length(&mut self, len: usize) -> Result<usize, PickleError> {
        let number = self.number(len)?;
        usize::try_from(number)
            .map_err(|_| PickleError::CutOff { name: self.name(), offset: self.opcode_at })
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        self.charge(size_of::<Value>())?;
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => self.stack.pop().ok_or_else(|| self.misplaced("a value on the stack")),
            false => Err(self.misplaced("a value on the stack")),
        }
    }

    fn top(&self) -> Result<Value, PickleError> {
        self.stack.last().copied().ok_or_else(|| self.misplaced("a value on the stack"))
    }

    fn since_mark(&mut self) -> Result<Vec<Value>, PickleError> {
        let mark = self.marks.pop().filter(|mark| *mark <= self.stack.len());
        mark.map(|mark| self.stack.split_off(mark)).ok_or_else(|| self.misplaced("a mark"))
    }

    fn text(&mut self, length_bytes: usize) -> Result<(), PickleError> {
        let len = self.length(length_bytes)?;
        let range = self.take(len)?;
        self.push(Value::Text(range.start as u32, range.len() as u32))
    }

    fn new_list(&mut self, items: Vec<Value>) -> Result<(), PickleError> {
        self.charge(size_of::<Vec<Value>>() + size_of_val(items.as_slice()))?;
        self.lists.push(items);
        self.push(Value::List((self.lists.len() - 1) as u32))
    }

    fn new_dict(&mut self, items: &[Value]) -> Result<(), PickleError> {
        self.charge(size_of::<Vec<Value>>())?;
        self.dicts.push(Vec::new());
        self.push(Value::Dict((self.dicts.len() - 1) as u32))?;
        self.set_items(items)
    }

    fn extend(&mut self, items: &[Value]) -> Result<(), PickleError> {
        self.charge(2 * size_of_val(items))?;
        let list = match self.top()? {
            Value::List(at) => self.lists.get_mut(at as usize),
            _ => None,
        };
        match list {
            Some(list) => list.extend_from_slice(items),
            None => return Err(self.misplaced("a list below the values")),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Value]) -> Result<(), PickleError> {
        self.charge(2 * size_of_val(items))?;
        if !items.len().is_multiple_of(2) {
            return Err(self.misplaced("pairs of keys and values"));
        }
        let dict = match self.top()? {
            Value::Dict(at) => self.dicts.get_mut(at as usize),
            _ => None,
        };
        let Some(dict) = dict else { return Err(self.misplaced("a dict below the values")) };
        for pair in items.chunks_exact(2) {
            if let [key, value] = pair {
                dict.push((*key, *value));
            }
        }
        Ok(())
    }

    fn put(&mut self, place: usize) -> Result<(), PickleError> {
        let value = self.top()?;
        // Python numbers memo entries consecutively, so a memo has fewer entries than the pickle has bytes.
        if place >= self.input.len() {
            return Err(self.too_large("places of the memo", self.input.len()));
        }
        if place >= self.memo.len() {
            self.charge((place + 1 - self.memo.len()) * 2 * size_of::<Option<Value>>())?;
            self.memo.resize(place + 1, None);
        }
        if let Some(kept) = self.memo.get_mut(place) {
            *kept = Some(value);
        }
        Ok(())
    }

    fn get(&mut self, place: usize) -> Result<(), PickleError> {
        let kept = self.memo.get(place).copied().flatten();
        let kept = kept.ok_or_else(|| self.misplaced("a place of the memo that was filled"))?;
        self.push(kept)
    }

    /// Reads an integer of any length, saturated to 64 bits.
    fn long(&mut self, length_bytes: usize) -> Result<(), PickleError> {
        let len = self.length(length_bytes)?;
        let range = self.take(len)?;
        let bytes = self.input.get(range).unwrap_or(&[]);
        let negative = bytes.last().is_some_and(|top| top & 0x80 != 0);
        let fill = if negative { 0xff } else { 0 };
        let mut word = [fill; 8];
        let fits = bytes.iter().skip(8).all(|byte| *byte == fill)
            && (bytes.len() <= 8 || bytes.get(7).is_some_and(|top| (top & 0x80 != 0) == negative));
        for (to, from) in word.iter_mut().zip(bytes) {
            *to = *from;
        }
        self.push(Value::Int(match (fits, negative) {
            (true, _) => i64::from_le_bytes(word),
            (false, true) => i64::MIN,
            (false, false) => i64::MAX,
        }))
    }

    fn run(&mut self) -> Result<Value, PickleError> {
        loop {
            self.opcode_at = self.at;
            let first = self.input.get(self.at).copied();
            let Some(opcode) = first else {
                self.opcode = b'.';
                return Err(PickleError::CutOff { name: self.name(), offset: self.at });
            };
            self.at += 1;
            self.opcode = opcode;
            match opcode {
                0x80 => {
                    let version = self.number(1)?;
                    if !(2..=5).contains(&version) {
                        return Err(self.misplaced("protocol 2, 3, 4 or 5"));
                    }
                }
                0x95 => {
                    self.take(8)?;
                }
                b'.' => return self.pop(),
                b'(' => {
                    if self.marks.len() >= MAX_MARKS {
                        return Err(self.too_large("open marks", MAX_MARKS));
                    }
                    self.marks.push(self.stack.len());
                }
                b'0' => {
                    self.pop()?;
                }
                b'1' => {
                    self.since_mark()?;
                }
                b'2' => self.top().and_then(|value| self.push(value))?,
                b'N' => self.push(Value::None)?,
                0x88 | 0x89 => self.push(Value::Bool(opcode == 0x88))?,
                b'J' => {
                    let number = self.number(4)? as u32 as i32;
                    self.push(Value::Int(i64::from(number)))?;
                }
                b'K' => self.number(1).and_then(|number| self.push(Value::Int(number as i64)))?,
                b'M' => self.number(2).and_then(|number| self.push(Value::Int(number as i64)))?,
                0x8a => self.long(1)?,
                0x8b => self.long(4)?,
                b'G' => {
                    let bits = self.number(8)?.swap_bytes();
                    self.push(Value::Float(f64::from_bits(bits)))?;
                }
                // Texts and bytes with lengths of 1, 4 and 8 bytes.
                0x8c | b'C' | b'U' => self.text(1)?,
                b'X' | b'B' | b'T' => self.text(4)?,
                0x8d | 0x8e | 0x96 => self.text(8)?,
                b']' | b')' | 0x8f => self.new_list(Vec::new())?,
                b'l' | b't' | 0x91 => self.since_mark().and_then(|items| self.new_list(items))?,
                0x85..=0x87 => {
                    let mut items = Vec::new();
                    for _ in 0x85..=opcode {
                        items.push(self.pop()?);
                    }
                    items.reverse();
                    self.new_list(items)?;
                }
                b'a' => self.pop().and_then(|item| self.extend(&[item]))?,
                b'e' | 0x90 => self.since_mark().and_then(|items| self.extend(&items))?,
                b'}' => self.new_dict(&[])?,
                b'd' => self.since_mark().and_then(|items| self.new_dict(&items))?,
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.set_items(&[key, value])?;
                }
                b'u' => self.since_mark().and_then(|items| self.set_items(&items))?,
                b'h' => self.length(1).and_then(|place| self.get(place))?,
                b'j' => self.length(4).and_then(|place| self.get(place))?,
                b'q' => self.length(1).and_then(|place| self.put(place))?,
                b'r' => self.length(4).and_then(|place| self.put(place))?,
                0x94 => self.put(self.memo.len())?,
                _ => {
                    let name = self.name();
                    return Err(PickleError::Refused { name, offset: self.opcode_at });
                }
            }
        }
    }
}

/// Opcodes, each as a character or two hexadecimal digits, and their names.
const OPCODES: &str = "\
    c:GLOBAL 93:STACK_GLOBAL R:REDUCE b:BUILD i:INST o:OBJ 81:NEWOBJ 92:NEWOBJ_EX P:PERSID Q:BINPERSID 82:EXT1 83:EXT2 84:EXT4 \
    97:NEXT_BUFFER 98:READONLY_BUFFER I:INT L:LONG F:FLOAT S:STRING V:UNICODE p:PUT g:GET 80:PROTO 95:FRAME .:STOP (:MARK 0:POP \
    1:POP_MARK 2:DUP J:BININT K:BININT1 M:BININT2 8a:LONG1 8b:LONG4 G:BINFLOAT 8c:SHORT_BINUNICODE X:BINUNICODE 8d:BINUNICODE8 \
    C:SHORT_BINBYTES B:BINBYTES 8e:BINBYTES8 U:SHORT_BINSTRING T:BINSTRING 96:BYTEARRAY8 ]:EMPTY_LIST a:APPEND e:APPENDS l:LIST \
    ):EMPTY_TUPLE t:TUPLE 85:TUPLE1 86:TUPLE2 87:TUPLE3 }:EMPTY_DICT d:DICT s:SETITEM u:SETITEMS 8f:EMPTY_SET 90:ADDITEMS \
    91:FROZENSET h:BINGET j:LONG_BINGET q:BINPUT r:LONG_BINPUT 94:MEMOIZE";

/// Returns the name of an opcode, for errors.
fn opcode_name(opcode: u8) -> Option<&'static str> {
    OPCODES.split_whitespace().find_map(|entry| {
        let (key, name) = entry.split_once(':')?;
        let code = match key.as_bytes() {
            [code] => Some(*code),
            _ => u8::from_str_radix(key, 16).ok(),
        };
        (code == Some(opcode)).then_some(name)
    })
}
