//! The stub, end to end: programs run where they should and failures carry their names.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};

use hotcell_sys::program::{Expect, Image, Program, Stage};
use hotcell_sys::spawner::{Event, Fault, Line, LineEvent, Spawner};

fn named(image: &Image<&'static str>, fault: Fault) -> String {
    format!("fault {:?} {}", image.label(fault.op).map(|(_, label)| *label), fault.answer)
}

/// What a cell says, until its init is gone.
fn said(line: &Line, cell: &Image<&'static str>, command: &Image<&'static str>) -> Vec<String> {
    let mut seen = Vec::new();
    while let Some(event) = line.next_event().expect("init answers") {
        seen.push(match event {
            LineEvent::Ready(fds) => format!("ready {}", fds.len()),
            LineEvent::Fault(fault) => named(cell, fault),
            LineEvent::CommandFault(fault) => format!("command {}", named(command, fault)),
            LineEvent::Ended { status, .. } => format!("ended {status:#x}"),
        });
    }
    seen
}

/// Waits until a cell is gone, and reaps it.
fn reaped(spawner: &mut Spawner) {
    assert!(matches!(spawner.next_event().expect("event"), Some(Event::Spawned { .. })));
    assert!(matches!(spawner.next_event().expect("event"), Some(Event::Gone)));
    spawner.reap().expect("the stub listens");
    assert!(matches!(spawner.next_event().expect("event"), Some(Event::Reaped(_))));
}

fn script(text: &'static str, is_last: bool) -> Program<&'static str> {
    let mut program = Program::command();
    let stdout = program.input(0);
    let args = [stdout.into(), 1i32.into(), 0i32.into()];
    program.call(Stage::Payload, "dup", libc::SYS_dup3, &args, Expect::Ok).ignore();
    let path = program.text("/bin/sh");
    let argv = program.texts(["sh", "-c", text]);
    let env = program.texts::<&str>([]);
    let args = [path.into(), argv.into(), env.into()];
    program.call(Stage::Payload, "exec", libc::SYS_execve, &args, Expect::Ok).ignore();
    if is_last {
        program.last();
    }
    program
}

fn run(cell: Program<&'static str>, command: Program<&'static str>, inputs: &[BorrowedFd<'_>]) -> Vec<String> {
    let (cell, command) = (cell.image(), command.image());
    let mut spawner = Spawner::start().expect("the stub starts");
    spawner.prepare(&cell, &[]).expect("the program is sent");
    let line = spawner.raise(&[]).expect("a cell is asked for");
    line.run(&command, inputs).expect("the command is sent");
    let seen = said(&line, &cell, &command);
    reaped(&mut spawner);
    seen
}

#[test]
fn a_payload_runs_and_its_status_comes_back() {
    let (mut reader, writer) = std::io::pipe().expect("pipe");
    let seen = run(Program::cell(), script("echo hello; exit 7", true), &[writer.as_fd()]);
    drop(writer);
    assert_eq!(seen, ["ready 0", "ended 0x700"]);
    let mut said = String::new();
    reader.read_to_string(&mut said).expect("utf-8");
    assert_eq!(said, "hello\n");
}

#[test]
fn a_spawner_makes_one_cell_after_the_other_and_a_cell_runs_one_command_after_the_other() {
    let (mut reader, writer) = std::io::pipe().expect("pipe");
    let cell = Program::<&str>::cell().image();
    let commands =
        [script("echo a", false).image(), script("echo bb; exit 1", false).image(), script("echo c", true).image()];
    let mut spawner = Spawner::start().expect("the stub starts");
    spawner.prepare(&cell, &[]).expect("the program is sent");
    for _ in 0..2 {
        let line = spawner.raise(&[]).expect("a cell is asked for");
        assert!(matches!(line.next_event().expect("event"), Some(LineEvent::Ready(_))));
        for (command, expected) in commands.iter().zip([0, 0x100, 0]) {
            line.run(command, &[writer.as_fd()]).expect("the command is sent");
            let event = line.next_event().expect("event");
            assert!(matches!(event, Some(LineEvent::Ended { status, .. }) if status == expected), "{event:?}");
        }
        reaped(&mut spawner);
    }
    drop(writer);
    let mut said = String::new();
    reader.read_to_string(&mut said).expect("utf-8");
    assert_eq!(said, "a\nbb\nc\n".repeat(2));
}

#[test]
fn a_call_that_answers_otherwise_stops_the_launch_under_its_name() {
    let mut program = Program::cell();
    program.call(Stage::Init, "fine", libc::SYS_getpid, &[], Expect::Ok).ignore();
    let missing = program.text("/does/not/exist");
    program.call(Stage::Init, "chdir", libc::SYS_chdir, &[missing.into()], Expect::Ok).ignore();
    assert_eq!(run(program, script("true", true), &[]), ["fault Some(\"chdir\") -2"]);
}

#[test]
fn a_command_that_cannot_be_executed_leaves_the_cell_as_it_is() {
    let mut command = Program::command();
    let missing = command.text("/does/not/exist");
    let args = [missing.into(), 0u64.into(), 0u64.into()];
    command.call(Stage::Payload, "exec", libc::SYS_execve, &args, Expect::Ok).ignore();
    command.last();
    let seen = run(Program::cell(), command, &[]);
    assert_eq!(seen, ["ready 0", "command fault Some(\"exec\") -2", "ended 0x7f00"]);
}

#[test]
fn a_proof_that_succeeds_where_it_must_fail_stops_the_launch() {
    let mut program = Program::cell();
    program.call(Stage::Init, "proof", libc::SYS_getpid, &[], Expect::Fails(&[libc::EPERM])).ignore();
    let seen = run(program, script("true", true), &[]);
    assert!(seen[0].starts_with("fault Some(\"proof\") "), "{seen:?}");
}

#[test]
fn dropping_the_spawner_ends_what_it_started() {
    let mut program = Program::<&str>::cell();
    // In a pid namespace: there, init's end is everybody's.
    program.clone_flags(i64::from(libc::CLONE_NEWUSER | libc::CLONE_NEWPID).cast_unsigned());
    let mut spawner = Spawner::start().expect("the stub starts");
    spawner.prepare(&program.image(), &[]).expect("the program is sent");
    let line = spawner.raise(&[]).expect("a cell is asked for");
    let Some(Event::Spawned { pid, .. }) = spawner.next_event().expect("event") else { panic!("not spawned") };
    assert!(matches!(line.next_event().expect("event"), Some(LineEvent::Ready(_))));
    let (_reader, writer) = std::io::pipe().expect("pipe");
    line.run(&script("sleep 600", true).image(), &[writer.as_fd()]).expect("the command is sent");
    drop(spawner);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
