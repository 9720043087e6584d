//! Load and replay harness of Pointsman.
