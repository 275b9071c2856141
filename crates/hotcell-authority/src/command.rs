//! Patterns for commands: words as they are, `*` for any one word, a last `**` for any further ones.
//!
//! ```text
//! pytest -q **          pytest with -q and whatever follows
//! git apply --check *   exactly one more word
//! 'my tool' '*'         quoted: a word with a space, and a star that is a star
//! ```
//!
//! The first word is a program. What counts is the file that would be executed: a pattern with a slash names that file, one
//! without a slash names whatever the caller's search finds under that name. Links of the file itself are not followed: one
//! file may be many programs, by the name it is called by. `python3` in a directory the guest can
//! write is another file than `python3` of the system, so it is another program.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A pattern for commands.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CommandPattern {
    words: Vec<Word>,
    /// Whether any further words may follow.
    open: bool,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Word {
    Is(String),
    Any,
}

/// Text that is no pattern for commands.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PatternError {
    /// It matches nothing.
    #[error("the command pattern is empty")]
    Empty,
    /// `**` with something behind it.
    #[error("the command pattern `{0}` has words after `**`, which stands for all further words")]
    AfterRest(String),
    /// A quote without an end.
    #[error("the command pattern `{0}` has a quote that does not end")]
    OpenQuote(String),
    /// A program cannot be any program while its arguments are given.
    #[error("the command pattern `{0}` allows any program with certain arguments; name the program, or write `**`")]
    AnyProgram(String),
}

/// A command as it would be executed.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// The words, the program first.
    pub words: &'a [Vec<u8>],
    /// The file that would be executed.
    pub program: &'a Path,
}

/// Finds the file that a first word stands for, as the command's own was looked for: a word with a slash is a path.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<PathBuf>;

impl CommandPattern {
    /// Whether this command is meant.
    pub fn matches(&self, command: &Command<'_>, lookup: Lookup<'_>) -> bool {
        let Some(arguments) = command.words.get(1..) else { return false };
        let Some((program, words)) = self.words.split_first() else { return self.open };
        let is_program = match program {
            Word::Any => true,
            Word::Is(name) => lookup(name).is_some_and(|found| found == command.program),
        };
        let fits = if self.open { arguments.len() >= words.len() } else { arguments.len() == words.len() };
        let is_word = |(word, argument): (&Word, &Vec<u8>)| match word {
            Word::Any => true,
            Word::Is(word) => word.as_bytes() == argument.as_slice(),
        };
        is_program && fits && words.iter().zip(arguments).all(is_word)
    }

    /// Whether this could be meant by its words, by whatever name its program goes: what forbids must not be got round
    /// by another path to the same program.
    pub fn forbids(&self, command: &Command<'_>, lookup: Lookup<'_>) -> bool {
        let by_name = |name: &str| {
            let name = Path::new(name).file_name();
            let is_first =
                command.words.first().is_some_and(|first| Some(file_name(first)) == name.map(|n| n.as_encoded_bytes()));
            is_first || command.program.file_name() == name
        };
        match self.words.split_first() {
            Some((Word::Is(program), _)) if by_name(program) => {
                let mut anything = self.clone();
                anything.words[0] = Word::Any;
                anything.matches(command, lookup)
            }
            _ => self.matches(command, lookup),
        }
    }

    /// Whether every command of this pattern is one of the other's.
    pub fn is_within(&self, wider: &CommandPattern) -> bool {
        let is_word = |(narrow, wide): (&Word, &Word)| *wide == Word::Any || narrow == wide;
        let fits = match (self.open, wider.open) {
            (_, true) => self.words.len() >= wider.words.len(),
            (true, false) => false,
            (false, false) => self.words.len() == wider.words.len(),
        };
        fits && self.words.iter().zip(&wider.words).all(is_word)
    }

    /// The program it names, unless it allows any.
    pub fn program(&self) -> Option<&str> {
        match self.words.first() {
            Some(Word::Is(program)) => Some(program),
            _ => None,
        }
    }

    /// The same, with any further words.
    pub fn and_more(self) -> CommandPattern {
        CommandPattern { open: true, ..self }
    }

    /// The pattern of exactly these words.
    pub fn exactly<W: AsRef<str>>(words: impl IntoIterator<Item = W>) -> CommandPattern {
        CommandPattern {
            words: words.into_iter().map(|word| Word::Is(word.as_ref().to_owned())).collect(),
            open: false,
        }
    }
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

impl FromStr for CommandPattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<CommandPattern, PatternError> {
        let mut words = split(text).ok_or_else(|| PatternError::OpenQuote(text.to_owned()))?;
        let is_rest = |(word, is_quoted): &(String, bool)| word == "**" && !is_quoted;
        let open = words.last().is_some_and(is_rest);
        if open {
            words.pop();
        }
        if words.iter().any(is_rest) {
            return Err(PatternError::AfterRest(text.to_owned()));
        }
        let words: Vec<Word> = words
            .into_iter()
            .map(|(word, is_quoted)| if word == "*" && !is_quoted { Word::Any } else { Word::Is(word) })
            .collect();
        match words.first() {
            None if !open => Err(PatternError::Empty),
            Some(Word::Is(program)) if program.is_empty() => Err(PatternError::Empty),
            Some(Word::Any) => Err(PatternError::AnyProgram(text.to_owned())),
            _ => Ok(CommandPattern { words, open }),
        }
    }
}

