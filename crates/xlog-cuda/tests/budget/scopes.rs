//! Scopes: by example, and random ones against a model that counts everything anew for each request.

#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{Counting, TAG, allocate, budget, refusal};
use xlog_base::Random;
use xlog_cuda::device_runtime::{
    BudgetScope, DeviceBlock, DeviceMemoryResource, GlobalDeviceBudget, OomCause, ResourceError,
    StreamId,
};

#[test]
fn the_hard_limit_bounds_and_the_soft_limit_guarantees() {
    let (budget, _) = budget(1000);
    let tenant = budget.scope("tenant", 300, 500).unwrap();
    let other = budget.scope("other", 200, 1000).unwrap();
    let loose = allocate(&budget, 400).unwrap();
    assert_eq!(allocate(&budget, 101).err(), refusal(101, 100));
    assert_eq!(budget.last_oom().unwrap().cause, OomCause::Guaranteed);
    let in_tenant = {
        let _inside = tenant.enter();
        // 300 of its own and 100 that nobody needs.
        assert_eq!(allocate(&budget, 401).err(), refusal(401, 400));
        allocate(&budget, 400).unwrap()
    };
    let in_other = {
        let _inside = other.enter();
        allocate(&budget, 200).unwrap()
    };
    assert_eq!((tenant.used(), other.used(), budget.remaining()), (400, 200, 0));
    budget.deallocate(loose).unwrap();
    {
        let _inside = tenant.enter();
        assert_eq!(allocate(&budget, 101).err(), refusal(101, 100));
        assert_eq!(budget.last_oom().unwrap().cause, OomCause::Scope);
        assert_eq!(allocate(&budget, 501).err(), refusal(501, 100));
        assert_eq!(budget.last_oom().unwrap().cause, OomCause::AboveLimit);
        let _deeper = other.enter();
        budget.deallocate(allocate(&budget, 400).unwrap()).unwrap();
    }
    [in_tenant, in_other].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert_eq!((tenant.used(), other.used(), budget.reserved_bytes()), (0, 0, 0));
}

#[test]
fn a_scope_ends_with_its_last_holder_and_its_last_byte() {
    let (budget, _) = budget(1000);
    let tenant = budget.scope("tenant", 600, 600).unwrap();
    let query = tenant.child("query", 100, 200).unwrap();
    assert_eq!(query.name(), "tenant/query");
    let rows = {
        let _inside = query.enter();
        assert_eq!(allocate(&budget, 201).err(), refusal(201, 200));
        allocate(&budget, 150).unwrap()
    };
    assert_eq!((tenant.used(), query.used()), (150, 150));
    drop(query);
    drop(tenant);
    // Its guarantee is gone, its bytes are not.
    assert_eq!(budget.usage_by_scope().len(), 2);
    let rest = allocate(&budget, 850).unwrap();
    [rows, rest].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert!(budget.usage_by_scope().is_empty());
    let again = budget.scope("again", 0, 10).unwrap();
    assert_eq!((again.used(), again.hard()), (0, 10));
}

#[test]
fn reservations_count_in_their_scope() {
    let (budget, _) = budget(1000);
    let tenant = budget.scope("tenant", 0, 500).unwrap();
    let mut set_aside = {
        let _inside = tenant.enter();
        assert_eq!(budget.reserve(501).err(), refusal(501, 500));
        budget.reserve(400).unwrap()
    };
    assert_eq!(tenant.used(), 400);
    // Wherever it is spent.
    let rows = set_aside.allocate(&budget, 300, StreamId::DEFAULT, TAG).unwrap();
    drop(set_aside);
    assert_eq!(tenant.used(), 300);
    budget.deallocate(rows).unwrap();
    assert_eq!((tenant.used(), budget.reserved_bytes()), (0, 0));
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let (budget, _) = budget(1000);
    assert!(matches!(budget.scope("odd", 2, 1), Err(ResourceError::InvalidRequest { .. })));
    let tenant = budget.scope("tenant", 1, 2).unwrap();
    assert!(tenant.set_limits(3, 2).is_err());
    assert_eq!((tenant.soft(), tenant.hard()), (1, 2));
}

#[test]
fn a_scope_of_another_budget_is_not_entered_here() {
    let ((budget, _), (other, _)) = (budget(1000), budget(1000));
    let here = budget.scope("here", 0, 100).unwrap();
    let there = other.scope("there", 0, 10).unwrap();
    let _here = here.enter();
    let _there = there.enter();
    let rows = allocate(&budget, 100).unwrap();
    assert_eq!((here.used(), there.used()), (100, 0));
    assert!(allocate(&budget, 1).is_err());
    budget.deallocate(rows).unwrap();
}

