//! Views of token ids in Python objects, without a copy of contiguous 32-bit integers.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// The buffer of an object; `None` if it has none. Objects such as `array` and `bytearray` cannot be resized meanwhile.
fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<Option<PyUntypedBuffer>> {
    match PyUntypedBuffer::get(object) {
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => Ok(None),
        Ok(buffer) if !buffer.is_c_contiguous() => {
            Err(PyValueError::new_err("tokens must be one contiguous array, such as numpy.ascontiguousarray gives"))
        }
        buffer => buffer.map(Some),
    }
}

/// The type of the items, as a letter of the module `struct`.
fn letter_of(buffer: &PyUntypedBuffer) -> PyResult<u8> {
    if buffer.dimensions() != 1 {
        return Err(PyValueError::new_err(format!("tokens have {} dimensions, must be 1", buffer.dimensions())));
    }
    let native = if cfg!(target_endian = "little") { b'<' } else { b'>' };
    match buffer.format().to_bytes() {
        [letter] => Ok(*letter),
        [order, letter] if [b'@', b'=', native].contains(order) => Ok(*letter),
        other => {
            let other = String::from_utf8_lossy(other);
            Err(PyTypeError::new_err(format!("tokens have items of type {other:?}, must be integers of this machine")))
        }
    }
}

/// The items, which have the size of `T`.
#[expect(unsafe_code, reason = "memory of a Python object")]
fn items<'a, T: Copy>(buffer: &'a PyUntypedBuffer, _py: Python<'a>) -> PyResult<&'a [T]> {
    let pointer = buffer.buf_ptr().cast::<T>();
    if !pointer.is_aligned() {
        return Err(PyValueError::new_err("tokens are not aligned in memory, as numpy.require(..., 'A') makes them"));
    }
    // SAFETY: the buffer has this number of initialized items in one piece, and the pointer is aligned. The lifetime is
    // that of the buffer. The interpreter lock is held and no Python code runs while the slice exists, so that nothing
    // writes to it; integers have no invalid bit patterns.
    Ok(unsafe { std::slice::from_raw_parts(pointer, buffer.item_count()) })
}

fn out_of_range(token: impl std::fmt::Display) -> PyErr {
    PyOverflowError::new_err(format!("token {token} is out of range, must be 0 to {}", u32::MAX))
}

/// Calls `read` with the token ids of an object. 32-bit integers in a buffer (NumPy, `array`, `memoryview`) are read in
/// place; wider ones are narrowed into a copy. Lists and other iterables are converted item by item.
pub(crate) fn with_tokens<R>(object: &Bound<'_, PyAny>, read: impl FnOnce(&[u32]) -> R) -> PyResult<R> {
    if let Ok(list) = object.cast_exact::<PyList>() {
        let tokens: PyResult<Vec<u32>> = list.iter().map(|item| token(&item)).collect();
        return Ok(read(&tokens?));
    }
    if let Ok(tuple) = object.cast_exact::<PyTuple>() {
        let tokens: PyResult<Vec<u32>> = tuple.iter_borrowed().map(|item| token(&item)).collect();
        return Ok(read(&tokens?));
    }
    let Some(buffer) = buffer_of(object)? else {
        let tokens: PyResult<Vec<u32>> = object.try_iter()?.map(|item| token(&item?)).collect();
        return Ok(read(&tokens?));
    };
    let (letter, py) = (letter_of(&buffer)?, object.py());
    if buffer.item_count() == 0 {
        return Ok(read(&[]));
    }
    match (letter, buffer.item_size()) {
        (b'I' | b'L', 4) => Ok(read(items(&buffer, py)?)),
        (b'i' | b'l', 4) => match items::<i32>(&buffer, py)?.iter().find(|token| **token < 0) {
            Some(negative) => Err(out_of_range(negative)),
            None => Ok(read(items(&buffer, py)?)),
        },
        (b'q' | b'l' | b'n', 8) => Ok(read(&narrowed(items::<i64>(&buffer, py)?)?)),
        (b'Q' | b'L' | b'N', 8) => Ok(read(&narrowed(items::<u64>(&buffer, py)?)?)),
        (b'H', 2) => Ok(read(&narrowed(items::<u16>(&buffer, py)?)?)),
        _ => {
            let letter = char::from(letter);
            Err(PyTypeError::new_err(format!(
                "tokens have items of type '{letter}', must be integers of 16 to 64 bits"
            )))
        }
    }
}

fn token(item: &Bound<'_, PyAny>) -> PyResult<u32> {
    item.extract().map_err(
        |error: PyErr| {
            if error.is_instance_of::<PyOverflowError>(item.py()) { out_of_range(item) } else { error }
        },
    )
}

fn narrowed<T: Copy + TryInto<u32> + std::fmt::Display>(wide: &[T]) -> PyResult<Vec<u32>> {
    let narrow = |token: &T| -> Option<u32> { (*token).try_into().ok() };
    // Two loops without early exits are vectorized.
    if wide.iter().fold(true, |all_fit, token| all_fit & narrow(token).is_some()) {
        return Ok(wide.iter().map(|token| narrow(token).unwrap_or_default()).collect());
    }
    wide.iter().map(|token| narrow(token).ok_or_else(|| out_of_range(token))).collect()
}
