//! The columns of this crate's CSV: names, order, and the columns that a header line must have.

use super::fields::Fields;

macro_rules! columns {
    ($($(#[$meta:meta])* $variant:ident => $name:literal,)*) => {
        /// A column of the CSV form.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Column {
            $($(#[$meta])* $variant,)*
        }

        /// All columns, in the order in which they are written.
        pub const COLUMNS: &[Column] = &[$(Column::$variant,)*];

        impl Column {
            /// Returns the name in the header line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

columns! {
    /// The calling thread, decimal.
    Thread => "thread",
    /// Nanoseconds since 1970, decimal.
    Time => "time",
    /// The operation.
    Action => "action",
    /// Address, `0x` and hex digits; empty if there is none.
    Pointer => "pointer",
    /// The requested bytes.
    Bytes => "bytes",
    /// Stream number, decimal.
    Stream => "stream",
    /// Device ordinal.
    Device => "device",
    /// Tag; empty if there is none, `""` if it is empty.
    Tag => "tag",
    /// Query number.
    QueryId => "query_id",
    /// The granted bytes.
    Granted => "granted",
    /// The requested alignment, a power of two.
    Alignment => "alignment",
    /// Generation of the block.
    Generation => "generation",
    /// Position in the history.
    Order => "order",
    /// Duration of the call.
    LatencyNanos => "latency_nanos",
    /// Path that served the request.
    Path => "path",
    /// The access of a use.
    Access => "access",
    /// The calling process.
    Process => "process",
    /// Kind of the error; empty if the call succeeded.
    ErrorKind => "error_kind",
    /// Text of the error.
    ErrorMessage => "error_message",
    /// Another tool's name for the stream.
    StreamName => "stream_name",
    /// Source location of the call.
    Site => "site",
    /// The sampled stack of the call, its frames joined by `;`, the innermost first.
    Stack => "stack",
}

impl Column {
    /// Returns the column that a header field names. Case is ignored, and RMM's `size` means `bytes`.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.trim();
        if name.eq_ignore_ascii_case("size") {
            return Some(Self::Bytes);
        }
        COLUMNS.iter().copied().find(|column| column.name().eq_ignore_ascii_case(name))
    }
}

/// Begins the last field of the header line that ends a log with dropped records; their number follows.
pub(super) const DROPPED: &str = "dropped_records=";

/// Parses a header line; `None` stands for an unknown column.
pub(super) fn parse_header(line: &[u8]) -> Vec<Option<Column>> {
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
    let mut fields = Fields::default();
    fields.split(line);
    let mut columns = Vec::new();
    for index in 0..fields.len() {
        let column = Column::from_name(&fields.text(line, index));
        // Of two columns with one name, only the first counts.
        columns.push(column.filter(|column| !columns.contains(&Some(*column))));
    }
    columns
}

/// Returns whether a line has the columns that every log needs.
pub(crate) fn looks_like_header(line: &[u8]) -> bool {
    is_header(&parse_header(line))
}

/// Returns whether the columns include those that every log needs.
pub(super) fn is_header(columns: &[Option<Column>]) -> bool {
    columns.contains(&Some(Column::Action)) && columns.contains(&Some(Column::Pointer))
}