/// A scope of the model.
struct Modelled {
    scope: BudgetScope,
    parent: Option<usize>,
    soft: usize,
    hard: usize,
    used: usize,
}

/// What must stay free for a scope and those inside it.
fn need(scopes: &[Modelled], at: usize, charged: &[usize], charge: usize) -> usize {
    let used = scopes[at].used + if charged.contains(&at) { charge } else { 0 };
    let inside = (0..scopes.len())
        .filter(|&other| scopes[other].parent == Some(at))
        .map(|other| need(scopes, other, charged, charge))
        .sum();
    scopes[at].soft.saturating_sub(used).max(inside).min(scopes[at].hard.saturating_sub(used))
}

fn needs(scopes: &[Modelled], charged: &[usize], charge: usize) -> usize {
    (0..scopes.len())
        .filter(|&at| scopes[at].parent.is_none())
        .map(|at| need(scopes, at, charged, charge))
        .sum()
}

fn admits(scopes: &[Modelled], chain: &[usize], charge: usize, limit: usize, used: usize) -> bool {
    let free = limit.saturating_sub(used);
    if charge > free || chain.iter().any(|&at| scopes[at].used + charge > scopes[at].hard) {
        return false;
    }
    let (before, after) = (needs(scopes, &[], 0), needs(scopes, chain, charge));
    free - charge >= after || after + charge <= before
}

#[test]
fn random_scopes_agree_with_the_model() {
    for seed in 0..60_u64 {
        let mut random = Random::new(seed);
        let mut below = |bound: usize| random.below(bound);
        let inner = Counting::new(seed % 2 == 0);
        let mut limit = 500 + below(1500);
        let budget = GlobalDeviceBudget::over(inner.clone(), limit);
        let mut scopes: Vec<Modelled> = Vec::new();
        let mut blocks: Vec<(DeviceBlock, Vec<usize>)> = Vec::new();
        let mut used = 0;
        for step in 0..250 {
            let what = format!("seed {seed}, step {step}");
            match below(20) {
                0 if scopes.len() < 6 => {
                    let parent = if scopes.is_empty() { 0 } else { below(scopes.len() + 1) };
                    let parent = parent.checked_sub(1);
                    let hard = 1 + below(1000);
                    let soft = below(hard + 1);
                    let scope = match parent {
                        None => budget.scope("scope", soft, hard),
                        Some(parent) => scopes[parent].scope.child("scope", soft, hard),
                    };
                    scopes.push(Modelled { scope: scope.unwrap(), parent, soft, hard, used: 0 });
                }
                1 if !scopes.is_empty() => {
                    let at = below(scopes.len());
                    let hard = 1 + below(1000);
                    let soft = below(hard + 1);
                    scopes[at].scope.set_limits(soft, hard).unwrap();
                    (scopes[at].soft, scopes[at].hard) = (soft, hard);
                }
                2 => {
                    limit = 300 + below(1800);
                    budget.set_limit(limit);
                }
                3..=12 => {
                    let charge = 1 + below(400);
                    let mut chain = Vec::new();
                    let mut next = below(scopes.len() + 1).checked_sub(1);
                    let inside = next.map(|at| scopes[at].scope.enter());
                    while let Some(at) = next {
                        chain.push(at);
                        next = scopes[at].parent;
                    }
                    let fits = |charge| admits(&scopes, &chain, charge, limit, used);
                    match allocate(&budget, charge) {
                        Ok(block) => {
                            assert!(fits(charge), "{what}: {charge} bytes were granted");
                            chain.iter().for_each(|&at| scopes[at].used += charge);
                            used += charge;
                            blocks.push((block, chain));
                        }
                        Err(ResourceError::OutOfBudget { requested, remaining }) => {
                            assert_eq!(requested, charge);
                            assert!(!fits(charge), "{what}: {charge} bytes were refused");
                            let most = (1..charge).rev().find(|&less| fits(less)).unwrap_or(0);
                            assert_eq!(remaining, most, "{what}: {charge} bytes");
                        }
                        Err(other) => panic!("{what}: {other}"),
                    }
                    drop(inside);
                }
                _ if !blocks.is_empty() => {
                    let (block, chain) = blocks.swap_remove(below(blocks.len()));
                    chain.iter().for_each(|&at| scopes[at].used -= block.bytes);
                    used -= block.bytes;
                    budget.deallocate(block).unwrap();
                }
                _ => {}
            }
            assert_eq!(budget.reserved_bytes(), used, "{what}");
            for scope in &scopes {
                assert_eq!(scope.scope.used(), scope.used, "{what}");
            }
        }
    }
}
