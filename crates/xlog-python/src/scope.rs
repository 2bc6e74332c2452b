//! Scopes of a budget and tags, as context managers.
//!
//! Both apply to the thread that enters them. A guard cannot leave its thread, so a thread-local holds the guards.

use std::cell::RefCell;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use xlog_cuda::device_runtime::{AllocTag, BudgetScope, EnteredScope};

use crate::config::Size;
use crate::errors::resource_exception;

struct Entered {
    /// The address of the Python object.
    owner: usize,
    _guard: EnteredScope,
}

thread_local! {
    static SCOPES: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
    static TAGS: RefCell<Vec<AllocTag>> = const { RefCell::new(Vec::new()) };
}

/// Returns the tag of this thread's allocations.
pub(crate) fn current_tag() -> AllocTag {
    let last = TAGS.try_with(|tags| tags.borrow().last().copied());
    last.ok().flatten().unwrap_or(AllocTag::UNTAGGED)
}

/// A part of a budget with its own limits. Inside `with`, it is charged for this thread's allocations.
#[pyclass(frozen, module = "xlogmem")]
pub(crate) struct Scope {
    scope: BudgetScope,
    /// The bytes to which a share refers.
    whole: u64,
}

impl Scope {
    pub(crate) fn new(scope: BudgetScope, whole: u64) -> Self {
        Self { scope, whole }
    }
}

#[pymethods]
impl Scope {
    fn __enter__(this: Py<Self>) -> Py<Self> {
        let guard = this.get().scope.enter();
        let owner = this.as_ptr().addr();
        SCOPES.with_borrow_mut(|scopes| scopes.push(Entered { owner, _guard: guard }));
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(this: Py<Self>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<bool> {
        let owner = this.as_ptr().addr();
        let left = SCOPES.with_borrow_mut(|scopes| {
            let at = scopes.iter().rposition(|entered| entered.owner == owner)?;
            Some(scopes.remove(at))
        });
        match left {
            Some(_) => Ok(false),
            None => Err(PyRuntimeError::new_err(format!(
                "the scope {:?} was not entered by this thread",
                this.get().scope.name()
            ))),
        }
    }

    /// Opens a scope inside this one.
    #[pyo3(signature = (name, hard, soft = None))]
    fn scope(&self, py: Python<'_>, name: &str, hard: Size, soft: Option<Size>) -> PyResult<Self> {
        let [soft, hard] = limits(soft, hard, self.whole);
        let child = self.scope.child(name, soft, hard);
        Ok(Self { scope: child.map_err(|error| resource_exception(py, error))?, whole: self.whole })
    }

    /// Sets the limits.
    #[pyo3(signature = (hard, soft = None))]
    fn set_limits(&self, py: Python<'_>, hard: Size, soft: Option<Size>) -> PyResult<()> {
        let [soft, hard] = limits(soft, hard, self.whole);
        self.scope.set_limits(soft, hard).map_err(|error| resource_exception(py, error))
    }

    #[getter]
    fn name(&self) -> &str {
        self.scope.name()
    }

    #[getter]
    fn used(&self) -> usize {
        self.scope.used()
    }

    #[getter]
    fn soft(&self) -> usize {
        self.scope.soft()
    }

    #[getter]
    fn hard(&self) -> usize {
        self.scope.hard()
    }

    fn __repr__(&self) -> String {
        format!("<xlogmem.{:?}>", self.scope)
    }
}

/// Returns soft and hard limit in bytes.
pub(crate) fn limits(soft: Option<Size>, hard: Size, whole: u64) -> [usize; 2] {
    let bytes = |size: Size| usize::try_from(size.0.of(whole)).unwrap_or(usize::MAX);
    [soft.map_or(0, bytes), bytes(hard)]
}

/// A label: inside `with`, this thread's allocations carry it in logs and statistics.
#[pyclass(frozen, module = "xlogmem")]
pub(crate) struct Tag {
    tag: AllocTag,
}

#[pymethods]
impl Tag {
    #[new]
    fn new(name: &str) -> Self {
        Self { tag: AllocTag::intern(name) }
    }

    #[getter]
    fn name(&self) -> &str {
        self.tag.0
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        TAGS.with_borrow_mut(|tags| tags.push(this.get().tag));
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<bool> {
        let left = TAGS.with_borrow_mut(|tags| {
            let at = tags.iter().rposition(|tag| *tag == self.tag)?;
            Some(tags.remove(at))
        });
        match left {
            Some(_) => Ok(false),
            None => Err(PyRuntimeError::new_err(format!(
                "the tag {:?} was not entered by this thread",
                self.tag.0
            ))),
        }
    }

    fn __repr__(&self) -> String {
        format!("xlogmem.tag({:?})", self.tag.0)
    }
}
