//! Text forms of times and shares.

/// Formats seconds with a suitable unit.
pub(crate) fn time(seconds: f64) -> String {
    let ms = seconds * 1e3;
    if ms.abs() >= 1_000.0 { format!("{seconds:.2} s") } else { format!("{ms:.1} ms") }
}

/// Formats a share as a percentage.
pub(crate) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "not known".to_owned(), |share| format!("{:.1} %", share * 100.0))
}
