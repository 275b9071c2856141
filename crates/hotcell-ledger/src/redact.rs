//! Keeps secrets out of what can never be changed again.
//!
//! A ledger is for ever, so what looks like a secret does not go into it: neither the value of an option or variable whose
//! name says so, nor a password in an address, nor a header that carries credentials, nor a token that is known by its form.
//! What has none of these marks cannot be told from an ordinary word.

/// The rules that were in force, by number: written into each ledger when it begins.
pub const RULES: u32 = 1;
/// What stands in a secret's place.
pub const REDACTED: &str = "[redacted]";

/// Words that make a name a secret's, wherever they stand in it.
const NAMES: &[&str] = &[
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "api_key",
    "api-key",
    "access_key",
    "access-key",
    "private_key",
    "private-key",
    "credential",
    "authorization",
    "auth_key",
    "auth-key",
    "session_key",
    "cookie",
];

/// Beginnings that only tokens have, and how long they are at least.
const FORMS: &[(&str, usize)] = &[
    ("AKIA", 20),
    ("ASIA", 20),
    ("ghp_", 20),
    ("gho_", 20),
    ("ghs_", 20),
    ("ghu_", 20),
    ("github_pat_", 20),
    ("glpat-", 20),
    ("sk-", 20),
    ("sk_live_", 16),
    ("rk_live_", 16),
    ("xoxb-", 16),
    ("xoxp-", 16),
    ("xoxa-", 16),
    ("AIza", 30),
    ("npm_", 30),
    ("pypi-", 30),
    ("eyJ", 40),
    ("-----BEGIN", 10),
    ("AGE-SECRET-KEY-", 20),
    ("hf_", 20),
];

/// A command without its secrets.
pub fn command<W: AsRef<str>>(words: &[W]) -> Vec<String> {
    let mut redacted: Vec<String> = Vec::with_capacity(words.len());
    let mut is_value = false;
    for (idx, one) in words.iter().enumerate() {
        let text = one.as_ref();
        let is_option = text.starts_with('-');
        redacted.push(if is_value && !is_option { REDACTED.to_owned() } else { line(text) });
        // `--token VALUE`, but not `tool token VALUE`: a word by itself may be a command. Nor the program's own name.
        is_value = idx > 0 && is_option && !text.contains('=') && is_secret_name(text);
    }
    redacted
}

/// One word, or one line, without its secrets.
pub fn word(text: &str) -> String {
    let text = in_address(text);
    // `NAME=VALUE`, `--name=VALUE`, `Name: VALUE`; also within an address or a list of them.
    let mut redacted = String::with_capacity(text.len());
    for part in pieces(&text) {
        redacted.push_str(&piece(part));
    }
    redacted
}

/// Parts that a name and its value can be in, with what is between them.
fn pieces(text: &str) -> Vec<&str> {
    text.split_inclusive(|letter: char| letter.is_whitespace() || matches!(letter, '&' | '?' | ';' | ',' | '"' | '\''))
        .collect()
}

fn piece(part: &str) -> String {
    let end = part.trim_end_matches(|letter: char| {
        letter.is_whitespace() || matches!(letter, '&' | '?' | ';' | ',' | '"' | '\'')
    });
    let behind = &part[end.len()..];
    if let Some((name, value)) = end.split_once(['=', ':'])
        && !value.is_empty()
        && !value.starts_with("//")
        && is_secret_name(name)
    {
        return format!("{name}{}{REDACTED}{behind}", &end[name.len()..=name.len()]);
    }
    let has_form =
        |candidate: &str| FORMS.iter().any(|(form, len)| candidate.starts_with(form) && candidate.len() >= *len);
    let value = end.split_once('=').map_or(end, |(_, value)| value);
    if has_form(value) {
        return format!("{}{REDACTED}{behind}", &end[..end.len() - value.len()]);
    }
    part.to_owned()
}

/// `scheme://user:password@host` without what stands before the host.
fn in_address(text: &str) -> String {
    let mut redacted = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        redacted.push_str(before);
        let end = after.find(['/', '?', '#', ' ', '\t', '\n']).unwrap_or(after.len());
        let (authority, behind) = after.split_at(end);
        match authority.rsplit_once('@') {
            Some((_, host)) => redacted.push_str(&format!("{REDACTED}@{host}")),
            None => redacted.push_str(authority),
        }
        rest = behind;
    }
    redacted.push_str(rest);
    redacted
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|word| name.contains(word))
        || matches!(name.trim_start_matches('-'), "auth" | "pass" | "pwd" | "pat" | "bearer")
}

/// A header's value is often a word of its own: `-H 'Authorization: Bearer abc'` is one argument with three words.
pub fn line(text: &str) -> String {
    let lowered = text.to_ascii_lowercase();
    let is_header = |name: &&&str| lowered.starts_with(&format!("{name}:"));
    match ["authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "x-auth-token"]
        .iter()
        .find(|name| is_header(name))
    {
        Some(name) => format!("{}: {REDACTED}", &text[..name.len()]),
        None => word(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        for (before, after) in [
            (&["curl", "--token", "abc", "x"][..], &["curl", "--token", REDACTED, "x"][..]),
            (&["curl", "--token=abc"], &["curl", "--token=[redacted]"]),
            (&["env", "AWS_SECRET_ACCESS_KEY=abc", "make"], &["env", "AWS_SECRET_ACCESS_KEY=[redacted]", "make"]),
            (&["git", "clone", "https://me:pw@host/x"], &["git", "clone", "https://[redacted]@host/x"]),
            (&["curl", "https://host/?a=1&token=abc&b=2"], &["curl", "https://host/?a=1&token=[redacted]&b=2"]),
            (&["curl", "-H", "Authorization: Bearer abc"], &["curl", "-H", "Authorization: [redacted]"]),
            (&["curl", "-H", "X-Api-Key: abc"], &["curl", "-H", "X-Api-Key: [redacted]"]),
            (&["tool", "ghp_0123456789abcdefghij"], &["tool", REDACTED]),
            (&["tool", "--key=AKIA0123456789ABCDEF"], &["tool", "--key=[redacted]"]),
            (&["psql", "--password", "-h", "db"], &["psql", "--password", "-h", "db"]),
            (&["pytest", "-q", "tests/test_token.py"], &["pytest", "-q", "tests/test_token.py"]),
            (&["echo", "a=b", "sk-short", "time: 5"], &["echo", "a=b", "sk-short", "time: 5"]),
            (&["python3", "-c", "import os; print(os.environ)"], &["python3", "-c", "import os; print(os.environ)"]),
        ] {
            assert_eq!(command(before), after);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_taken(words: Vec<String>) {
            prop_assert_eq!(command(&words).len(), words.len());
        }

        #[test]
        fn what_is_redacted_stays_so(words: Vec<String>) {
            let once = command(&words);
            prop_assert_eq!(command(&once), once);
        }
    }
}
