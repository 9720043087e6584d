//! Dependencies of the supervisor: inputs to start the actors, and its published views.

use std::sync::Arc;

use crate::actors::io::clock::Clock;
use crate::actors::lease_ender::LeaseEnder;
use crate::actors::strands::Strands;
use crate::actors::telemetry::Meters;
use crate::actors::views::Views;
use crate::config::RouterConfig;
use crate::directory::Directory;
use crate::schedule::Extensions;

/// Dependencies of the supervisor.
pub(crate) struct SupervisorDependencies {
    pub(crate) config: Arc<RouterConfig>,
    pub(crate) clock: Clock,
    pub(crate) directory: Arc<Directory>,
    pub(crate) ender: Arc<LeaseEnder>,
    pub(crate) views: Views,
    pub(crate) strands: Strands,
    pub(crate) meters: Arc<Meters>,
    pub(crate) extensions: Extensions,
}

impl SupervisorDependencies {
    /// Closes every strand and clears the rank entries.
    pub(super) fn close(&self) {
        self.strands.close();
        self.views.ranks.clear();
    }
}
