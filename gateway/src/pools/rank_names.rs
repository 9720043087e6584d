//! Names of the ranks of one model for people, where only their ids are at hand.

use std::collections::BTreeMap;
use std::sync::Arc;

use pointsman::WorkerEntry;
use pointsman::protocol::{WorkerId, WorkerRank};
use serde_json::Value;

use super::model::Model;
use crate::formats::live::names::rank_name;

/// Names of ranks: of the present workers, then of those that have left.
pub(crate) struct RankNames<'a> {
    model: &'a Model,
    workers: Arc<[WorkerEntry]>,
    present: BTreeMap<WorkerId, usize>,
}

impl<'a> RankNames<'a> {
    pub(crate) fn of(model: &'a Model) -> Self {
        let workers = model.router.workers();
        let present = workers.iter().enumerate().map(|(n, entry)| (entry.worker, n)).collect();
        Self { model, workers, present }
    }

    /// Name of a rank; its id if its worker has left without a request.
    pub(crate) fn name(&self, rank: WorkerRank) -> String {
        let present = self.present.get(&rank.worker);
        let present = present.map(|n| rank_name(&self.workers[*n].config.endpoint, rank.rank));
        present.or_else(|| self.model.meters.activity.name_of(rank)).unwrap_or_else(|| rank.to_string())
    }

    /// A text with the names of present ranks in place of their ids.
    pub(crate) fn in_text(&self, text: &str) -> String {
        let named = |word: &str| {
            let id = word.trim_matches(|c: char| !c.is_ascii_digit());
            let (worker, rank) = id.split_once('/')?;
            let rank = WorkerRank::new(WorkerId(worker.parse().ok()?), rank.parse().ok()?);
            self.present.contains_key(&rank.worker).then(|| word.replace(id, &self.name(rank)))
        };
        text.split_inclusive(' ').map(|word| named(word).unwrap_or_else(|| word.to_owned())).collect()
    }

    /// Adds the name to each object that identifies a rank by `worker` and `rank`.
    pub(crate) fn add_to(&self, value: &mut Value) {
        match value {
            Value::Object(fields) => {
                let id =
                    fields.get("worker").and_then(|worker| worker.as_u64().or_else(|| worker.as_str()?.parse().ok()));
                let rank = fields.get("rank").and_then(Value::as_u64).and_then(|rank| u32::try_from(rank).ok());
                if let Some((id, rank)) = id.zip(rank) {
                    fields.insert("name".to_owned(), self.name(WorkerRank::new(WorkerId(id), rank)).into());
                }
                fields.values_mut().for_each(|value| self.add_to(value));
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.add_to(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}
