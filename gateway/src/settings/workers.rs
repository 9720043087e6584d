//! Workers of a model in the settings: tables in the format of a workers file.

use pointsman::NamedWorker;
use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};
use toml::Table;

/// Reads the workers like a workers file, without the lines and positions of one.
pub(super) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NamedWorker>, D::Error> {
    let workers = Vec::<Table>::deserialize(deserializer)?;
    let file = Table::from_iter([("workers".to_owned(), toml::Value::from(workers))]);
    NamedWorker::list_of_toml(&file.to_string()).map_err(D::Error::custom)
}

/// Workers are written as given.
pub(super) fn write<S: Serializer>(_: &[NamedWorker], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq([(); 0])
}
