//! The layers: which crate may depend on which.
//!
//! ```text
//! edge   hotcell
//! core   hotcell-gate ─▶ hotcell-cell, hotcell-store
//! pure   hotcell-ledger ─▶ hotcell-authority
//! base   hotcell-sys   hotcell-base
//! ```
//!
//! An arrow only points down. A commit that adds an edge says why.

/// A crate of ours and those of ours it may use.
pub const EDGES: &[(&str, &[&str])] = &[
    // The probe's attempts and the signals are kernel calls; everything else goes through the libraries.
    (
        "hotcell",
        &[
            "hotcell-authority",
            "hotcell-base",
            "hotcell-cell",
            "hotcell-gate",
            "hotcell-ledger",
            "hotcell-store",
            "hotcell-sys",
        ],
    ),
    ("hotcell-gate", &["hotcell-authority", "hotcell-base", "hotcell-cell", "hotcell-ledger", "hotcell-store"]),
    ("hotcell-cell", &["hotcell-base", "hotcell-sys"]),
    // It is made of the ledger's entries. The tests write a ledger, which takes a key.
    ("hotcell-store", &["hotcell-authority", "hotcell-base", "hotcell-ledger"]),
    // Heads and receipts are signed by keys that the authority knows.
    ("hotcell-ledger", &["hotcell-authority", "hotcell-base"]),
    ("hotcell-authority", &["hotcell-base"]),
    ("hotcell-sys", &[]),
    ("hotcell-base", &[]),
    ("xtask", &[]),
];

/// The one crate that may say `unsafe`.
pub const UNSAFE_CRATE: &str = "hotcell-sys";

/// Crates that do no I/O and read no clock, but for the modules named beside them.
pub const PURE: &[(&str, &[&str])] =
    &[("hotcell-base", &[]), ("hotcell-authority", &[]), ("hotcell-ledger", &["file.rs", "file/tests.rs"])];

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
    }

    fn crates() -> Vec<(String, PathBuf)> {
        let mut found = vec![("xtask".to_owned(), root().join("xtask"))];
        for entry in fs::read_dir(root().join("crates")).expect("crates").flatten() {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
        found
    }

    fn sources(directory: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                found.extend(sources(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
        found
    }

    /// Names of our crates in the dependency tables of a manifest.
    fn dependencies(manifest: &str) -> Vec<String> {
        let mut in_table = false;
        let mut found = Vec::new();
        for line in manifest.lines() {
            if line.starts_with('[') {
                in_table = line.contains("dependencies");
            } else if in_table
                && let Some(name) = line.split(['.', ' ', '=']).next()
                && (name.starts_with("hotcell") || name == "xtask")
            {
                found.push(name.to_owned());
            }
        }
        found
    }

    #[test]
    fn every_edge_points_down_and_is_listed() {
        for (name, path) in crates() {
            let manifest = fs::read_to_string(path.join("Cargo.toml")).expect("a manifest");
            let allowed = EDGES.iter().find(|(edge, _)| *edge == name).map(|(_, allowed)| *allowed);
            let allowed = allowed.unwrap_or_else(|| panic!("{name} is in no layer"));
            for dependency in dependencies(&manifest) {
                assert!(allowed.contains(&dependency.as_str()), "{name} may not use {dependency}");
            }
        }
        for (idx, (name, allowed)) in EDGES.iter().enumerate() {
            let above: Vec<&str> = EDGES[..idx].iter().map(|(name, _)| *name).collect();
            assert!(!allowed.iter().any(|one| above.contains(one)), "{name} points up");
        }
    }

    #[test]
    fn unsafe_lives_in_one_crate() {
        for (name, path) in crates() {
            let manifest = fs::read_to_string(path.join("Cargo.toml")).expect("a manifest");
            let inherits = manifest.contains("[lints]\nworkspace = true");
            assert_eq!(inherits, name != UNSAFE_CRATE, "{name}: the workspace's lints forbid unsafe code");
            if name != UNSAFE_CRATE {
                for source in sources(&path) {
                    let text = fs::read_to_string(&source).expect("a source");
                    let said = text.lines().find(|line| {
                        let code = line.split("//").next().unwrap_or_default();
                        ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"].iter().any(|word| code.contains(word))
                            && !code.contains('"')
                    });
                    assert!(said.is_none(), "{}: {said:?}", source.display());
                }
            }
        }
        let workspace = fs::read_to_string(root().join("Cargo.toml")).expect("a manifest");
        assert!(workspace.contains("unsafe_code = \"forbid\""));
    }

    #[test]
    fn pure_crates_touch_nothing_outside() {
        for (name, but) in PURE {
            let directory = root().join("crates").join(name).join("src");
            for source in sources(&directory) {
                if but.iter().any(|module| source == directory.join(module)) {
                    continue;
                }
                let text = fs::read_to_string(&source).expect("a source");
                for outside in [
                    "std::fs",
                    "std::net",
                    "std::env",
                    "std::process",
                    "SystemTime",
                    "Instant",
                    "Timestamp::now",
                    "rustix",
                    "libc",
                ] {
                    assert!(!text.contains(outside), "{} uses {outside}", source.display());
                }
            }
        }
    }

    #[test]
    fn libraries_never_print_or_exit() {
        for name in
            ["hotcell-base", "hotcell-authority", "hotcell-ledger", "hotcell-store", "hotcell-cell", "hotcell-gate"]
        {
            for source in sources(&root().join("crates").join(name).join("src")) {
                let text = fs::read_to_string(&source).expect("a source");
                for word in ["println!", "eprintln!", "process::exit", "env::var"] {
                    let said = text.lines().any(|line| line.contains(word) && !line.trim_start().starts_with("//"));
                    assert!(!said, "{} uses {word}", source.display());
                }
            }
        }
    }
}
