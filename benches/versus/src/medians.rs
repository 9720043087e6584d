//! Medians, which are insensitive to a temporary slowdown of the machine.

/// Median of the values; the mean of the middle two for an even number, none without values.
///
/// ```
/// use pointsman_versus::medians::median;
///
/// assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
/// assert_eq!(median([4.0, 1.0]), Some(2.5));
/// assert_eq!(median([]), None);
/// ```
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => Some(values[middle]),
        _ => Some(f64::midpoint(*values.get(middle.checked_sub(1)?)?, values[middle])),
    }
}
