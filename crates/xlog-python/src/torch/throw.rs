//! C++ exceptions, thrown out of a C function and caught by PyTorch.
//!
//! PyTorch's global allocator interface takes null for memory, so a refusal must be a C++ exception: `c10::OutOfMemoryError`,
//! which Python sees as `torch.OutOfMemoryError`. Any other failure is `c10::Error`, a `RuntimeError`.
//!
//! The classes are PyTorch's own, found by their symbols in the loaded libraries. `c10::OutOfMemoryError` exports no constructor,
//! but it is `c10::Error` with another vtable and type. So the base constructor is called and the vtable replaced.
//! [`Thrower::find`] checks that the class has exactly that base, and fails if any symbol is missing.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

/// Bytes for an exception object: more than any release of PyTorch needs. They are only allocated, never copied as a whole.
const ROOM: usize = 1024;
/// Words of a vtable before its address point: the offset to the top, and the type.
const VTABLE_HEADER: usize = 2;
/// The source location that `c10::Error` shows.
const PLACE: &CStr = c"xlogmem";

/// `c10::SourceLocation`.
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// `std::string`, with the size of libstdc++.
#[repr(C, align(8))]
struct StdString([u8; 32]);

type AllocateException = unsafe extern "C" fn(usize) -> *mut c_void;
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> !;
type NewString = unsafe extern "C" fn(*mut StdString, *const c_char, *const c_void);
type DropString = unsafe extern "C" fn(*mut StdString);
type NewError = unsafe extern "C" fn(*mut c_void, SourceLocation, *mut StdString);
type Fail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// The functions and types needed to throw.
#[derive(Clone, Copy)]
pub(crate) struct Thrower {
    allocate: AllocateException,
    throw: Throw,
    new_string: NewString,
    drop_string: DropString,
    new_error: NewError,
    fail: Fail,
    /// The address point of the vtable of `c10::OutOfMemoryError`; its first entry is the destructor.
    vtable: *const *const c_void,
    class: *const c_void,
}

// SAFETY: these are addresses of code and constants in libraries that stay loaded.
unsafe impl Send for Thrower {}
// SAFETY: as above.
unsafe impl Sync for Thrower {}

/// The kind of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    OutOfMemory,
    Other,
}

/// An exception that is ready to be thrown.
pub(crate) enum Ready {
    /// An object of `c10::OutOfMemoryError`.
    Object(*mut c_void),
    /// The text of a `c10::Error`. It is leaked, since a throw runs no destructor of its frame.
    Text(*const c_char),
}

