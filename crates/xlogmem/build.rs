//! Builds the library that `xlogmem exec` carries.
//!
//! Cargo cannot name the output of another crate as an input, so this calls it for `xlog-preload`. The profile and the folder are the
//! same for every build of a target directory: the library is compiled once. On platforms without it, an empty file stands in.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAME: &str = "libxlog_preload.so";

fn main() -> Result<(), Box<dyn Error>> {
    let output = PathBuf::from(env::var("OUT_DIR")?);
    let crates = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("..");
    let manifest = crates.join("xlog-preload/Cargo.toml");
    println!("cargo::rerun-if-changed=build.rs");
    let library = output.join(NAME);
    // Cargo takes a watched file that is missing for a changed one: outside the workspace nothing is watched.
    if !is_supported() || !manifest.exists() {
        std::fs::write(library, [])?;
        return Ok(());
    }
    let watch = |path: PathBuf| println!("cargo::rerun-if-changed={}", path.display());
    // The profile and the versions of dependencies are the workspace's.
    watch(crates.join("../Cargo.toml"));
    watch(crates.join("../Cargo.lock"));
    for name in ["xlog-preload", "xlog-ledger", "xlog-trace", "xlog-base"] {
        watch(crates.join(name).join("src"));
        watch(crates.join(name).join("Cargo.toml"));
    }
    std::fs::copy(build(&output, &manifest)?, library)?;
    Ok(())
}

fn is_supported() -> bool {
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|set| set == value);
    is("CARGO_CFG_TARGET_OS", "linux")
        && is("CARGO_CFG_TARGET_ARCH", "x86_64")
        && is("CARGO_CFG_TARGET_ENV", "gnu")
        && env::var("HOST").ok() == env::var("TARGET").ok()
}

/// Builds the library and returns its path.
fn build(output: &Path, manifest: &Path) -> Result<PathBuf, Box<dyn Error>> {
    // OUT_DIR is TARGET/PROFILE/build/xlogmem-HASH/out.
    let folder = output.ancestors().nth(4).unwrap_or(output).join("preload");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--lib", "--profile", "preload", "--manifest-path"]);
    cargo.arg(manifest).arg("--target-dir").arg(&folder);
    // The flags of the calling build, and of clippy, are not meant for it.
    for name in [
        "CARGO_BUILD_TARGET",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CLIPPY_ARGS",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTFLAGS",
    ] {
        cargo.env_remove(name);
    }
    let status = cargo.status()?;
    if !status.success() {
        return Err(format!("building xlog-preload failed: {status}").into());
    }
    Ok(folder.join("preload").join(NAME))
}
