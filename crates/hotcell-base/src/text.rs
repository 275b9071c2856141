//! Text that is safe to show: whatever a guest puts into a name, a terminal sees letters only.

use std::fmt::Write;
use std::path::Path;

/// Shows bytes a guest chose: control characters, invisible and direction-changing characters and
/// invalid UTF-8 become escapes, everything else stays as it is. Never two names shown alike.
pub fn shown(bytes: impl AsRef<[u8]>) -> String {
    escaped(bytes.as_ref(), |letter| match letter {
        '\\' => Some("\\\\"),
        '\n' => Some("\\n"),
        '\t' => Some("\\t"),
        _ => None,
    })
}

/// Shows a path, as [`shown`].
pub fn shown_path(path: impl AsRef<Path>) -> String {
    shown(path.as_ref().as_os_str().as_encoded_bytes())
}

/// Shows a line of text a guest wrote: as [`shown`], but backslashes and tabs, which text is full of, stay.
pub fn shown_line(bytes: impl AsRef<[u8]>) -> String {
    escaped(bytes.as_ref(), |letter| match letter {
        '\t' => Some("\t"),
        _ => None,
    })
}

fn escaped(bytes: &[u8], special: impl Fn(char) -> Option<&'static str>) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            if let Some(escape) = special(letter) {
                text.push_str(escape);
            } else if letter.is_control() || is_deceptive(letter) {
                write!(text, "\\u{{{:x}}}", u32::from(letter)).expect("a String takes any text");
            } else {
                text.push(letter);
            }
        }
        for byte in chunk.invalid() {
            write!(text, "\\x{byte:02x}").expect("a String takes any text");
        }
    }
    text
}

/// Characters that draw nothing or reorder what stands around them.
fn is_deceptive(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_made_to_deceive_are_shown_as_escapes() {
        assert_eq!(shown("plain é 漢"), "plain é 漢");
        assert_eq!(shown(b"a\x1b[31mb\n"), "a\\u{1b}[31mb\\n");
        assert_eq!(shown("txt.\u{202e}exe"), "txt.\\u{202e}exe");
        assert_eq!(shown(b"\xff\xfe"), "\\xff\\xfe");
    }

    proptest! {
        #[test]
        fn different_bytes_never_look_alike(a: Vec<u8>, b: Vec<u8>) {
            prop_assert_eq!(a == b, shown(&a) == shown(&b));
        }

        #[test]
        fn nothing_a_terminal_obeys_comes_through(bytes: Vec<u8>) {
            prop_assert!(!shown(&bytes).chars().any(char::is_control));
            prop_assert!(!shown_line(&bytes).chars().any(|letter| letter.is_control() && letter != '\t'));
        }
    }
}
