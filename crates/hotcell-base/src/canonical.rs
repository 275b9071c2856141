//! Canonical JSON (RFC 8785): one value, one text. What is signed or hashed is this text.
//!
//! Names are sorted by their UTF-16 units, nothing is between the parts, and a number is written as JavaScript writes
//! it. Numbers that a double does not hold exactly have no canonical text: two readers could take them for different ones.

use serde::Serialize;
use serde_json::{Number, Value};

/// What has no canonical text.
#[derive(Debug, thiserror::Error)]
pub enum CanonicalError {
    /// It is no JSON at all.
    #[error("it cannot be written as JSON")]
    Json(#[from] serde_json::Error),
    /// A whole number beyond ±(2⁵³ − 1).
    #[error("the number {0} cannot be written exactly")]
    Number(Number),
}

/// The largest whole number that every reader takes for the same.
const WHOLE_MAX: u64 = (1 << 53) - 1;

/// The canonical text of anything that is JSON.
pub fn to_canonical(value: &impl Serialize) -> Result<Vec<u8>, CanonicalError> {
    let mut text = Vec::with_capacity(512);
    write(&serde_json::to_value(value)?, &mut text)?;
    Ok(text)
}

fn write(value: &Value, text: &mut Vec<u8>) -> Result<(), CanonicalError> {
    match value {
        Value::Null | Value::Bool(_) | Value::String(_) => serde_json::to_writer(text, value)?,
        Value::Number(number) => write_number(number, text)?,
        Value::Array(values) => {
            text.push(b'[');
            for (idx, value) in values.iter().enumerate() {
                if idx > 0 {
                    text.push(b',');
                }
                write(value, text)?;
            }
            text.push(b']');
        }
        Value::Object(values) => {
            let mut values: Vec<(&String, &Value)> = values.iter().collect();
            // The order of bytes is that of UTF-16 but for letters beyond the first 65,536.
            values.sort_unstable_by(|(a, _), (b, _)| match a.is_ascii() && b.is_ascii() {
                true => a.cmp(b),
                false => a.encode_utf16().cmp(b.encode_utf16()),
            });
            text.push(b'{');
            for (idx, (name, value)) in values.into_iter().enumerate() {
                if idx > 0 {
                    text.push(b',');
                }
                serde_json::to_writer(&mut *text, name)?;
                text.push(b':');
                write(value, text)?;
            }
            text.push(b'}');
        }
    }
    Ok(())
}

fn write_number(number: &Number, text: &mut Vec<u8>) -> Result<(), CanonicalError> {
    let whole = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
    match whole {
        Some(whole) if whole <= WHOLE_MAX => text.extend_from_slice(number.to_string().as_bytes()),
        Some(_) => return Err(CanonicalError::Number(number.clone())),
        None => {
            let number_text = double(number.as_f64().unwrap_or_default());
            // A double that is written like a whole number must be one that every reader takes for the same.
            let digits = number_text.trim_start_matches('-');
            let is_whole = digits.bytes().all(|byte| byte.is_ascii_digit());
            if is_whole && digits.parse::<u64>().map_or(true, |whole| whole > WHOLE_MAX) {
                return Err(CanonicalError::Number(number.clone()));
            }
            text.extend_from_slice(number_text.as_bytes());
        }
    }
    Ok(())
}

/// A double as JavaScript's `Number.prototype.toString` writes it.
fn double(number: f64) -> String {
    if number == 0.0 {
        return "0".to_owned();
    }
    // The shortest digits that read back, and a power of ten: `-1.2345e-7`.
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("that is its form");
    let exponent: i32 = exponent.parse().expect("a small number");
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits), |digits| ("-", digits));
    let digits = digits.replace('.', "");
    let n_digits = i32::try_from(digits.len()).expect("at most 17");
    let point = exponent + 1;
    let body = match point {
        // All digits stand before the point.
        1..=21 if n_digits <= point => {
            format!("{digits}{}", "0".repeat(usize::try_from(point - n_digits).unwrap_or(0)))
        }
        1..=21 => {
            let (whole, rest) = digits.split_at(usize::try_from(point).unwrap_or(0));
            format!("{whole}.{rest}")
        }
        -5..=0 => format!("0.{}{digits}", "0".repeat(usize::try_from(-point).unwrap_or(0))),
        _ => {
            let (first, rest) = digits.split_at(1);
            let point = if rest.is_empty() { "" } else { "." };
            format!("{first}{point}{rest}e{exponent:+}")
        }
    };
    format!("{sign}{body}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn text(value: &Value) -> String {
        String::from_utf8(to_canonical(value).expect("canonical")).expect("text")
    }

    #[test]
    fn the_examples_of_the_standard() {
        // Section 3.2.2 and appendix B of RFC 8785.
        let value = serde_json::from_str(
            r#"{
              "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
              "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
              "literals": [null, true, false]
            }"#,
        );
        let value = value.expect("JSON");
        assert_eq!(
            text(&value),
            r#"{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"#
        );
        for (bits, expected) in [
            (0x0000_0000_0000_0000_u64, "0"),
            (0x8000_0000_0000_0000, "0"),
            (0x0000_0000_0000_0001, "5e-324"),
            (0x8000_0000_0000_0001, "-5e-324"),
            (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
            (0x4340_0000_0000_0000, "9007199254740992"),
            (0xc340_0000_0000_0000, "-9007199254740992"),
            (0x4430_0000_0000_0000, "295147905179352830000"),
            (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
            (0x44b5_2d02_c7e1_4af6, "1e+23"),
            (0x444b_1ae4_d6e2_ef4e, "999999999999999700000"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x41b3_de43_5555_5553, "333333333.3333332"),
            (0x41b3_de43_5555_5554, "333333333.33333325"),
            (0x3ff0_0000_0000_0000, "1"),
        ] {
            assert_eq!(double(f64::from_bits(bits)), expected);
        }
    }

    #[test]
    fn names_are_sorted_by_their_units() {
        let value = json!({ "\u{20ac}": 1, "\r": 2, "\u{fb33}": 3, "1": 4, "\u{1f600}": 5, "\u{80}": 6, "\u{f6}": 7 });
        assert_eq!(text(&value), "{\"\\r\":2,\"1\":4,\"\u{80}\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\u{fb33}\":3}");
    }

    #[test]
    fn numbers_that_readers_disagree_about_are_refused() {
        assert_eq!(text(&json!(WHOLE_MAX)), "9007199254740991");
        for number in [json!(WHOLE_MAX + 1), json!(u64::MAX), json!(i64::MIN), json!(1e17), json!(-1e20)] {
            assert!(matches!(to_canonical(&number), Err(CanonicalError::Number(_))), "{number}");
        }
    }

    fn has_a_form(number: &f64) -> bool {
        number.is_finite() && (number.abs() < 9e15 || number.abs() >= 1e21)
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            any::<f64>().prop_filter("JSON has no others", has_a_form).prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(any::<String>(), inner, 0..6)
                    .prop_map(|values| Value::Object(values.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_form_is_stable(value in any_json()) {
            let once = to_canonical(&value).expect("canonical");
            let read: Value = serde_json::from_slice(&once).expect("JSON");
            prop_assert_eq!(to_canonical(&read).expect("canonical"), once);
        }

        #[test]
        fn numbers_read_back_exactly(number in any::<f64>().prop_filter("finite", |number| number.is_finite())) {
            let read: f64 = double(number).parse().expect("a number");
            prop_assert!(read == number);
        }
    }
}
