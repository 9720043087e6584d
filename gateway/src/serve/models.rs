//! The models that are served, and their routers.
//!
//! Owns names: which model a client means. Promises that a name means one model. Leaves choosing a rank to the router.

use std::sync::Arc;

use ahash::AHashMap;
use pointsman::Router;
use pointsman::error::StartError;

use crate::prompt::{AnyWorker, Tokens, TokensError};
use crate::settings::ModelSettings;
use crate::upstream::Upstream;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Its router.
    #[error("model {model:?}: {error}")]
    Router {
        /// The model.
        model: String,
        /// What is wrong.
        error: StartError,
    },
    /// Its tokenizer.
    #[error("model {model:?}: {error}")]
    Tokens {
        /// The model.
        model: String,
        /// What is wrong.
        error: TokensError,
    },
}

/// One model: a pool of ranks.
pub(crate) struct Model {
    pub(crate) settings: ModelSettings,
    pub(crate) router: Router,
    pub(crate) tokens: Tokens,
}

/// All models, by every name.
pub(crate) struct Models {
    all: Vec<Arc<Model>>,
    by_name: AHashMap<String, usize>,
}

impl Models {
    pub(crate) async fn start(settings: &[ModelSettings], upstream: &Upstream) -> Result<Self, ModelError> {
        let (mut all, mut by_name) = (Vec::new(), AHashMap::new());
        for settings in settings {
            let model = Arc::new(Model::start(settings, upstream).await?);
            for name in std::iter::once(&settings.name).chain(&settings.aliases) {
                by_name.insert(name.clone(), all.len());
            }
            all.push(model);
        }
        Ok(Self { all, by_name })
    }

    pub(crate) fn all(&self) -> &[Arc<Model>] {
        &self.all
    }

    /// The model that a client means by `name`, and the adapter of it, if the name is one's.
    pub(crate) fn find(&self, name: &str) -> Option<(&Arc<Model>, Option<&str>)> {
        self.by_name.get(name).map(|n| (&self.all[*n], None))
    }

    pub(crate) async fn shutdown(&self) {
        for model in &self.all {
            model.router.clone().shutdown(std::time::Duration::from_secs(1)).await;
        }
    }
}

impl Model {
    async fn start(settings: &ModelSettings, upstream: &Upstream) -> Result<Self, ModelError> {
        let model = || settings.name.clone();
        let router = Router::builder(settings.router.clone()).start().await;
        let router = router.map_err(|error| ModelError::Router { model: model(), error })?;
        let workers = router.clone();
        let any_worker: AnyWorker =
            Arc::new(move || workers.workers().first().map(|entry| entry.config.endpoint.clone()));
        let tokens = Tokens::start(&settings.tokens, settings.upstream_name(), upstream.clone(), any_worker).await;
        let tokens = tokens.map_err(|error| ModelError::Tokens { model: model(), error })?;
        Ok(Self { settings: settings.clone(), router, tokens })
    }
}
