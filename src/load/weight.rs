//! Block weights in fixed point, and their sums.
//!
//! 1.0 is 2^16. Sums are integers, so they are independent of the order of additions and return to exactly zero.
//! Floating point would leave a residue on every rank that is never idle long enough for a reset. The price is a decay
//! resolution of 1/65536, far below any policy's sensitivity.

use std::fmt;

/// Weight of one block, from 0 to 1.
///
/// ```
/// use pointsman::internals::load::Weight;
///
/// assert_eq!(Weight::new(1.0)?, Weight::ONE);
/// assert_eq!(Weight::new(0.25)?.fraction(), 0.25);
/// assert_eq!(Weight::new(1.5).unwrap_err().to_string(), "decay fraction is 1.5, must be from 0 to 1");
/// # Ok::<(), pointsman::internals::load::WeightError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u32);

/// A decay fraction outside 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("decay fraction is {0}, must be from 0 to 1")]
pub struct WeightError(pub f64);

impl Weight {
    /// A block with zero weight.
    pub const ZERO: Self = Self(0);
    /// A block with full weight.
    pub const ONE: Self = Self(1 << FRACTION_BITS);

    /// The weight nearest to `fraction`.
    ///
    /// # Errors
    /// If `fraction` is not a number from 0 to 1.
    pub fn new(fraction: f64) -> Result<Self, WeightError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(WeightError(fraction));
        }
        Ok(Self((fraction * f64::from(Self::ONE.0)).round() as u32))
    }

    /// The weight as a fraction of a full block.
    #[must_use]
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / f64::from(Self::ONE.0)
    }

    /// Total weight of `blocks` blocks, in units of 2^-16 blocks. Below 2^49.
    pub(super) fn times(self, blocks: u32) -> u64 {
        u64::from(self.0) * u64::from(blocks)
    }
}

impl std::ops::Add for BlockSum {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({})", self.fraction())
    }
}

/// Sum of weighted blocks. No number of bookings can overflow it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockSum(u128);

impl BlockSum {
    /// Adds a result of [`Weight::times`].
    pub(super) fn add(&mut self, weighted: u64) {
        self.0 += u128::from(weighted);
    }

    /// Subtracts an earlier addition.
    pub(super) fn sub(&mut self, weighted: u64) {
        debug_assert!(self.0 >= u128::from(weighted), "{weighted} taken from {self:?}, which never held it");
        self.0 = self.0.saturating_sub(u128::from(weighted));
    }

    /// The sum in blocks. Exact below 2^37 blocks.
    pub(super) fn fraction(self) -> f64 {
        self.0 as f64 / f64::from(Weight::ONE.0)
    }

    /// The sum in whole blocks, rounded half up. Saturates.
    pub(super) fn rounded(self) -> u32 {
        const HALF: u128 = 1 << (FRACTION_BITS - 1);
        u32::try_from((self.0 + HALF) >> FRACTION_BITS).unwrap_or(u32::MAX)
    }
}

/// Fractional bits.
const FRACTION_BITS: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_outside_zero_to_one_are_rejected() {
        for fraction in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.001, 1.001] {
            let error = Weight::new(fraction).expect_err("must be refused");
            assert!(error.to_string().contains(&fraction.to_string()), "{error}");
        }
        assert_eq!(Weight::new(-0.0), Ok(Weight::ZERO));
    }
}
