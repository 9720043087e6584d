//! A policy with all that decides by it: the active one, or a shadow.

use super::case::Case;
use super::choice::Choice;
use super::pending::PendingRequest;
use super::search::Search;
use super::settings::Settings;
use super::state::Pool;
use super::{Extensions, LoadView, Rejection, Target};
use crate::config::RouterConfig;

/// A policy and its search.
#[derive(Debug)]
pub(super) struct DecidingPolicy {
    pub(super) settings: Settings,
    /// The search while no request uses it.
    spare: Option<Box<Search>>,
}

impl DecidingPolicy {
    pub(super) fn new(config: &RouterConfig, extensions: Extensions) -> Self {
        Self { settings: Settings::new(config, extensions), spare: None }
    }

    /// Whether its search reads the loads as columns.
    pub(super) fn reads_columns(&self) -> bool {
        self.settings.is_in_seconds() && self.settings.compares_costs
    }

    pub(super) fn case<'a, T, V>(
        &'a self,
        pool: &'a Pool,
        pending: &'a PendingRequest<T>,
        in_batch: usize,
        loads: &'a V,
    ) -> Case<'a, T, V> {
        Case { settings: &self.settings, pool, pending, candidate: pending.candidate(in_batch), loads }
    }

    /// The search, for one request after another. [`keep`](Self::keep) returns it.
    pub(super) fn search(&mut self) -> Box<Search> {
        self.spare.take().unwrap_or_else(|| Box::new(Search::new(&self.settings)))
    }

    /// Takes the buffers of a search that has ended.
    pub(super) fn keep(&mut self, search: Option<Box<Search>>) {
        if search.is_some() {
            self.spare = search;
        }
    }

    /// Evaluates eligibility and chooses among the eligible ranks. `listed` is the search that has listed the ranks to query
    /// for this request. Also returns the search with what it has found, unless the request names its rank.
    pub(super) fn choose<T, V: LoadView>(
        &mut self,
        pool: &Pool,
        (pending, in_batch): (&PendingRequest<T>, usize),
        loads: &V,
        settle: bool,
        listed: Option<Box<Search>>,
    ) -> (Choice, Option<Box<Search>>) {
        if let Target::Exactly { rank, .. } = pending.request.target {
            let unknown = Choice::None(Rejection::UnknownRank(rank));
            return (pool.ranks.position(rank).map_or(unknown, Choice::Rank), None);
        }
        let is_listed = listed.is_some();
        let mut search = listed.unwrap_or_else(|| self.search());
        let choice = search.choose(&self.case(pool, pending, in_batch, loads), settle, is_listed);
        (choice, Some(search))
    }
}
