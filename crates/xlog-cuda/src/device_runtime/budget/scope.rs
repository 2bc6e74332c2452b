//! Scopes: budgets inside a budget, for a tenant, an executor or a query.
//!
//! An allocation inside a scope is charged to that scope and its parents until any thread frees it. Invariants:
//! - A scope never exceeds its hard limit.
//! - The soft limit is a guarantee: no other scope gets the bytes that a scope needs to reach it.
//! - Between the two limits a scope borrows bytes that are guaranteed to no scope. `tree` has the exact rule.
//!
//! Allocations inside scopes contend for one lock; others do not.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::core::BudgetCore;
use super::tree::{DEVICE, ScopeFigures, ScopeIndex};
use crate::device_runtime::resource::{ResourceError, ResourceResult};

/// A part of a budget with its own limits.
///
/// ```
/// # use std::sync::Arc;
/// # use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, StreamId,
/// };
///
/// # let device = Arc::new(CudaDevice::open("sim")?);
/// let budget = GlobalDeviceBudget::new(Box::new(DirectCudaResource::new(device, 0)), 1000);
/// let tenant = budget.scope("tenant", 600, 800)?;
/// // The other 400 bytes are guaranteed to no scope.
/// assert!(budget.allocate(401, StreamId::DEFAULT, AllocTag("other")).is_err());
/// let inside = tenant.enter();
/// let rows = budget.allocate(700, StreamId::DEFAULT, AllocTag("rows"))?;
/// assert!(budget.allocate(101, StreamId::DEFAULT, AllocTag("rows")).is_err());
/// drop(inside);
/// assert_eq!(tenant.used(), 700);
/// budget.deallocate(rows)?;
/// assert_eq!(tenant.used(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct BudgetScope {
    shared: Arc<OpenScope>,
}

struct OpenScope {
    core: Arc<BudgetCore>,
    index: ScopeIndex,
    name: Arc<str>,
    /// Children keep their parent open.
    _parent: Option<BudgetScope>,
}

impl Drop for OpenScope {
    fn drop(&mut self) {
        self.core.quotas.change_scopes(|tree| tree.close(self.index));
        self.core.queue.wake();
    }
}

fn check(soft: usize, hard: usize) -> ResourceResult<()> {
    if soft <= hard {
        return Ok(());
    }
    Err(ResourceError::invalid(
        format!("a scope with a soft limit of {soft} and a hard limit of {hard} bytes"),
        "a soft limit that is not above the hard one",
    ))
}

impl BudgetScope {
    pub(crate) fn open(
        core: &Arc<BudgetCore>,
        parent: Option<&Self>,
        name: &str,
        soft: usize,
        hard: usize,
    ) -> ResourceResult<Self> {
        check(soft, hard)?;
        let name: Arc<str> = match parent {
            Some(parent) => format!("{}/{name}", parent.name()).into(),
            None => name.into(),
        };
        let above = parent.map_or(DEVICE, |parent| parent.shared.index);
        // Under the names' lock, so that a listing finds a name for each scope.
        let mut names = core.scope_names.lock();
        let index = core.quotas.change_scopes(|tree| tree.open(above, soft, hard));
        names.insert(index, name.clone());
        drop(names);
        let shared = OpenScope { core: core.clone(), index, name, _parent: parent.cloned() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Opens a scope inside this one. Its charges count in this one too.
    pub fn child(&self, name: &str, soft: usize, hard: usize) -> ResourceResult<Self> {
        Self::open(&self.shared.core, Some(self), name, soft, hard)
    }

    /// Makes this thread allocate inside this scope until the guard is dropped.
    pub fn enter(&self) -> EnteredScope {
        let token = NEXT.replace(NEXT.get() + 1);
        STACK.with_borrow_mut(|stack| stack.push((token, self.clone())));
        refresh();
        EnteredScope { token, _not_send: PhantomData }
    }

    /// The names of the scopes around it and its own, with slashes between.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Bytes charged to it and the scopes inside, reservations included.
    pub fn used(&self) -> usize {
        self.figures().used
    }

    /// The soft limit, which is guaranteed.
    pub fn soft(&self) -> usize {
        self.figures().soft
    }

    /// The hard limit.
    pub fn hard(&self) -> usize {
        self.figures().hard
    }

    fn figures(&self) -> ScopeFigures {
        let figures = self.shared.core.quotas.with_scopes(|tree| tree.figures(self.shared.index));
        figures.unwrap_or_default()
    }

    /// Sets the limits. Limits below what is used free nothing: requests are refused until enough is released.
    pub fn set_limits(&self, soft: usize, hard: usize) -> ResourceResult<()> {
        check(soft, hard)?;
        let index = self.shared.index;
        self.shared.core.quotas.change_scopes(|tree| tree.set_limits(index, soft, hard));
        self.shared.core.queue.wake();
        Ok(())
    }

    pub(crate) fn index(&self) -> ScopeIndex {
        self.shared.index
    }
}

impl fmt::Debug for BudgetScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScopeFigures { used, soft, hard } = self.figures();
        f.debug_struct("BudgetScope")
            .field("name", &self.name())
            .field("used", &used)
            .field("soft", &soft)
            .field("hard", &hard)
            .finish()
    }
}

thread_local! {
    /// The budget and the scope that this thread entered last.
    static CURRENT: Cell<(u64, ScopeIndex)> = const { Cell::new((0, DEVICE)) };
    static STACK: RefCell<Vec<(u64, BudgetScope)>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

fn refresh() {
    let last = STACK.with_borrow(|stack| {
        stack.last().map(|(_, scope)| (scope.shared.core.id, scope.shared.index))
    });
    CURRENT.set(last.unwrap_or((0, DEVICE)));
}

/// The scope of this thread in a budget.
#[inline(always)]
pub(crate) fn current(core: &BudgetCore) -> ScopeIndex {
    let (budget, index) = CURRENT.get();
    if budget == 0 {
        DEVICE
    } else if budget == core.id {
        index
    } else {
        current_scope(core).map_or(DEVICE, |scope| scope.index())
    }
}

/// The innermost scope of this thread in a budget, as a handle that keeps it open.
#[cold]
pub(crate) fn current_scope(core: &BudgetCore) -> Option<BudgetScope> {
    STACK.with_borrow(|stack| {
        let mine = stack.iter().rev().find(|(_, scope)| scope.shared.core.id == core.id);
        mine.map(|(_, scope)| scope.clone())
    })
}

/// Keeps this thread inside a scope until it is dropped.
#[derive(Debug)]
#[must_use = "dropping the guard leaves the scope at once"]
pub struct EnteredScope {
    token: u64,
    /// Only the thread that entered a scope leaves it.
    _not_send: PhantomData<*const ()>,
}

impl Drop for EnteredScope {
    fn drop(&mut self) {
        // Dropped outside the borrow: the last handle of a scope closes it.
        let left = STACK.try_with(|stack| {
            let mut stack = stack.borrow_mut();
            let at = stack.iter().position(|(token, _)| *token == self.token);
            at.map(|at| stack.remove(at))
        });
        // An ending thread has no stack any more, and does not allocate.
        if left.is_ok() {
            refresh();
        }
        drop(left);
    }
}
