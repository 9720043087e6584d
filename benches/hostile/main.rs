//! Complexity attacks: instructions per unit of input, at three sizes of the input.
//!
//! Each attack builds a state from hostile input and measures operations on it. Superlinear work shows as a figure that
//! grows with the size. With an argument, the benchmark runs itself under callgrind, which counts the instructions of
//! the measured part only, and prints one row of a table per attack. Instructions do not depend on the load of the
//! machine. Hash functions have random keys, so that figures differ by about one percent between runs.
//!
//! ```console
//! $ cargo bench --bench hostile -- measure                # all attacks, some minutes; needs valgrind
//! $ cargo bench --bench hostile -- measure one_block_many_names
//! ```

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

mod index;
mod requests;

use std::error::Error;
use std::process::Command;

/// One attack.
struct Attack {
    name: &'static str,
    /// The measured operation.
    operation: &'static str,
    /// Unit of the figures.
    unit: &'static str,
    /// Smallest size of the input.
    size: u64,
    /// Builds the state, runs the measured part in [`measured`], and returns the number of units.
    run: fn(u64) -> u64,
}

/// The attacks of a module, each named after its function.
macro_rules! attacks {
    ($($run:ident: $operation:literal, $unit:literal, $size:literal;)*) => {
        pub(crate) const ATTACKS: &[$crate::Attack] = &[$($crate::Attack {
            name: stringify!($run),
            operation: $operation,
            unit: $unit,
            size: $size,
            run: $run,
        }),*];
    };
}

use attacks;

/// Multiples of the smallest size.
const SIZES: [u64; 3] = [1, 4, 16];

/// Callgrind counts the instructions of this function and of its callees.
#[inline(never)]
fn measured(work: &mut dyn FnMut()) {
    work();
}

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let attacks = || index::ATTACKS.iter().chain(requests::ATTACKS);
    match given.as_slice() {
        ["run", name, size] => {
            let attack = attacks().find(|attack| attack.name == *name).ok_or("no such attack")?;
            println!("units: {}", (attack.run)(size.parse()?));
        }
        ["measure", names @ ..] => {
            println!("| attack | operation | unit | n | at n | at 4n | at 16n |\n|---|---|---|---|---|---|---|");
            for attack in attacks().filter(|attack| names.is_empty() || names.contains(&attack.name)) {
                let Attack { name, operation, unit, size, .. } = attack;
                let figures = SIZES.iter().map(|factor| Ok(per_unit(name, size * factor)?.round().to_string()));
                let figures = figures.collect::<Result<Vec<_>, Box<dyn Error>>>()?.join(" | ");
                println!("| `{name}` | {operation} | {unit} | {size} | {figures} |");
            }
        }
        _ => {} // run by `cargo bench` or `cargo test`, without arguments
    }
    Ok(())
}

/// Instructions per unit of an attack.
#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn per_unit(name: &str, size: u64) -> Result<f64, Box<dyn Error>> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*hostile*measured*"])
        .arg(std::env::current_exe()?)
        .args(["run", name, &size.to_string()])
        .output()?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    let number = |text: &str, label: &str| -> Option<u64> {
        text.lines().find_map(|line| line.split_once(label))?.1.split_whitespace().next()?.parse().ok()
    };
    let units = number(&stdout, "units: ").ok_or_else(|| format!("{name} failed: {stderr}"))?;
    let instructions = number(&stderr, "Collected : ").ok_or("no count of valgrind")?;
    Ok(instructions as f64 / units as f64)
}
