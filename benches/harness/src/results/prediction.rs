//! Accuracy of the router's predicted times to the first token. Only requests with both a prediction and a measurement
//! count.

use serde::{Deserialize, Serialize};

use crate::results::RequestRecord;

/// Predicted versus measured times to the first token.
///
/// A prediction is made at the routing decision, so the measured time starts there: at the placement, or at the time of
/// sending if the placement is not observable.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PredictionError {
    /// Mean of predicted times in seconds.
    pub predicted_mean_seconds: f64,
    /// Mean of measured times in seconds.
    pub measured_mean_seconds: f64,
    /// Bias: mean of predicted minus measured times in seconds. A positive bias means that predictions are too long.
    pub bias_seconds: f64,
    /// Mean absolute error in seconds.
    pub mean_absolute_seconds: f64,
    /// Mean absolute error divided by the measured mean; none if the latter is 0.
    pub mean_absolute_relative: Option<f64>,
    /// Number of requests with both times.
    pub count: u64,
}

impl PredictionError {
    /// Computes the error over all answered `requests` with a prediction; none without such requests.
    #[must_use]
    pub fn of(requests: &[RequestRecord]) -> Option<Self> {
        let pairs: Vec<(u64, u64)> = requests.iter().filter_map(predicted_and_measured).collect();
        if pairs.is_empty() {
            return None;
        }
        let mean = |of: fn(u64, u64) -> f64| {
            pairs.iter().map(|(predicted, measured)| of(*predicted, *measured)).sum::<f64>() / pairs.len() as f64 / 1e6
        };
        let (measured, absolute) = (mean(|_, measured| measured as f64), mean(|p, m| p.abs_diff(m) as f64));
        Some(Self {
            predicted_mean_seconds: mean(|predicted, _| predicted as f64),
            measured_mean_seconds: measured,
            bias_seconds: mean(|predicted, measured| predicted as f64 - measured as f64),
            mean_absolute_seconds: absolute,
            mean_absolute_relative: (measured > 0.0).then(|| absolute / measured),
            count: pairs.len() as u64,
        })
    }
}

fn predicted_and_measured(request: &RequestRecord) -> Option<(u64, u64)> {
    let decided = request.placed_us.unwrap_or(request.sent_us);
    let measured = request.first_token_us?.saturating_sub(decided);
    request.answered().then_some((request.predicted_ttft_us?, measured))
}

#[cfg(test)]
mod tests {
    use super::super::tests::request;
    use super::*;

    #[test]
    fn absolute_errors_add_up_and_bias_cancels() {
        // Measured from the decision at 1 ms: 99 ms.
        let predicted = |us| RequestRecord { predicted_ttft_us: Some(us), ..request(0) };
        let of = PredictionError::of(&[predicted(109_000), predicted(79_000)]).expect("two");
        assert_eq!((of.predicted_mean_seconds, of.measured_mean_seconds), (0.094, 0.099));
        assert_eq!((of.bias_seconds, of.mean_absolute_seconds, of.count), (-0.005, 0.015, 2));
        assert_eq!(of.mean_absolute_relative, Some(0.015 / 0.099));
    }
}
