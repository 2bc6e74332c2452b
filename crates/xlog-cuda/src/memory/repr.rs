//! The types that device memory may hold.

/// Plain data that may be copied to a device and back byte by byte.
///
/// `bool` and `char` are not plain data: a device may write bytes that are not valid values. Use `u8` and `u32`.
///
/// # Safety
/// Every pattern of bytes is a value of the type. The type has no padding, and no pointer or reference into host memory.
///
/// ```
/// use xlog_cuda::DeviceRepr;
///
/// #[derive(Clone, Copy)]
/// #[repr(C)]
/// struct Edge {
///     from: u32,
///     to: u32,
/// }
/// // SAFETY: two u32 in C layout: no padding, no pointer, and any eight bytes are an Edge.
/// unsafe impl DeviceRepr for Edge {}
/// ```
pub unsafe trait DeviceRepr: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($type:ty)*) => {$(
        // SAFETY: a number without padding, every bit pattern of which is a value.
        unsafe impl DeviceRepr for $type {}
    )*};
}

plain! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 }

// SAFETY: elements are adjacent without padding, and each of them is plain data.
unsafe impl<T: DeviceRepr, const N: usize> DeviceRepr for [T; N] {}
