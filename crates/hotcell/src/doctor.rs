//! `hotcell doctor`.

use std::path::Path;

use hotcell_cell::Host;
use hotcell_cell::doctor::{Diagnosis, State, diagnose};
use hotcell_gate::live::ProcessName;

use crate::cli::DoctorArgs;
use crate::error::Failure;
use crate::screen;

/// Tries everything and says what was found. 0: sound, 4: something is missing.
pub(crate) fn doctor(host: &Host, home: &Path, args: &DoctorArgs) -> Result<u8, Failure> {
    let us = ProcessName::own();
    let scratch = home.join(format!("doctor-{}", us.file_name()));
    let failed = |source| Failure::Io {
        message: format!("cannot use `{}`", scratch.display()),
        hint: Some("choose a place that can be written: hotcell --home DIR doctor".to_owned()),
        source,
    };
    std::fs::create_dir(&scratch).map_err(failed)?;
    let diagnosis = diagnose(host, &scratch);
    std::fs::remove_dir_all(&scratch).map_err(failed)?;
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&diagnosis).expect("plain data"))
    } else {
        text(&diagnosis)
    };
    screen::answer(&text)?;
    Ok(if diagnosis.is_sound() { 0 } else { 4 })
}

fn text(diagnosis: &Diagnosis) -> String {
    let who = if diagnosis.privileged { "as root" } else { "as an ordinary user" };
    let cgroups = match serde_json::to_value(diagnosis.cgroup_version) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    };
    let mut text = format!(
        "kernel {}, user {} ({who}), cgroup {cgroups}, Landlock {}\n\n",
        diagnosis.kernel, diagnosis.uid, diagnosis.landlock_abi
    );
    let rows: Vec<Vec<String>> = diagnosis
        .findings
        .iter()
        .map(|finding| {
            let state = match finding.state {
                State::Works => "works",
                State::Watched => "watched",
                State::NotNeeded => "not needed",
                State::Missing => "MISSING",
            };
            vec![finding.name.clone(), state.to_owned(), finding.keeps.clone()]
        })
        .collect();
    text.push_str(&screen::table(&rows));
    for finding in diagnosis.findings.iter().filter(|finding| finding.why.is_some()) {
        text.push_str(&format!("\n{}: {}\n", finding.name, finding.why.as_deref().unwrap_or_default()));
        if let Some(fix) = &finding.fix {
            text.push_str(&format!("  fix: {fix}\n"));
        }
    }
    if !diagnosis.differences.is_empty() {
        text.push_str("\nOtherwise than as root:\n");
        for difference in &diagnosis.differences {
            text.push_str(&format!("- {difference}\n"));
        }
    }
    let verdict = if diagnosis.is_sound() { "Cells can run here." } else { "Cells with every wall cannot run here." };
    text.push_str(&format!("\n{verdict}\n"));
    text
}