impl Thrower {
    /// Finds PyTorch's classes. `library` is the path of the loaded `libc10_cuda.so`.
    pub(crate) fn find(library: &str) -> Result<Self, String> {
        let cuda = Library::loaded(library)?;
        let folder = library.rsplit_once('/').map_or("", |(folder, _)| folder);
        let core = Library::loaded(&format!("{folder}/libc10.so"))?;
        let standard = Library::loaded("libstdc++.so.6")?;
        let class = cuda.symbol(c"_ZTIN3c1016OutOfMemoryErrorE")?;
        let base = core.symbol(c"_ZTIN3c105ErrorE")?;
        let single = standard.symbol(c"_ZTVN10__cxxabiv120__si_class_type_infoE")?;
        // The type information of a class with one public base at offset zero: the vtable of its kind, the name, the base.
        // SAFETY: C++ type information has at least the first two words, and this kind has the third.
        let is_derived = unsafe {
            let words = class.cast::<*const c_void>();
            *words == single.cast::<*const c_void>().add(VTABLE_HEADER).cast()
                && Self::name_of(*words.add(2)) == Self::name_of(base)
        };
        if !is_derived {
            return Err(
                "c10::OutOfMemoryError of this PyTorch has not c10::Error as its only base"
                    .to_owned(),
            );
        }
        let vtable = cuda.symbol(c"_ZTVN3c1016OutOfMemoryErrorE")?.cast::<*const c_void>();
        // SAFETY: the types are those of the named functions in the Itanium ABI: `this` first, and classes with a destructor by address.
        unsafe {
            Ok(Self {
                allocate: function(standard.symbol(c"__cxa_allocate_exception")?),
                throw: function(standard.symbol(c"__cxa_throw")?),
                new_string: function(standard.symbol(
                    c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_",
                )?),
                drop_string: function(standard.symbol(
                    c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev",
                )?),
                new_error: function(core.symbol(
                    c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
                )?),
                fail: function(core.symbol(c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_")?),
                vtable: vtable.add(VTABLE_HEADER),
                class,
            })
        }
    }

    /// Returns the name in type information; copies of one class have equal names.
    ///
    /// # Safety
    /// `class` is C++ type information.
    unsafe fn name_of<'a>(class: *const c_void) -> &'a CStr {
        // SAFETY: the second word is the name.
        unsafe { CStr::from_ptr(*class.cast::<*const c_char>().add(1)) }
    }

    /// Creates the exception of a failure, so that [`Thrower::throw`] can do nothing but throw.
    pub(crate) fn prepare(&self, kind: Kind, text: &str) -> Ready {
        let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
        if kind == Kind::Other {
            return Ready::Text(text.into_raw());
        }
        // SAFETY: the functions are called as C++ calls them. The base constructor initializes all fields of the object, which then
        // gets the vtable of its class.
        unsafe {
            let object = (self.allocate)(ROOM);
            let mut message = StdString([0; 32]);
            // The allocator argument is stateless, so any address is valid.
            let allocator = 0_u8;
            (self.new_string)(&raw mut message, text.as_ptr(), (&raw const allocator).cast());
            let place = SourceLocation { function: PLACE.as_ptr(), file: PLACE.as_ptr(), line: 0 };
            (self.new_error)(object, place, &raw mut message);
            (self.drop_string)(&raw mut message);
            *object.cast::<*const *const c_void>() = self.vtable;
            Ready::Object(object)
        }
    }

    /// Throws the exception.
    ///
    /// # Safety
    /// Every Rust frame that the exception passes is an `extern "C-unwind"` function without values to drop.
    pub(crate) unsafe fn throw(self, ready: Ready) -> ! {
        match ready {
            // SAFETY: it is an exception object of this class; the first entry of its vtable is its destructor.
            Ready::Object(object) => unsafe { (self.throw)(object, self.class, *self.vtable) },
            // SAFETY: the texts are never freed.
            Ready::Text(text) => unsafe { (self.fail)(PLACE.as_ptr(), PLACE.as_ptr(), 0, text) },
        }
    }
}

/// A loaded library, which stays loaded.
struct Library {
    handle: *mut c_void,
    name: String,
}

impl Library {
    fn loaded(name: &str) -> Result<Self, String> {
        let path = CString::new(name).map_err(|_| format!("{name:?} is no path"))?;
        const FLAGS: c_int = libc::RTLD_NOLOAD | libc::RTLD_LAZY;
        // SAFETY: the flags only look up a library that is already loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), FLAGS) };
        if handle.is_null() {
            return Err(format!("{name} is not loaded in this process"));
        }
        Ok(Self { handle, name: name.to_owned() })
    }

    fn symbol(&self, name: &CStr) -> Result<*const c_void, String> {
        // SAFETY: the handle is that of a loaded library.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if symbol.is_null() {
            return Err(format!("{} has no symbol {}", self.name, name.to_string_lossy()));
        }
        Ok(symbol)
    }
}

/// Returns the function at an address.
///
/// # Safety
/// `F` is the type of that function.
unsafe fn function<F: Copy>(address: *const c_void) -> F {
    debug_assert_eq!(size_of::<F>(), size_of_val(&address));
    // SAFETY: the caller guarantees the type; function pointers have the size of an address.
    unsafe { ptr::read((&raw const address).cast()) }
}
