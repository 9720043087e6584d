//! Validation and resolution of request options, for the scheduler.

use crate::config::{OnTargetMiss, PoolRole, RouterConfig};
use crate::error::RouteError;
use crate::protocol::Timestamp;
use crate::queue::{TenantKey, UnknownClass};
use crate::schedule::{Rejection, ResolvedOptions, ResolvedTargets};
use crate::session::{SessionId, program_key};

use super::RequestOptions;

impl ResolvedOptions {
    /// Validates and resolves the options of a request that arrives at `now`. `None` for options that the scheduler does
    /// not read. `usual_output_tokens` returns the mean output length of the session or tenant.
    ///
    /// ```
    /// use pointsman::protocol::Timestamp;
    /// use pointsman::internals::schedule::ResolvedOptions;
    /// use pointsman::{RequestOptions, RouterConfig};
    ///
    /// let (config, now) = (RouterConfig::default(), Timestamp::default());
    /// let resolve = |options| ResolvedOptions::resolve(&options, &config, || None, now);
    /// assert_eq!(resolve(RequestOptions::default())?, None);
    /// let urgent = resolve(RequestOptions { strict_priority: 1, ..RequestOptions::default() })?;
    /// assert!(urgent.is_some_and(|options| options.due.is_none()));
    /// # Ok::<(), pointsman::error::RouteError>(())
    /// ```
    ///
    /// # Errors
    /// The first option that breaks its rule.
    pub fn resolve(
        options: &RequestOptions,
        config: &RouterConfig,
        usual_output_tokens: impl FnOnce() -> Option<f64>,
        now: Timestamp,
    ) -> Result<Option<Box<Self>>, RouteError> {
        if is_default(options) {
            return Ok(None);
        }
        if let Some(name) = options.policy_class.as_deref().filter(|name| !config.queue.knows_class(name)) {
            return Err(Rejection::UnknownClass(UnknownClass(name.to_owned())).into());
        }
        if !options.priority_jump.is_finite() {
            return Err(RouteError::PriorityJump(options.priority_jump));
        }
        options.constraints.validate()?;
        options.overrides.validate(&config.policy)?;
        let targets = resolve_targets(options, config, now)?;
        // A request that must meet its target leaves the queue when it cannot any more.
        let ttft_due = targets.filter(|targets| targets.rejects).and_then(|targets| targets.ttft_due);
        let due = options.deadline.map(|deadline| now + deadline);
        let tenant = options.tenant.as_deref().filter(|_| config.queue.is_enabled()).map(TenantKey::of);
        Ok(Some(Box::new(Self {
            tenant: tenant.unwrap_or_default(),
            strict_priority: options.strict_priority,
            priority_jump: options.priority_jump.max(0.0),
            due: due.into_iter().chain(ttft_due).min(),
            policy_class: options.policy_class.clone(),
            do_not_queue: options.do_not_queue,
            constraints: options.constraints.clone(),
            lora_name: options.lora_name.clone().filter(|name| !name.is_empty()),
            session_id: options.session_id.clone().map(SessionId::try_from).transpose()?,
            program: options.session_id.as_ref().map_or(0, |id| program_key(options.program.as_ref().unwrap_or(id))),
            expected_output_tokens: options.expected_output_tokens,
            usual_output_tokens: usual_output_tokens(),
            output_tokens_max: options.output_tokens_max,
            not_streamed: options.not_streamed,
            targets,
            overrides: options.overrides,
        })))
    }
}

/// Validates and resolves the targets of a request that arrives at `now`.
fn resolve_targets(
    options: &RequestOptions,
    config: &RouterConfig,
    now: Timestamp,
) -> Result<Option<ResolvedTargets>, RouteError> {
    let RequestOptions { ttft_target, itl_target, on_target_miss, .. } = options;
    for (name, target) in [("ttft_target", ttft_target), ("itl_target", itl_target)] {
        if target.is_some_and(|target| target.is_zero()) {
            return Err(RouteError::ZeroTarget(name));
        }
    }
    // The first token comes from the prefill pool, the others from the decode pool.
    let ttft = ttft_target.filter(|_| config.role != PoolRole::Decode);
    let itl = itl_target.filter(|_| config.role != PoolRole::Prefill);
    if ttft.is_none() && itl.is_none() {
        return Ok(None);
    }
    let rejects = on_target_miss.unwrap_or(config.on_target_miss) == OnTargetMiss::Reject;
    if rejects && !config.learns_speed() {
        return Err(RouteError::TargetsNotPredicted { policy: config.policy.name() });
    }
    Ok(Some(ResolvedTargets { ttft, ttft_due: ttft.map(|ttft| now + ttft), itl, rejects }))
}

/// Whether the options that the scheduler reads have their defaults. Salt, spans, hashes and sizes concern the prompt alone,
/// and phases are measured by the caller.
fn is_default(options: &RequestOptions) -> bool {
    let RequestOptions {
        lora_name,
        cache_salt: _,
        mm_spans: _,
        routing_hashes: _,
        phases: _,
        tenant,
        strict_priority,
        priority_jump,
        deadline,
        policy_class,
        do_not_queue,
        constraints,
        session_id,
        program: _, // without effect unless there is a session
        expected_output_tokens,
        output_tokens_max,
        further_prompt_tokens: _,
        further_outputs: _,
        not_streamed,
        ttft_target,
        itl_target,
        on_target_miss: _, // without effect unless there is a target
        overrides,
    } = options;
    tenant.is_none()
        && *strict_priority == 0
        && *priority_jump == 0.0
        && deadline.is_none()
        && policy_class.is_none()
        && !do_not_queue
        && constraints.is_empty()
        && lora_name.as_deref().is_none_or(str::is_empty)
        && session_id.is_none()
        && expected_output_tokens.is_none()
        && output_tokens_max.is_none()
        && !not_streamed
        && ttft_target.is_none()
        && itl_target.is_none()
        && overrides.is_empty()
}
