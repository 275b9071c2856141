//! Units: bytes, durations and shares of processors, read and written the same way everywhere.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Text that is not a quantity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UnitError {
    /// Not a number with a unit.
    #[error("`{given}` is not {what}")]
    Unreadable {
        /// What was given.
        given: String,
        /// What was wanted, with an example.
        what: &'static str,
    },
    /// A number beyond what the unit can hold.
    #[error("`{given}` is more than {most}")]
    TooLarge {
        /// What was given.
        given: String,
        /// The most that is accepted.
        most: String,
    },
    /// A number below the least that makes sense.
    #[error("`{given}` is less than {least}")]
    TooSmall {
        /// What was given.
        given: String,
        /// The least that is accepted.
        least: String,
    },
}

/// A number of bytes. Read from `4096`, `64k`, `512MiB`, `1.5G`; units count in 1024s, `kB MB GB TB` in 1000s.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

const BYTES: &str = "a size such as 64k, 512MiB or 1.5G";

impl Bytes {
    /// So many mebibytes.
    pub const fn mib(mebibytes: u64) -> Bytes {
        Bytes(mebibytes << 20)
    }
}

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Bytes, UnitError> {
        let (number, unit) = split(text, BYTES)?;
        let scale: u64 = match unit {
            "" | "b" | "B" => 1,
            "k" | "K" | "Ki" | "KiB" | "kiB" => 1 << 10,
            "m" | "M" | "Mi" | "MiB" => 1 << 20,
            "g" | "G" | "Gi" | "GiB" => 1 << 30,
            "t" | "T" | "Ti" | "TiB" => 1 << 40,
            "kB" | "KB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            "TB" => 1_000_000_000_000,
            _ => return Err(unreadable(text, BYTES)),
        };
        // Above 2^53 a float has no odd numbers left; no machine has so much to give.
        scaled(text, number, scale, 1 << 53, &|most| Bytes(most).to_string()).map(Bytes)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.into_iter().find(|(_, shift)| self.0 >> shift > 0) {
            None => write!(f, "{} B", self.0),
            Some((unit, shift)) if self.0.is_multiple_of(1 << shift) => write!(f, "{} {unit}", self.0 >> shift),
            Some((unit, shift)) => {
                let tenths = u128::from(self.0) * 10 / (1 << shift);
                write!(f, "{}.{} {unit}", tenths / 10, tenths % 10)
            }
        }
    }
}

/// A share of the machine's processors, in thousandths of one. Read from `2`, `0.5`, `1500m`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cpus {
    /// Thousandths of a processor.
    pub milli: u32,
}

const CPUS: &str = "a number of processors such as 2, 0.5 or 250m";
const CPUS_MILLI_MAX: u64 = 8_192_000;
/// The kernel's scheduler accepts no quota below one millisecond of a tenth of a second.
const CPUS_MILLI_MIN: u64 = 10;

impl FromStr for Cpus {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Cpus, UnitError> {
        let (number, unit) = split(text, CPUS)?;
        let scale = match unit {
            "" => 1000,
            "m" => 1,
            _ => return Err(unreadable(text, CPUS)),
        };
        let show = |milli: u64| Cpus { milli: u32::try_from(milli).unwrap_or(u32::MAX) }.to_string();
        let milli = scaled(text, number, scale, CPUS_MILLI_MAX, &show)?;
        if milli < CPUS_MILLI_MIN {
            return Err(UnitError::TooSmall { given: text.to_owned(), least: show(CPUS_MILLI_MIN) });
        }
        Ok(Cpus { milli: u32::try_from(milli).expect("below the maximum") })
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{}.{:03}", self.milli / 1000, self.milli % 1000);
        f.write_str(digits.trim_end_matches('0').trim_end_matches('.'))
    }
}

const DURATION: &str = "a duration such as 500ms, 90s, 1.5m or 2h";

/// Reads a duration: `500ms`, `90s`, `10m`, `1.5h`, `2d`; a bare number is seconds.
pub fn duration(text: &str) -> Result<Duration, UnitError> {
    let (number, unit) = split(text, DURATION)?;
    let scale = match unit {
        "ms" => 1,
        "" | "s" | "sec" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(unreadable(text, DURATION)),
    };
    let year_ms = 365 * 86_400_000;
    let ms = scaled(text, number, scale, year_ms, &|ms| show_duration(Duration::from_millis(ms)))?;
    if ms == 0 {
        return Err(UnitError::TooSmall { given: text.to_owned(), least: "1ms".to_owned() });
    }
    Ok(Duration::from_millis(ms))
}

/// Shows a duration in the largest unit that leaves no long fraction.
pub fn show_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    let whole = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)];
    match whole.into_iter().find(|(_, unit)| ms >= *unit && ms.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{}{name}", ms / unit),
        None if ms >= 1_000 => format!("{}.{}s", ms / 1_000, ms % 1_000 / 100),
        None => format!("{ms}ms"),
    }
}

fn split<'a>(text: &'a str, what: &'static str) -> Result<(f64, &'a str), UnitError> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = number.parse::<f64>().map_err(|_| unreadable(text, what))?;
    Ok((number, unit.trim_start()))
}

fn unreadable(given: &str, what: &'static str) -> UnitError {
    UnitError::Unreadable { given: given.to_owned(), what }
}

fn scaled(text: &str, number: f64, scale: u64, most: u64, show: &dyn Fn(u64) -> String) -> Result<u64, UnitError> {
    #[expect(clippy::cast_precision_loss, reason = "scales and limits are far below 2^53")]
    let (value, limit) = (number * scale as f64, most as f64);
    if value > limit {
        return Err(UnitError::TooLarge { given: text.to_owned(), most: show(most) });
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 ≤ value ≤ most, checked above")]
    Ok(value.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64k", 65536),
            ("1.5G", 1_610_612_736),
            ("512MiB", 536_870_912),
            ("10MB", 10_000_000),
            ("5 GiB", 5_368_709_120),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn quantities_that_are_none_are_refused_with_both_values() {
        let said = |text: &str| text.parse::<Bytes>().expect_err("refused").to_string();
        assert_eq!(said("ten"), "`ten` is not a size such as 64k, 512MiB or 1.5G");
        assert_eq!(said("-5M"), "`-5M` is not a size such as 64k, 512MiB or 1.5G");
        assert_eq!(said("1.2.3"), "`1.2.3` is not a size such as 64k, 512MiB or 1.5G");
        assert_eq!(said("99999999999999T"), "`99999999999999T` is more than 8192 TiB");
        assert_eq!(said("NaN"), "`NaN` is not a size such as 64k, 512MiB or 1.5G");
        assert_eq!(duration("0").expect_err("refused").to_string(), "`0` is less than 1ms");
        assert_eq!("0.001".parse::<Cpus>().expect_err("refused").to_string(), "`0.001` is less than 0.01");
    }

    #[test]
    fn what_is_shown_reads_back() {
        for milli in [10, 250, 1000, 1500, 2000] {
            let cpus = Cpus { milli };
            assert_eq!(cpus.to_string().parse(), Ok(cpus));
        }
        for bytes in [1, 1 << 10, 1 << 20, 3 << 30, 5 << 40] {
            assert_eq!(Bytes(bytes).to_string().replace(" B", "").parse(), Ok(Bytes(bytes)));
        }
        for text in ["5ms", "1s", "90s", "10m", "2h", "3d"] {
            let read = duration(text).expect("a duration");
            assert_eq!(duration(&show_duration(read)), Ok(read));
        }
    }
}