/// Splits text into words as a shell does, without its expansions; and whether any part of a word was quoted.
pub fn split(text: &str) -> Option<Vec<(String, bool)>> {
    let mut words = Vec::new();
    let mut word: Option<(String, bool)> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ' ' | '\t' | '\n' => words.extend(word.take()),
            '\'' | '"' => {
                let (text, is_quoted) = word.get_or_insert_default();
                *is_quoted = true;
                loop {
                    match letters.next()? {
                        end if end == letter => break,
                        '\\' if letter == '"' => text.push(letters.next()?),
                        inner => text.push(inner),
                    }
                }
            }
            '\\' => {
                let (text, is_quoted) = word.get_or_insert_default();
                *is_quoted = true;
                text.push(letters.next()?);
            }
            plain => word.get_or_insert_default().0.push(plain),
        }
    }
    words.extend(word);
    Some(words)
}

/// Words as one line that [`split`] takes apart again.
pub fn joined<W: AsRef<str>>(words: impl IntoIterator<Item = W>) -> String {
    words.into_iter().map(|word| quoted(word.as_ref())).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |letter: char| !letter.is_whitespace() && !"'\"\\".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) && word != "*" && word != "**" {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

impl fmt::Display for CommandPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.words.iter().map(|word| match word {
            Word::Any => "*".to_owned(),
            Word::Is(word) => quoted(word),
        });
        let words: Vec<String> = words.chain(self.open.then(|| "**".to_owned())).collect();
        f.write_str(&words.join(" "))
    }
}

impl TryFrom<String> for CommandPattern {
    type Error = PatternError;
    fn try_from(text: String) -> Result<CommandPattern, PatternError> {
        text.parse()
    }
}

