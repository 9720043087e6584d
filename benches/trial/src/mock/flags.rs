//! Default settings by the defaults of their flags.

use clap::{Args, Command};

/// Arguments of a command line without other flags, so that code and command line have the same defaults.
pub(crate) fn of_flags<T: Args>(flags: &[&str]) -> T {
    let command = T::augment_args(Command::new("defaults").no_binary_name(true));
    let matches = command.try_get_matches_from(flags).expect("the flags are complete");
    T::from_arg_matches(&matches).expect("defaults are valid")
}
