//! Builds the stub: a static executable without libc that the library carries inside itself.
//!
//! It is compiled by calling the compiler directly because a build script cannot yet depend on the
//! binary of another package. `src/stub/run.rs` and `src/wire.rs` are compiled into the library as
//! well, so lints and tests see them.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=src/stub");
    println!("cargo::rerun-if-changed=src/wire.rs");
    let target = std::env::var("TARGET").expect("cargo sets TARGET");
    assert!(
        target.starts_with("x86_64-") && target.contains("-linux-"),
        "hotcell runs on x86_64 Linux only: the syscall filter and the stub are written and proven there, not on {target}"
    );
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("stub");
    let status = Command::new(std::env::var_os("RUSTC").expect("cargo sets RUSTC"))
        .args(["--edition", "2024", "--crate-name", "hotcell_stub", "--crate-type", "bin", "--target", &target])
        .args(["-C", "panic=abort", "-C", "opt-level=2", "-C", "overflow-checks=off", "-C", "strip=symbols"])
        .args(["-C", "relocation-model=pic", "-C", "target-feature=+crt-static"])
        .args(["-C", "link-arg=-nostartfiles", "-C", "link-arg=-nostdlib", "-C", "link-arg=-static"])
        .args(["-C", "link-arg=-no-pie", "-C", "link-arg=-Wl,--build-id=none,-z,noexecstack"])
        // As `STUB_BASE` of `wire` says.
        .args(["-C", "link-arg=-Wl,--image-base=0x120000000000"])
        .arg("src/stub/main.rs")
        .arg("-o")
        .arg(&out)
        .status()
        .expect("the compiler that builds this crate can be started");
    assert!(status.success(), "building the stub failed");
}
