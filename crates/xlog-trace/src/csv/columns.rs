//! The columns of our CSV: their names, their order when written, and what a header line must have.

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
            /// The name in the header line.
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
    /// Address, `0x` and hex digits; empty when there is none.
    Pointer => "pointer",
    /// Bytes asked for.
    Bytes => "bytes",
    /// Stream number, decimal.
    Stream => "stream",
    /// Device ordinal.
    Device => "device",
    /// Label; empty when there is none, `""` when it is empty.
    Tag => "tag",
    /// Query number.
    QueryId => "query_id",
    /// Bytes granted.
    Granted => "granted",
    /// Alignment asked for, a power of two.
    Alignment => "alignment",
    /// Generation of the block.
    Generation => "generation",
    /// Place in the history.
    Order => "order",
    /// Duration of the call.
    LatencyNanos => "latency_nanos",
    /// Path that served the request.
    Path => "path",
    /// The access of a use.
    Access => "access",
    /// The calling process.
    Process => "process",
    /// Kind of the error; empty when the call succeeded.
    ErrorKind => "error_kind",
    /// Text of the error.
    ErrorMessage => "error_message",
    /// Another tool's name for the stream.
    StreamName => "stream_name",
    /// Source file and line of the call.
    Site => "site",
    /// The sampled stack of the call, its frames joined by `;`, the innermost first.
    Stack => "stack",
}

impl Column {
    /// The column of a header field; upper and lower case are one, `size` is RMM's word for bytes.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.trim();
        if name.eq_ignore_ascii_case("size") {
            return Some(Self::Bytes);
        }
        COLUMNS.iter().copied().find(|column| column.name().eq_ignore_ascii_case(name))
    }
}

/// The columns of a header line, `None` for those that are not ours.
pub(super) fn parse_header(line: &[u8]) -> Vec<Option<Column>> {
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
    let mut fields = Fields::default();
    fields.split(line);
    let mut columns = Vec::new();
    for index in 0..fields.len() {
        let column = Column::from_name(&fields.text(line, index));
        // The first of two columns with one name counts.
        columns.push(column.filter(|column| !columns.contains(&Some(*column))));
    }
    columns
}

/// Whether a line has the columns that no log can do without.
pub(crate) fn looks_like_header(line: &[u8]) -> bool {
    is_header(&parse_header(line))
}

/// Whether the columns that no log can do without are among these.
pub(super) fn is_header(columns: &[Option<Column>]) -> bool {
    columns.contains(&Some(Column::Action)) && columns.contains(&Some(Column::Pointer))
}
