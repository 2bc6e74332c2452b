//! Exceptions that PyTorch catches, thrown out of a C function.
//!
//! As the global allocator, PyTorch takes a null pointer for memory, so a refusal must be an exception of C++. A refusal is
//! `c10::OutOfMemoryError`, which Python code sees as `torch.OutOfMemoryError`; any other failure is `c10::Error`, a `RuntimeError`.
//!
//! The classes are PyTorch's own, found by their symbols in the libraries that the process has loaded. `c10::OutOfMemoryError` has no exported
//! constructor, but it is `c10::Error` with another vtable and type: a constructor of the base is called, and the vtable is replaced.
//! [`Thrower::find`] checks that the class has exactly that one base, and fails if any symbol is missing.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

/// Room for an exception object: more than any release of PyTorch needs. It is only allocated, never copied as a whole.
const ROOM: usize = 1024;
/// Words of a vtable before the address that objects point to: the offset to the top, and the type.
const VTABLE_HEADER: usize = 2;
/// The text that the constructor of `c10::Error` shows for its place.
const PLACE: &CStr = c"xlogmem";

/// `c10::SourceLocation`.
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// `std::string`, of the size of libstdc++.
#[repr(C, align(8))]
struct StdString([u8; 32]);

type AllocateException = unsafe extern "C" fn(usize) -> *mut c_void;
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> !;
type NewString = unsafe extern "C" fn(*mut StdString, *const c_char, *const c_void);
type DropString = unsafe extern "C" fn(*mut StdString);
type NewError = unsafe extern "C" fn(*mut c_void, SourceLocation, *mut StdString);
type Fail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// How to throw.
#[derive(Clone, Copy)]
pub(crate) struct Thrower {
    allocate: AllocateException,
    throw: Throw,
    new_string: NewString,
    drop_string: DropString,
    new_error: NewError,
    fail: Fail,
    /// What an object of `c10::OutOfMemoryError` points to; its first entry is the destructor.
    vtable: *const *const c_void,
    class: *const c_void,
}

// SAFETY: addresses of code and of constants in libraries that stay loaded.
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
    /// The text of a `c10::Error`. It is leaked: no destructor runs past a throw.
    Text(*const c_char),
}

impl Thrower {
    /// Finds PyTorch's classes. `library` is the path of `libc10_cuda.so`, which the process has loaded.
    pub(crate) fn find(library: &str) -> Result<Self, String> {
        let cuda = Library::loaded(library)?;
        let folder = library.rsplit_once('/').map_or("", |(folder, _)| folder);
        let core = Library::loaded(&format!("{folder}/libc10.so"))?;
        let standard = Library::loaded("libstdc++.so.6")?;
        let class = cuda.symbol(c"_ZTIN3c1016OutOfMemoryErrorE")?;
        let base = core.symbol(c"_ZTIN3c105ErrorE")?;
        let single = standard.symbol(c"_ZTVN10__cxxabiv120__si_class_type_infoE")?;
        // A class with one base, public, at its beginning: the words are the vtable of its kind, the name, the base.
        // SAFETY: type information of C++ has at least the two first words, and the third for this kind.
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
        // SAFETY: the types are those of the named functions in the Itanium ABI: `this` first, a class with a destructor by its address.
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

    /// The name in type information; two copies of one class have equal names.
    ///
    /// # Safety
    /// `class` is type information of C++.
    unsafe fn name_of<'a>(class: *const c_void) -> &'a CStr {
        // SAFETY: the second word is the name.
        unsafe { CStr::from_ptr(*class.cast::<*const c_char>().add(1)) }
    }

    /// Makes the exception of a failure, so that only [`Thrower::throw`] is left to do.
    pub(crate) fn prepare(&self, kind: Kind, text: &str) -> Ready {
        let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
        if kind == Kind::Other {
            return Ready::Text(text.into_raw());
        }
        // SAFETY: the functions are called as C++ calls them. The object is made by the constructor of its base, whose fields are all of
        // its fields, and then gets the vtable of its class.
        unsafe {
            let object = (self.allocate)(ROOM);
            let mut message = StdString([0; 32]);
            // The allocator argument has no state: any address will do.
            let allocator = 0_u8;
            (self.new_string)(&raw mut message, text.as_ptr(), (&raw const allocator).cast());
            let place = SourceLocation { function: PLACE.as_ptr(), file: PLACE.as_ptr(), line: 0 };
            (self.new_error)(object, place, &raw mut message);
            (self.drop_string)(&raw mut message);
            *object.cast::<*const *const c_void>() = self.vtable;
            Ready::Object(object)
        }
    }

    /// Throws.
    ///
    /// # Safety
    /// Every Rust frame that the exception passes is that of an `extern "C-unwind"` function without values to drop.
    pub(crate) unsafe fn throw(self, ready: Ready) -> ! {
        match ready {
            // SAFETY: an exception object of this class; the first entry of its vtable is its destructor.
            Ready::Object(object) => unsafe { (self.throw)(object, self.class, *self.vtable) },
            // SAFETY: texts that stay.
            Ready::Text(text) => unsafe { (self.fail)(PLACE.as_ptr(), PLACE.as_ptr(), 0, text) },
        }
    }
}

/// A library that the process has loaded. It stays loaded.
struct Library {
    handle: *mut c_void,
    name: String,
}

impl Library {
    fn loaded(name: &str) -> Result<Self, String> {
        let path = CString::new(name).map_err(|_| format!("{name:?} is no path"))?;
        const FLAGS: c_int = libc::RTLD_NOLOAD | libc::RTLD_LAZY;
        // SAFETY: only asks for a library that is there already.
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

/// A function at an address.
///
/// # Safety
/// `F` is the type of the function there.
unsafe fn function<F: Copy>(address: *const c_void) -> F {
    debug_assert_eq!(size_of::<F>(), size_of_val(&address));
    // SAFETY: the caller promises the type; function pointers have the size of an address.
    unsafe { ptr::read((&raw const address).cast()) }
}
