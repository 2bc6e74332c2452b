/// Implements `Debug` with named values; `..` stands for fields that are not shown.
///
/// ```
/// struct Pool {
///     blocks: Vec<u64>,
///     capacity: usize,
/// }
///
/// xlog_base::debug_fields!(self: Pool { live: self.blocks.len(), capacity: self.capacity, .. });
///
/// let pool = Pool { blocks: vec![1, 2], capacity: 4 };
/// assert_eq!(format!("{pool:?}"), "Pool { live: 2, capacity: 4, .. }");
/// ```
#[macro_export]
macro_rules! debug_fields {
    ($self:ident: $name:ident$(<$life:lifetime>)? { $($field:ident: $value:expr,)* .. }) => {
        $crate::debug_fields!($self: $name$(<$life>)?, finish_non_exhaustive, $($field, $value;)*);
    };
    ($self:ident: $name:ident$(<$life:lifetime>)? { $($field:ident: $value:expr),* $(,)? }) => {
        $crate::debug_fields!($self: $name$(<$life>)?, finish, $($field, $value;)*);
    };
    ($self:ident: $name:ident$(<$life:lifetime>)?, $finish:ident, $($field:ident, $value:expr;)*) => {
        impl ::std::fmt::Debug for $name$(<$life>)? {
            fn fmt(&$self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &$value))*.$finish()
            }
        }
    };
}
