//! The two streams of our own, written through one place that survives a closed one.

use std::io::{self, Write};

use hotcell_base::text::shown_line;

use crate::error::Failure;

/// Writes text to stdout; says whether it arrived.
pub(crate) fn data(text: &str) -> io::Result<()> {
    bytes(text.as_bytes())
}

/// Writes bytes to stdout; says whether they arrived.
pub(crate) fn bytes(bytes: &[u8]) -> io::Result<()> {
    if hotcell_sys::inherited::stdout_was_closed() {
        return Err(rustix::io::Errno::BADF.into());
    }
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()
}

/// Writes an answer to stdout, or fails with it.
pub(crate) fn answer(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    bytes(text.as_ref()).map_err(|source| Failure::Io {
        message: "the answer could not be printed on stdout".to_owned(),
        hint: Some("give it somewhere to go: hotcell … > FILE".to_owned()),
        source,
    })
}

/// Writes a note to stderr. Nobody listening is no reason to stop. Whatever a path in it says, a terminal does not obey it.
pub(crate) fn note(text: &str) {
    let safe: Vec<String> = text.split('\n').map(shown_line).collect();
    let _nobody_listens = writeln!(io::stderr().lock(), "{}", safe.join("\n"));
}

/// A number of things, as a person says it.
pub(crate) fn count(n: usize, thing: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {thing}{s}")
}

const WIDTH_MAX: usize = 80;

/// Columns, each as wide as its widest cell, the last one ragged.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    // One very long cell does not push the rest of every row away.
    let widths: Vec<usize> = (0..n_columns).map(|column| width(column).unwrap_or(0).min(WIDTH_MAX)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let padding = width.saturating_sub(cell.chars().count());
            line.push_str(cell);
            line.push_str(&" ".repeat(padding + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
