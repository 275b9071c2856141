//! Patterns for paths: `*` and `?` stay within a name, `**` crosses names, `[a-z]` is one byte of a set.
//!
//! A pattern that matches a directory matches everything below it: `src` is the directory with all that is in it,
//! `src/**` is what is in it. Works on bytes: a name need not be text.

/// A pattern, split at its slashes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Glob {
    parts: Vec<Vec<u8>>,
}

/// Text that is no pattern.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum GlobError {
    /// It matches nothing.
    #[error("the pattern is empty")]
    Empty,
    /// A set that does not end.
    #[error("the pattern `{0}` has a `[` without a `]`")]
    OpenSet(String),
    /// It cannot match a path below a directory.
    #[error("the pattern `{0}` leads outside; patterns are relative and have no `..`")]
    Outside(String),
}

impl std::str::FromStr for Glob {
    type Err = GlobError;

    fn from_str(text: &str) -> Result<Glob, GlobError> {
        let text = text.strip_prefix("./").unwrap_or(text);
        if text.starts_with('/') || text.split('/').any(|part| part == "..") {
            return Err(GlobError::Outside(text.to_owned()));
        }
        let parts: Vec<Vec<u8>> =
            text.split('/').filter(|part| !part.is_empty() && *part != ".").map(|part| part.into()).collect();
        if parts.is_empty() {
            return Err(GlobError::Empty);
        }
        if parts.iter().any(|part| !sets_are_closed(part)) {
            return Err(GlobError::OpenSet(text.to_owned()));
        }
        Ok(Glob { parts })
    }
}

fn sets_are_closed(mut part: &[u8]) -> bool {
    while let Some(at) = part.iter().position(|byte| *byte == b'[') {
        match set_end(&part[at..]) {
            Some(end) => part = &part[at + end..],
            None => return false,
        }
    }
    true
}

impl Glob {
    /// Whether the pattern matches a relative path or a directory above it.
    pub fn matches(&self, path: &[u8]) -> bool {
        let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).collect();
        any_depth(&self.parts, &names)
    }
}

fn any_depth(parts: &[Vec<u8>], names: &[&[u8]]) -> bool {
    match parts.split_first() {
        // All of the pattern is used up: what is left is below a directory it matches.
        None => true,
        Some((part, rest)) if part == b"**" => {
            rest.is_empty() && !names.is_empty() || (0..names.len()).any(|from| any_depth(rest, &names[from..]))
        }
        Some((part, rest)) => {
            names.split_first().is_some_and(|(name, below)| one_name(part, name) && any_depth(rest, below))
        }
    }
}

/// Whether a part matches a name; linear in both but for one step back at the last star.
fn one_name(part: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        if part.get(p) == Some(&b'*') {
            back = Some((p + 1, n));
            p += 1;
            continue;
        }
        if let Some(len) = part.get(p..).and_then(|rest| one_byte(rest, name[n])) {
            p += len;
            n += 1;
            continue;
        }
        let Some((after_star, from)) = back else { return false };
        back = Some((after_star, from + 1));
        (p, n) = (after_star, from + 1);
    }
    part[p..].iter().all(|byte| *byte == b'*')
}

/// How much of the pattern matches this byte, if its beginning does.
fn one_byte(part: &[u8], byte: u8) -> Option<usize> {
    match *part.first()? {
        b'?' => Some(1),
        b'[' => {
            let end = set_end(part)?;
            in_set(&part[1..end - 1], byte).then_some(end)
        }
        b'\\' if part.len() > 1 => (part[1] == byte).then_some(2),
        plain => (plain == byte).then_some(1),
    }
}

/// The length of the set a part begins with.
fn set_end(part: &[u8]) -> Option<usize> {
    // `]` right after `[` or `[!` is an ordinary byte.
    let first = if part.get(1) == Some(&b'!') { 3 } else { 2 };
    part.iter().skip(first).position(|byte| *byte == b']').map(|at| at + first + 1)
}

fn in_set(set: &[u8], byte: u8) -> bool {
    let (set, wanted) = match set.split_first() {
        Some((b'!', rest)) => (rest, false),
        _ => (set, true),
    };
    let mut at = 0;
    let mut found = false;
    while at < set.len() {
        if set.get(at + 1) == Some(&b'-') && at + 2 < set.len() {
            found |= (set[at]..=set[at + 2]).contains(&byte);
            at += 3;
        } else {
            found |= set[at] == byte;
            at += 1;
        }
    }
    found == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pattern: &str, yes: &[&str], no: &[&str]) {
        let glob: Glob = pattern.parse().expect("a pattern");
        for path in yes {
            assert!(glob.matches(path.as_bytes()), "{pattern} should match {path}");
        }
        for path in no {
            assert!(!glob.matches(path.as_bytes()), "{pattern} should not match {path}");
        }
    }

    #[test]
    fn patterns_mean_what_people_expect() {
        check("src", &["src", "src/a.rs", "src/a/b"], &["source", "a/src"]);
        check("*.rs", &["a.rs", ".rs"], &["a.rsx", "src/a.rs"]);
        check("**/*.rs", &["a.rs", "src/a.rs", "a/b/c.rs"], &["a.txt"]);
        check("src/**", &["src/a", "src/a/b"], &["src", "other/a"]);
        check("src/**/t?st", &["src/test", "src/a/b/tast/x"], &["src/tst", "test"]);
        check("[a-c]x[!0-9]", &["axz", "cx-"], &["dxz", "ax5"]);
        check("a*b*c", &["abc", "axxbyyc"], &["ab", "acb"]);
        check("./a//b/", &["a/b", "a/b/c"], &["a"]);
        check("\\*", &["*"], &["a"]);
        check("**", &["a", "a/b"], &[]);
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for (text, error) in [("", GlobError::Empty), ("[a", GlobError::OpenSet("[a".into()))] {
            assert_eq!(text.parse::<Glob>(), Err(error));
        }
        for text in ["/etc", "../x", "a/../../b"] {
            assert!(matches!(text.parse::<Glob>(), Err(GlobError::Outside(_))), "{text}");
        }
    }

    #[test]
    fn many_stars_do_not_take_for_ever() {
        let glob: Glob = "*a*a*a*a*a*a*a*a*a*b".parse().expect("a pattern");
        assert!(!glob.matches(&[b'a'; 4096]));
    }
}
