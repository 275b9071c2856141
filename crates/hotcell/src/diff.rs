//! `hotcell diff`: what a run would change, as a patch that git reads, as numbers, or as JSON.

use std::io::{IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use hotcell_base::text::{shown, shown_line, shown_path};
use hotcell_cell::changes::Kind;
use hotcell_cell::tree::Node;
use hotcell_gate::diff::Entry;
use hotcell_gate::{Diff, Home};
use serde_json::{Value, json};
use similar::{ChangeTag, TextDiff};

use crate::cli::DiffArgs;
use crate::error::Failure;
use crate::screen;

/// Comparing lines ends after this long, with longer differences than needed.
const COMPARE_TIME_MAX: Duration = Duration::from_secs(5);
/// A NUL within so many bytes makes a file binary.
const TEXT_SEEN: usize = 8000;

pub(crate) fn diff(home: &Home, args: &DiffArgs) -> Result<(), Failure> {
    let mut diff = Diff::of(home, &args.run)?;
    let matches = |entry: &Entry| args.only.iter().any(|glob| glob.matches(entry.path.0.as_os_str().as_bytes()));
    diff.entries.retain(|entry| args.only.is_empty() || matches(entry));
    let out = if args.json {
        format!("{:#}\n", as_json(&diff)).into_bytes()
    } else if args.stat {
        stat(&diff).into_bytes()
    } else {
        patch(&diff, std::io::stdout().is_terminal())
    };
    match screen::answer(&out) {
        // Whoever reads only the beginning has what it wanted.
        Err(Failure::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

/// The two sides of a file or link as text, and none if either is no text or was not kept.
struct Sides {
    old: Vec<u8>,
    new: Vec<u8>,
}

impl Sides {
    fn of(diff: &Diff, before: Option<&Node>, after: Option<&Node>) -> Option<Sides> {
        let side = |node: Option<&Node>| match node {
            None => Some(Vec::new()),
            Some(Node::Symlink { target }) => Some(target.0.as_os_str().as_bytes().to_vec()),
            Some(node) => diff.contents(node).filter(|contents| is_text(contents)),
        };
        Some(Sides { old: side(before)?, new: side(after)? })
    }

    /// Lines added and removed.
    fn counts(&self, time: &Time) -> (usize, usize) {
        let (old, new) = (lines(&self.old), lines(&self.new));
        let lines = time.compare(&old, &new);
        let count = |tag| lines.iter_all_changes().filter(|change| change.tag() == tag).count();
        (count(ChangeTag::Insert), count(ChangeTag::Delete))
    }
}

/// Lines with their ends, of which only the newline is one: git knows no other.
fn lines(text: &[u8]) -> Vec<&[u8]> {
    text.split_inclusive(|byte| *byte == b'\n').collect()
}

/// What comparing may take for a whole diff: a guest chooses what is hard to compare.
struct Time(Instant);

impl Time {
    fn new() -> Time {
        Time(Instant::now() + COMPARE_TIME_MAX)
    }

    fn compare<'t>(&self, old: &'t [&'t [u8]], new: &'t [&'t [u8]]) -> TextDiff<'t, 't, [u8]> {
        TextDiff::configure().deadline(self.0).diff_slices(old, new)
    }
}

fn is_text(contents: &[u8]) -> bool {
    !contents[..contents.len().min(TEXT_SEEN)].contains(&0)
}

/// An entry as git would see it: another kind of thing is one removed and one added.
fn parts(entry: &Entry) -> Vec<(Option<&Node>, Option<&Node>)> {
    match entry.kind {
        Kind::TypeChanged => vec![(entry.before.as_ref(), None), (None, entry.after.as_ref())],
        _ => vec![(entry.before.as_ref(), entry.after.as_ref())],
    }
}

/// A patch. What git has no word for stands in lines that begin with `#`.
fn patch(diff: &Diff, for_terminal: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let time = Time::new();
    for entry in &diff.entries {
        for remark in remarks(entry) {
            push(&mut out, &format!("# {remark}\n"));
        }
        for (before, after) in parts(entry) {
            if [before, after]
                .into_iter()
                .flatten()
                .all(|node| matches!(node, Node::File { .. } | Node::Symlink { .. }))
            {
                file(&mut out, diff, &time, entry, (before, after), for_terminal);
            }
        }
    }
    if diff.truncated {
        push(&mut out, "# more changed than is listed here\n");
    }
    out
}

fn file(
    out: &mut Vec<u8>,
    diff: &Diff,
    time: &Time,
    entry: &Entry,
    (before, after): (Option<&Node>, Option<&Node>),
    for_terminal: bool,
) {
    let same = |a: &Node, b: &Node| matches!((a, b), (Node::File { sha256: a, .. }, Node::File { sha256: b, .. }) if a.is_some() && a == b);
    let is_same = before.zip(after).is_some_and(|(a, b)| same(a, b));
    if is_same && before.map(git_mode) == after.map(git_mode) {
        // The remark says what git cannot.
        return;
    }
    let sides = Sides::of(diff, before, after);
    if sides.is_none() && !is_same {
        // A patch that git reads cannot say it; what it can say is not spoiled by it.
        let path = shown_path(&entry.path.0);
        push(out, &format!("# {path}: binary, {} -> {}\n", size(before), size(after)));
        return;
    }
    let (old_name, new_name) = (quoted("a", entry), quoted("b", entry));
    push(out, &format!("diff --git {old_name} {new_name}\n"));
    match (before.map(git_mode), after.map(git_mode)) {
        (None, Some(mode)) => push(out, &format!("new file mode {mode:06o}\n")),
        (Some(mode), None) => push(out, &format!("deleted file mode {mode:06o}\n")),
        (Some(old), Some(new)) if old != new => push(out, &format!("old mode {old:06o}\nnew mode {new:06o}\n")),
        _ => {}
    }
    let Some(sides) = sides.filter(|_| !is_same) else { return };
    if sides.old == sides.new {
        return;
    }
    // git ends a name with a space in it by a tab.
    let tab = if entry.path.0.as_os_str().as_bytes().contains(&b' ') { "\t" } else { "" };
    let name = |name: String, node: Option<&Node>| node.map_or("/dev/null".to_owned(), |_| format!("{name}{tab}"));
    push(out, &format!("--- {}\n+++ {}\n", name(old_name, before), name(new_name, after)));
    let (old, new) = (lines(&sides.old), lines(&sides.new));
    for hunk in time.compare(&old, &new).unified_diff().context_radius(3).iter_hunks() {
        push(out, &format!("{}\n", hunk.header()));
        for change in hunk.iter_changes() {
            let sign = match change.tag() {
                ChangeTag::Equal => ' ',
                ChangeTag::Delete => '-',
                ChangeTag::Insert => '+',
            };
            let line: &[u8] = change.value();
            let bare = line.strip_suffix(b"\n").unwrap_or(line);
            out.push(u8::try_from(sign).expect("ASCII"));
            if for_terminal {
                push(out, &shown_line(bare));
            } else {
                out.extend_from_slice(bare);
            }
            out.push(b'\n');
            if bare.len() == line.len() {
                push(out, "\\ No newline at end of file\n");
            }
        }
    }
}

fn push(out: &mut Vec<u8>, text: &str) {
    out.write_all(text.as_bytes()).expect("memory takes any bytes");
}

/// What git has no word for.
fn remarks(entry: &Entry) -> Vec<String> {
    let path = shown_path(&entry.path.0);
    let mut remarks = Vec::new();
    match (&entry.before, &entry.after) {
        (Some(Node::Directory { mode: old }), Some(Node::Directory { mode: new })) if old != new => {
            remarks.push(format!("directory {path}: mode {old:o} -> {new:o}"));
        }
        (Some(Node::Directory { .. }), Some(Node::Directory { .. })) => {}
        (_, Some(Node::Directory { mode })) => remarks.push(format!("directory {path}: added, mode {mode:o}")),
        (Some(Node::Directory { .. }), _) => remarks.push(format!("directory {path}: removed")),
        (_, Some(Node::Special { .. })) => remarks.push(format!("{path}: a pipe, socket or device; not applied")),
        (Some(Node::File { mode: old, .. }), Some(Node::File { mode: new, .. })) if old != new => {
            remarks.push(format!("{path}: mode {old:o} -> {new:o}"));
        }
        (None, Some(Node::File { mode, .. })) if !matches!(mode, 0o644 | 0o755) => {
            remarks.push(format!("{path}: mode {mode:o}"));
        }
        (Some(Node::Special { .. }), _) => remarks.push(format!("{path}: a pipe, socket or device is gone")),
        _ => {}
    }
    if !entry.stripped.is_empty() {
        remarks.push(format!("{path}: left out {}", entry.stripped.join(", ")));
    }
    if entry.hard_link.is_some() {
        remarks.push(format!("{path}: has further names (hard links)"));
    }
    if entry.control {
        remarks.push(format!("{path}: a control file; not applied unless it is named"));
    }
    if entry.moved {
        remarks.push(format!("{path}: changed on the host while the run went on"));
    }
    remarks
}

/// What git knows of a mode: whether it can be executed.
fn git_mode(node: &Node) -> u32 {
    match node {
        Node::File { mode, .. } if mode & 0o100 != 0 => 0o100_755,
        Node::File { .. } => 0o100_644,
        _ => 0o120_000,
    }
}

fn size(node: Option<&Node>) -> String {
    match node {
        Some(Node::File { size, sha256, .. }) => {
            let digest = sha256.as_deref().map_or("unread", |sha256| &sha256[..sha256.len().min(12)]);
            format!("{size} bytes ({digest})")
        }
        Some(Node::Symlink { .. }) => "a link".to_owned(),
        Some(_) => "no data".to_owned(),
        None => "nothing".to_owned(),
    }
}

/// A name as git writes it: in quotes with escapes if it has anything but plain text in it.
fn quoted(side: &str, entry: &Entry) -> String {
    let bytes = entry.path.0.as_os_str().as_bytes();
    let plain = shown(bytes).as_bytes() == bytes && !bytes.contains(&b'"');
    if plain {
        return format!("{side}/{}", entry.path.0.display());
    }
    let mut name = format!("\"{side}/");
    for byte in bytes {
        match byte {
            b'"' | b'\\' => name.extend(['\\', char::from(*byte)]),
            b'\n' => name.push_str("\\n"),
            b'\t' => name.push_str("\\t"),
            b' '..=b'~' => name.push(char::from(*byte)),
            other => name.push_str(&format!("\\{other:03o}")),
        }
    }
    name.push('"');
    name
}

fn stat(diff: &Diff) -> String {
    let (mut rows, mut added, mut removed) = (Vec::new(), 0, 0);
    let time = Time::new();
    for entry in &diff.entries {
        let what = match &Sides::of(diff, entry.before.as_ref(), entry.after.as_ref()) {
            _ if entry.after.as_ref().or(entry.before.as_ref()).is_some_and(Node::is_directory) => {
                "directory".to_owned()
            }
            _ if entry.kind == Kind::TypeChanged => "another kind of thing".to_owned(),
            Some(sides) => {
                let (plus, minus) = sides.counts(&time);
                (added, removed) = (added + plus, removed + minus);
                format!("+{plus} -{minus}")
            }
            None => format!("{} -> {}", size(entry.before.as_ref()), size(entry.after.as_ref())),
        };
        rows.push(vec![word(entry.kind), shown_path(&entry.path.0), what]);
    }
    let more = if diff.truncated { " or more" } else { "" };
    let n = screen::count(diff.entries.len(), "change");
    format!("{}{n}{more}, +{added} -{removed} lines\n", screen::table(&rows))
}

fn word(kind: Kind) -> String {
    match serde_json::to_value(kind) {
        Ok(Value::String(word)) => word,
        _ => unreachable!("a kind is written as a word"),
    }
}

fn as_json(diff: &Diff) -> Value {
    let time = Time::new();
    let entries = diff.entries.iter().map(|entry| {
        let mut object = json!(entry);
        object["shown"] = shown_path(&entry.path.0).into();
        if let Some(sides) = Sides::of(diff, entry.before.as_ref(), entry.after.as_ref()) {
            let (plus, minus) = sides.counts(&time);
            object["lines_added"] = plus.into();
            object["lines_removed"] = minus.into();
        }
        object
    });
    json!({
        "run_id": diff.run_id,
        "workspace": diff.workspace,
        "truncated": diff.truncated,
        "entries": entries.collect::<Vec<_>>(),
    })
}
