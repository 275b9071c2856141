//! The stub, end to end: programs run where they should and failures carry their names.

use std::io::Read;
use std::os::fd::AsFd;

use hotcell_sys::program::{Expect, Program, Stage};
use hotcell_sys::spawner::{Event, Spawner};
use hotcell_sys::wire;

fn events(program: &Program<&'static str>, inputs: &[std::os::fd::BorrowedFd<'_>]) -> Vec<String> {
    let image = program.image();
    let mut spawner = Spawner::start().expect("the stub starts");
    spawner.launch(&image, inputs).expect("the program is sent");
    let mut seen = Vec::new();
    while let Some(event) = spawner.next_event().expect("the stub answers") {
        seen.push(match event {
            Event::Spawned { .. } => "spawned".to_owned(),
            Event::Ready(fds) => format!("ready {}", fds.len()),
            Event::Fault { op, answer } => format!("fault {:?} {answer}", image.label(op).map(|(_, label)| *label)),
            Event::Ended { status, .. } => format!("ended {status:#x}"),
            Event::Gone => {
                spawner.reap().expect("the stub listens");
                "gone".to_owned()
            }
            Event::Reaped(_) => "reaped".to_owned(),
        });
    }
    seen
}

#[test]
fn a_payload_runs_and_its_status_comes_back() {
    let (mut reader, writer) = std::io::pipe().expect("pipe");
    let mut program = Program::new();
    let fd = wire::INPUT_FD_FIRST;
    program.call(Stage::Payload, "dup", libc::SYS_dup3, &[fd.into(), 1i32.into(), 0i32.into()], Expect::Ok).ignore();
    let path = program.text("/bin/sh");
    let argv = program.texts(["sh", "-c", "echo hello; exit 7"]);
    let env = program.texts::<&str>([]);
    program
        .call(Stage::Payload, "exec", libc::SYS_execve, &[path.into(), argv.into(), env.into()], Expect::Ok)
        .ignore();
    let seen = events(&program, &[writer.as_fd()]);
    drop(writer);
    assert_eq!(seen, ["spawned", "ready 0", "ended 0x700", "gone", "reaped"]);
    let mut said = String::new();
    reader.read_to_string(&mut said).expect("utf-8");
    assert_eq!(said, "hello\n");
}

#[test]
fn a_call_that_answers_otherwise_stops_the_launch_under_its_name() {
    let mut program = Program::new();
    program.call(Stage::Init, "fine", libc::SYS_getpid, &[], Expect::Ok).ignore();
    let missing = program.text("/does/not/exist");
    program.call(Stage::Init, "chdir", libc::SYS_chdir, &[missing.into()], Expect::Ok).ignore();
    assert_eq!(events(&program, &[]), ["spawned", "fault Some(\"chdir\") -2", "gone", "reaped"]);
}

#[test]
fn a_proof_that_succeeds_where_it_must_fail_stops_the_launch() {
    let mut program = Program::new();
    program.call(Stage::Init, "proof", libc::SYS_getpid, &[], Expect::Fails(&[libc::EPERM])).ignore();
    let seen = events(&program, &[]);
    assert!(seen[1].starts_with("fault Some(\"proof\") "), "{seen:?}");
}

#[test]
fn dropping_the_spawner_ends_what_it_started() {
    let mut program = Program::new();
    // In a pid namespace: there, init's end is everybody's.
    program.clone_flags(i64::from(libc::CLONE_NEWUSER | libc::CLONE_NEWPID).cast_unsigned());
    let path = program.text("/bin/sleep");
    let argv = program.texts(["sleep", "600"]);
    program
        .call(Stage::Payload, "exec", libc::SYS_execve, &[path.into(), argv.into(), 0u64.into()], Expect::Ok)
        .ignore();
    let mut spawner = Spawner::start().expect("the stub starts");
    spawner.launch(&program.image(), &[]).expect("the program is sent");
    let Some(Event::Spawned { pid, .. }) = spawner.next_event().expect("event") else { panic!("not spawned") };
    assert!(matches!(spawner.next_event().expect("event"), Some(Event::Ready(_))));
    drop(spawner);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
