//! Bounded reader of the integers, texts and lists of a snapshot.

use super::SnapshotError;

/// Unread bytes.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn bytes_left(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn take(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], SnapshotError> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(SnapshotError::Truncated { field })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(SnapshotError::Truncated { field })?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, SnapshotError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, SnapshotError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, SnapshotError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// An unsigned LEB128 number in its shortest form.
    pub(super) fn varint(&mut self, field: &'static str) -> Result<u64, SnapshotError> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8(field)?;
            let part = u64::from(byte & 0x7f);
            if (part << shift) >> shift != part || byte == 0 && shift > 0 {
                let rule = "a number of 64 bits in its shortest form";
                return Err(SnapshotError::Value { field, value: u64::from(byte), rule });
            }
            value |= part << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(SnapshotError::Value { field, value, rule: "a number of at most 10 bytes" })
    }

    pub(super) fn varint_u32(&mut self, field: &'static str) -> Result<u32, SnapshotError> {
        let value = self.varint(field)?;
        u32::try_from(value).map_err(|_| SnapshotError::Value { field, value, rule: "at most 4294967295" })
    }

    /// Length of a list whose elements have at least `element_bytes_min` bytes each, so that memory for it is bounded
    /// by the number of bytes left.
    pub(super) fn length(&mut self, element_bytes_min: usize, field: &'static str) -> Result<usize, SnapshotError> {
        let value = self.varint(field)?;
        let length = usize::try_from(value).ok().filter(|length| *length <= self.rest.len() / element_bytes_min);
        length.ok_or(SnapshotError::Value { field, value, rule: "at most the number of elements that the bytes hold" })
    }

    pub(super) fn text(&mut self, field: &'static str) -> Result<String, SnapshotError> {
        let length = self.length(1, field)?;
        let text = std::str::from_utf8(self.take(length, field)?).map_err(|_| SnapshotError::Text { field })?;
        Ok(text.to_owned())
    }
}
