//! DLPack: the C structures, and capsules of exported memory.

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffer::{Memory, detached};

pub(crate) const LEGACY_NAME: &CStr = c"dltensor";
pub(crate) const LEGACY_USED: &CStr = c"used_dltensor";
pub(crate) const VERSIONED_NAME: &CStr = c"dltensor_versioned";
pub(crate) const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// The kinds of exported memory, by their numbers in DLPack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeviceType {
    Cuda = 2,
    /// Memory of the simulated device: no other library can address it.
    Extension = 12,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

#[repr(C)]
pub(crate) struct DlManagedTensor {
    pub(crate) tensor: DlTensor,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
pub(crate) struct DlManagedTensorVersioned {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

/// The type of an element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dtype {
    name: &'static str,
    typestr: Option<&'static str>,
    pub(crate) raw: DlDataType,
}

const fn dtype(name: &'static str, typestr: Option<&'static str>, code: u8, bits: u8) -> Dtype {
    Dtype { name, typestr, raw: DlDataType { code, bits, lanes: 1 } }
}

const DTYPES: [Dtype; 15] = [
    dtype("uint8", Some("|u1"), 1, 8),
    dtype("uint16", Some("<u2"), 1, 16),
    dtype("uint32", Some("<u4"), 1, 32),
    dtype("uint64", Some("<u8"), 1, 64),
    dtype("int8", Some("|i1"), 0, 8),
    dtype("int16", Some("<i2"), 0, 16),
    dtype("int32", Some("<i4"), 0, 32),
    dtype("int64", Some("<i8"), 0, 64),
    dtype("float16", Some("<f2"), 2, 16),
    dtype("float32", Some("<f4"), 2, 32),
    dtype("float64", Some("<f8"), 2, 64),
    dtype("bfloat16", None, 4, 16),
    dtype("complex64", Some("<c8"), 5, 64),
    dtype("complex128", Some("<c16"), 5, 128),
    dtype("bool", Some("|b1"), 6, 8),
];

impl Dtype {
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        DTYPES.into_iter().find(|dtype| dtype.name == name).ok_or_else(|| {
            let known: Vec<_> = DTYPES.iter().map(|dtype| dtype.name).collect();
            PyValueError::new_err(format!(
                "dtype {name:?} is not accepted; expected one of {}",
                known.join(", ")
            ))
        })
    }

    pub(crate) fn of_raw(raw: DlDataType) -> PyResult<Self> {
        DTYPES.into_iter().find(|dtype| dtype.raw == raw).ok_or_else(|| {
            PyValueError::new_err(format!(
                "{raw:?} is not accepted; convert the array to a type of NumPy or to bfloat16"
            ))
        })
    }

    pub(crate) fn of_typestr(typestr: &str) -> PyResult<Self> {
        DTYPES.into_iter().find(|dtype| dtype.typestr == Some(typestr)).ok_or_else(|| {
            PyValueError::new_err(format!(
                "the type {typestr:?} of an array interface is not accepted"
            ))
        })
    }

    pub(crate) fn name(self) -> &'static str {
        self.name
    }

    pub(crate) fn typestr(self) -> Option<&'static str> {
        self.typestr
    }

    pub(crate) fn size(self) -> usize {
        usize::from(self.raw.bits) / 8
    }
}

/// Shape and type of a contiguous array.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    shape: Vec<i64>,
    dtype: Dtype,
    bytes: usize,
}

impl Layout {
    /// Refuses negative lengths and arrays whose size in bytes overflows.
    pub(crate) fn new(shape: Vec<i64>, dtype: Dtype) -> PyResult<Self> {
        let mut bytes = Some(dtype.size());
        for &length in &shape {
            let length = usize::try_from(length).map_err(|_| {
                PyValueError::new_err(format!(
                    "shape {shape:?} is not accepted; expected lengths that are not negative"
                ))
            })?;
            bytes = bytes.and_then(|bytes| bytes.checked_mul(length));
        }
        match bytes.filter(|bytes| *bytes <= isize::MAX as usize) {
            Some(bytes) => Ok(Self { shape, dtype, bytes }),
            None => Err(PyValueError::new_err(format!(
                "an array of shape {shape:?} has too many bytes"
            ))),
        }
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether strides, in elements, are those of the contiguous array. Dimensions of length 1 may have any.
    pub(crate) fn has_strides(&self, strides: &[i64]) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(strides).rev().all(|(&length, &stride)| {
            let is_right = length <= 1 || stride == expected;
            expected *= length.max(1);
            is_right
        })
    }
}