impl From<CommandPattern> for String {
    fn from(pattern: CommandPattern) -> String {
        pattern.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Where programs are, as far as these tests go.
    fn lookup(name: &str) -> Option<PathBuf> {
        Some(Path::new("/usr/bin").join(name))
    }

    fn matches(pattern: &str, line: &str, program: Option<&str>) -> bool {
        let words = split(line).expect("words");
        let words: Vec<Vec<u8>> = words.into_iter().map(|(word, _)| word.into_bytes()).collect();
        let first = String::from_utf8(words[0].clone()).expect("text");
        let program = program.map_or_else(|| lookup(&first).expect("found"), PathBuf::from);
        let pattern: CommandPattern = pattern.parse().expect("a pattern");
        pattern.matches(&Command { words: &words, program: &program }, &lookup)
    }

    #[test]
    fn patterns_mean_what_people_expect() {
        for (pattern, yes, no) in [
            ("pytest -q **", &["pytest -q", "pytest -q a b"][..], &["pytest", "pytest -x", "ruff -q"][..]),
            ("git apply --check *", &["git apply --check x.patch"], &["git apply --check", "git apply --check a b"]),
            ("echo '*'", &["echo '*'"], &["echo a"]),
            ("echo 'a b'", &["echo 'a b'"], &["echo a b"]),
            ("**", &["anything at all"], &[]),
            ("true", &["true"], &["true x", "false"]),
        ] {
            for line in yes {
                assert!(matches(pattern, line, None), "{pattern} should match {line}");
            }
            for line in no {
                assert!(!matches(pattern, line, None), "{pattern} should not match {line}");
            }
        }
    }

    #[test]
    fn the_file_counts_and_not_its_name() {
        assert!(!matches("python3 *", "python3 x", Some("/work/python3")), "a file of the guest's own");
        assert!(matches("/opt/python3 *", "python3 x", Some("/opt/python3")), "the file that was named");
        assert!(!matches("/opt/python3 *", "/opt/python3 x", Some("/opt/other")), "a link elsewhere");
        assert!(matches("python3", "/usr/bin/python3", Some("/usr/bin/python3")), "the same file by its path");
    }

    #[test]
    fn what_is_forbidden_is_forbidden_under_any_path() {
        let forbids = |pattern: &str, line: &str, program: &str| {
            let words: Vec<Vec<u8>> = line.split(' ').map(|word| word.as_bytes().to_vec()).collect();
            let pattern: CommandPattern = pattern.parse().expect("a pattern");
            pattern.forbids(&Command { words: &words, program: Path::new(program) }, &lookup)
        };
        assert!(forbids("curl **", "curl x", "/usr/bin/curl"));
        assert!(forbids("curl **", "/opt/curl x", "/opt/curl"), "another file of that name");
        assert!(forbids("curl **", "fetch x", "/opt/curl"), "a link to one");
        assert!(forbids("/usr/bin/curl **", "curl x", "/opt/curl"));
        assert!(!forbids("curl -o *", "curl x", "/usr/bin/curl"), "other arguments");
        assert!(!forbids("curl **", "wget x", "/usr/bin/wget"));
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for (text, error) in [
            ("", PatternError::Empty),
            ("  ", PatternError::Empty),
            ("''", PatternError::Empty),
            ("a ** b", PatternError::AfterRest("a ** b".into())),
            ("a 'b", PatternError::OpenQuote("a 'b".into())),
            ("* -rf", PatternError::AnyProgram("* -rf".into())),
        ] {
            assert_eq!(text.parse::<CommandPattern>(), Err(error), "{text}");
        }
    }

    /// Patterns and commands of few words, so that they meet.
    fn a_pattern() -> impl Strategy<Value = CommandPattern> {
        let word = prop_oneof![
            3 => prop::sample::select(vec!["a", "b", "*x", "**y", "c d", ""]).prop_map(|word| Word::Is(word.to_owned())),
            1 => Just(Word::Any),
        ];
        let program = prop::sample::select(vec!["p", "q", "/usr/bin/p", "/opt/p"]);
        let words = (program, prop::collection::vec(word, 0..4));
        (prop::option::weighted(0.95, words), any::<bool>()).prop_map(|(words, open)| match words {
            Some((program, mut words)) => {
                words.insert(0, Word::Is(program.to_owned()));
                CommandPattern { words, open }
            }
            None => CommandPattern { words: Vec::new(), open: true },
        })
    }

    fn a_command() -> impl Strategy<Value = (Vec<Vec<u8>>, PathBuf)> {
        let word = prop::sample::select(vec!["a", "b", "*", "**", "*x", "**y", "c d", ""]);
        let program = prop::sample::select(vec!["/usr/bin/p", "/usr/bin/q", "/opt/p"]);
        (program, prop::collection::vec(word, 0..5)).prop_map(|(program, mut words)| {
            words.insert(0, program);
            (words.iter().map(|word| word.as_bytes().to_vec()).collect(), PathBuf::from(program))
        })
    }

    /// The same, said in another way: turns pattern and command into lists and walks them from behind.
    fn naive(pattern: &CommandPattern, words: &[Vec<u8>], program: &Path) -> bool {
        let mut wanted: Vec<Option<Vec<u8>>> = pattern
            .words
            .iter()
            .map(|word| match word {
                Word::Any => None,
                Word::Is(word) => Some(word.clone().into_bytes()),
            })
            .collect();
        if let Some(Some(first)) = wanted.first_mut() {
            let name = String::from_utf8(first.clone()).expect("text");
            let file = if name.contains('/') { PathBuf::from(name) } else { lookup(&name).expect("found") };
            *first = file.to_str().expect("text").as_bytes().to_vec();
        }
        let mut found: Vec<Vec<u8>> = words.to_vec();
        found[0] = program.to_str().expect("text").as_bytes().to_vec();
        while pattern.open && found.len() > wanted.len() {
            found.pop();
        }
        while let (Some(word), Some(have)) = (wanted.last(), found.last()) {
            if word.as_ref().is_some_and(|word| word != have) {
                return false;
            }
            wanted.pop();
            found.pop();
        }
        wanted.is_empty() && found.is_empty()
    }

    proptest! {
        #[test]
        fn the_matcher_agrees_with_a_naive_one(pattern in a_pattern(), (words, program) in a_command()) {
            let command = Command { words: &words, program: &program };
            prop_assert_eq!(pattern.matches(&command, &lookup), naive(&pattern, &words, &program));
        }

        #[test]
        fn a_narrower_pattern_matches_nothing_more(a in a_pattern(), b in a_pattern(), (words, program) in a_command()) {
            let command = Command { words: &words, program: &program };
            if a.is_within(&b) && a.matches(&command, &lookup) {
                prop_assert!(b.matches(&command, &lookup), "{a} is within {b}");
            }
            prop_assert!(a.is_within(&a));
        }

        #[test]
        fn what_forbids_forbids_whatever_it_matches(pattern in a_pattern(), (words, program) in a_command()) {
            let command = Command { words: &words, program: &program };
            prop_assert!(!pattern.matches(&command, &lookup) || pattern.forbids(&command, &lookup));
        }

        #[test]
        fn a_pattern_reads_back(pattern in a_pattern()) {
            prop_assert_eq!(pattern.to_string().parse::<CommandPattern>(), Ok(pattern));
        }

        #[test]
        fn words_read_back(words: Vec<String>) {
            let read = split(&joined(&words)).expect("words");
            prop_assert_eq!(read.into_iter().map(|(word, _)| word).collect::<Vec<_>>(), words);
        }
    }
}
