//! Views of token ids in Python objects, without a copy of contiguous 32-bit integers.
//!
//! The buffer protocol joined the stable ABI with CPython 3.11. CPython 3.10 exports the same functions and the same
//! structure, so one module serves both; this file declares them itself.

use std::ffi::{CStr, c_char, c_int, c_void};

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// `Py_buffer` of CPython's C API.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

/// `PyBUF_FORMAT | PyBUF_ND`: the format of the items, in one C-contiguous piece, which may be read-only.
const CONTIGUOUS_WITH_FORMAT: c_int = 0x0004 | 0x0008;

#[expect(unsafe_code, reason = "functions of CPython")]
unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// An acquired buffer. Objects such as `array` and `bytearray` cannot be resized meanwhile.
struct Buffer<'py> {
    raw: RawBuffer,
    py: Python<'py>,
}

impl<'py> Buffer<'py> {
    /// The buffer of an object; `None` if it has none.
    #[expect(unsafe_code, reason = "functions of CPython")]
    fn acquire(object: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let raw = RawBuffer {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        };
        let mut buffer = Self { raw, py: object.py() };
        // SAFETY: the object is alive and the interpreter lock is held.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        // SAFETY: as above; the view is valid until `PyBuffer_Release` in `drop`. After a failure it is empty, and
        // releasing an empty view has no effect.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut buffer.raw, CONTIGUOUS_WITH_FORMAT) } != 0 {
            let cause = PyErr::take(object.py());
            let error =
                PyValueError::new_err("tokens must be one contiguous array, such as numpy.ascontiguousarray gives");
            error.set_cause(object.py(), cause);
            return Err(error);
        }
        Ok(Some(buffer))
    }

    /// The type of the items, as a letter of the module `struct`, and their size in bytes.
    #[expect(unsafe_code, reason = "a string of CPython")]
    fn item(&self) -> PyResult<(u8, isize)> {
        if self.raw.ndim != 1 {
            return Err(PyValueError::new_err(format!("tokens have {} dimensions, must be 1", self.raw.ndim)));
        }
        let format = if self.raw.format.is_null() {
            b"B"
        } else {
            // SAFETY: a format is a string with a final zero, which lives as long as the view.
            unsafe { CStr::from_ptr(self.raw.format) }.to_bytes()
        };
        let native = if cfg!(target_endian = "little") { b'<' } else { b'>' };
        match format {
            [letter] => Ok((*letter, self.raw.itemsize)),
            [order, letter] if [b'@', b'=', native].contains(order) => Ok((*letter, self.raw.itemsize)),
            other => {
                let other = String::from_utf8_lossy(other);
                Err(PyTypeError::new_err(format!(
                    "tokens have items of type {other:?}, must be integers of this machine"
                )))
            }
        }
    }

    /// The items, which must have the size of `T`.
    #[expect(unsafe_code, reason = "memory of a Python object")]
    fn items<T: Copy>(&self) -> PyResult<&[T]> {
        let (size, align) = (size_of::<T>(), align_of::<T>());
        let pointer = self.raw.buf.cast::<T>();
        if self.raw.itemsize.unsigned_abs() != size || !pointer.addr().is_multiple_of(align) {
            return Err(PyValueError::new_err(
                "tokens are not aligned in memory, as numpy.require(..., 'A') makes them",
            ));
        }
        // SAFETY: the view has `len` bytes of initialized memory in one piece, and the pointer is aligned. The lifetime is
        // that of the view. The interpreter lock is held and no Python code runs while the slice exists, so that nothing
        // writes to it; integers have no invalid bit patterns.
        Ok(unsafe { std::slice::from_raw_parts(pointer, self.raw.len.unsigned_abs() / size) })
    }

    fn is_empty(&self) -> bool {
        self.raw.len == 0
    }
}

impl Drop for Buffer<'_> {
    #[expect(unsafe_code, reason = "a function of CPython")]
    fn drop(&mut self) {
        let _attached = self.py;
        // SAFETY: acquired by `PyObject_GetBuffer`, and the interpreter lock is held.
        unsafe { PyBuffer_Release(&raw mut self.raw) }
    }
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
    let Some(buffer) = Buffer::acquire(object)? else {
        let tokens: PyResult<Vec<u32>> = object.try_iter()?.map(|item| token(&item?)).collect();
        return Ok(read(&tokens?));
    };
    let (letter, size) = buffer.item()?;
    if buffer.is_empty() {
        return Ok(read(&[]));
    }
    match (letter, size) {
        (b'I' | b'L', 4) => Ok(read(buffer.items::<u32>()?)),
        (b'i' | b'l', 4) => match buffer.items::<i32>()?.iter().find(|token| **token < 0) {
            Some(negative) => Err(out_of_range(negative)),
            None => Ok(read(buffer.items::<u32>()?)),
        },
        (b'q' | b'l' | b'n', 8) => Ok(read(&narrowed(buffer.items::<i64>()?)?)),
        (b'Q' | b'L' | b'N', 8) => Ok(read(&narrowed(buffer.items::<u64>()?)?)),
        (b'H', 2) => Ok(read(&narrowed(buffer.items::<u16>()?)?)),
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