/// Memory that a consumer holds.
pub(crate) struct Loan {
    pub(crate) memory: Arc<Memory>,
    /// The stream on which the consumer requested it.
    pub(crate) stream: Option<usize>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        // A consumer drops it with or without the GIL.
        detached(|| self.memory.take_back(self.stream));
    }
}

/// A managed tensor with the data that its pointers refer to.
#[repr(C)]
struct Export<T> {
    managed: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _loan: Loan,
}

/// Ends an export. The consumer may call it on any thread, with or without the GIL.
///
/// # Safety
/// `managed` is the first field of a leaked [`Export`], and is not used again.
unsafe extern "C" fn delete<T>(managed: *mut T) {
    if managed.is_null() {
        return;
    }
    let managed = managed.cast::<Export<T>>();
    // A panic must not unwind into C.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller guarantees that it is an export of ours; `managed` is the first field of a C layout.
        drop(unsafe { Box::from_raw(managed) });
    }));
}

/// Creates the capsule of a loan.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    loan: Loan,
    layout: &Layout,
    kind: DeviceType,
    is_versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let shape = layout.shape().to_vec();
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    let tensor = DlTensor {
        data: ptr::without_provenance_mut(if layout.bytes() == 0 {
            0
        } else {
            loan.memory.ptr() as usize
        }),
        device: DlDevice { kind: kind as i32, id: loan.memory.runtime().device_ordinal() as i32 },
        ndim: shape.len() as i32,
        dtype: layout.dtype().raw,
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    if is_versioned {
        let managed = DlManagedTensorVersioned {
            major: 1,
            minor: 0,
            context: ptr::null_mut(),
            deleter: Some(delete::<DlManagedTensorVersioned>),
            flags: 0,
            tensor,
        };
        let export = Export { managed, shape, strides, _loan: loan };
        new_capsule(py, export, |managed| &mut managed.tensor, VERSIONED_NAME, destroy_versioned)
    } else {
        let managed = DlManagedTensor {
            tensor,
            context: ptr::null_mut(),
            deleter: Some(delete::<DlManagedTensor>),
        };
        let export = Export { managed, shape, strides, _loan: loan };
        new_capsule(py, export, |managed| &mut managed.tensor, LEGACY_NAME, destroy_legacy)
    }
}

fn new_capsule<'py, T>(
    py: Python<'py>,
    export: Export<T>,
    tensor: impl FnOnce(&mut T) -> &mut DlTensor,
    name: &'static CStr,
    destroy: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    let mut export = Box::new(export);
    let (shape, strides) = (export.shape.as_mut_ptr(), export.strides.as_mut_ptr());
    let tensor = tensor(&mut export.managed);
    (tensor.shape, tensor.strides) = (shape, strides);
    let managed = Box::into_raw(export).cast::<c_void>();
    // SAFETY: the pointer is not null, the name is static, and the destructor matches it.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(destroy)) };
    if capsule.is_null() {
        // SAFETY: no capsule owns it.
        unsafe { delete(managed.cast::<T>()) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: it is a new reference to an object.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// Ends the export of a capsule that no consumer has taken.
///
/// # Safety
/// Python calls it with a capsule of [`capsule`].
unsafe extern "C" fn destroy_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is live during this call; a consumer that takes the tensor renames it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY_NAME.as_ptr()) == 1 {
            delete(
                ffi::PyCapsule_GetPointer(capsule, LEGACY_NAME.as_ptr()).cast::<DlManagedTensor>(),
            );
        }
    }
}

/// Ends the export of a versioned capsule that no consumer has taken.
///
/// # Safety
/// As for [`destroy_legacy`].
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED_NAME.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(capsule, VERSIONED_NAME.as_ptr());
            delete(pointer.cast::<DlManagedTensorVersioned>());
        }
    }
}
