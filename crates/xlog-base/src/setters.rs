/// Defines the setters of a configuration. Each takes the configuration and a value, and returns it with one field changed.
///
/// ```
/// #[derive(Default)]
/// struct Config {
///     streams: u32,
///     limit: Option<u64>,
/// }
///
/// impl Config {
///     xlog_base::setters! {
///         /// The number of streams.
///         with_streams(streams: u32) { streams: streams }
///         /// The limit in bytes.
///         with_limit(bytes: u64) { limit: Some(bytes) }
///     }
/// }
///
/// let config = Config::default().with_streams(4).with_limit(1 << 20);
/// assert_eq!((config.streams, config.limit), (4, Some(1 << 20)));
/// ```
#[macro_export]
macro_rules! setters {
    ($($(#[$meta:meta])* $name:ident($value:ident: $kind:ty) { $field:ident: $set:expr })*) => {$(
        $(#[$meta])*
        #[must_use]
        pub fn $name(mut self, $value: $kind) -> Self {
            self.$field = $set;
            self
        }
    )*};
}
