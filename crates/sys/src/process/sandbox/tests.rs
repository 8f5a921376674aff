//! The restrictions cannot be revoked, so a child process tries what they forbid.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use socket2::{Domain, Socket, Type};

use super::file_rules::{FileAccess, FileRules};
use super::seccomp::Violation;
use super::{forbid_dumps, forbid_new_privileges, landlock, seccomp};

/// The directory that the child may write; set in the child only.
const DIRECTORY: &str = "JACKSTAY_TEST_SANDBOX";
/// The mode of the child's filter.
const MODE: &str = "JACKSTAY_TEST_SECCOMP";

/// Runs [`child_in_the_sandbox`] in a process of its own.
fn run_child(directory: &Path, mode: &str) -> Output {
    let outside = directory.with_extension("outside");
    let _sockets = (
        UnixDatagram::bind_addr(&abstract_name(directory, "manager")).unwrap(),
        UnixListener::bind_addr(&abstract_name(directory, "runtime")).unwrap(),
        UnixListener::bind(directory.join("predecessor")).unwrap(),
        outside.exists().then(|| UnixListener::bind(outside.join("runtime")).unwrap()),
    );
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process::sandbox::tests::child_in_the_sandbox", "--nocapture"])
        .args(["--test-threads", "1"])
        .env(DIRECTORY, directory)
        .env(MODE, mode)
        .output()
        .unwrap()
}

/// The result of a system call.
#[allow(unsafe_code)]
fn call(number: libc::c_long, arguments: [libc::c_long; 3]) -> Result<libc::c_long, i32> {
    let [a, b, c] = arguments;
    // SAFETY: the callers pass no pointer to the calls that the filter allows.
    let result = unsafe { libc::syscall(number, a, b, c) };
    if result == -1 { Err(io::Error::last_os_error().raw_os_error().unwrap()) } else { Ok(result) }
}

fn kind<T>(result: io::Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

/// The abstract name of a socket of the test that uses `directory`.
fn abstract_name(directory: &Path, name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("{}/{name}", directory.display())).unwrap()
}

/// The sockets of the parent cannot be connected to, as far as the kernel restricts it.
fn expect_no_sockets_of_others(
    domain: &Result<landlock::Domain, landlock::LandlockError>,
    directory: &Path,
    connected: &UnixDatagram,
) {
    assert_eq!(connected.send(b"READY=1").unwrap(), 7);
    let Ok(domain) = domain else { return };
    if !domain.is_complete {
        return println!("sockets are not tested: Linux before 6.12");
    }
    let denied = Some(ErrorKind::PermissionDenied);
    let runtime = abstract_name(directory, "runtime");
    assert_eq!(kind(UnixStream::connect_addr(&runtime)), denied);
    let manager = abstract_name(directory, "manager");
    let datagrams = UnixDatagram::unbound().unwrap();
    assert_eq!(kind(datagrams.send_to_addr(b"x", &manager)), denied);
    // Its own sockets are reachable, and below a directory that it may write those of a predecessor.
    let own = abstract_name(directory, "own");
    let _listener = UnixListener::bind_addr(&own).unwrap();
    UnixStream::connect_addr(&own).unwrap();
    UnixStream::connect(directory.join("predecessor")).unwrap();
    let outside = kind(UnixStream::connect(directory.with_extension("outside").join("runtime")));
    assert_eq!(outside, denied.filter(|_| domain.restricts_socket_paths), "socket of another");
}

/// Without the environment of [`run_child`] it does nothing.
#[test]
fn child_in_the_sandbox() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else { return };
    let is_kill = std::env::var(MODE).unwrap() == "kill";
    let outside = directory.with_extension("outside");
    forbid_dumps().unwrap();
    forbid_new_privileges().unwrap();
    assert_eq!(rustix::process::dumpable_behavior(), Ok(super::DumpableBehavior::NotDumpable));
    let mut rules = FileRules::default();
    rules.add_directory(&directory);
    rules.add_path(Path::new("/proc/self"), FileAccess::Read);
    rules.add_replaceable(&directory.join("link"));
    // The service manager is connected before.
    let connected = UnixDatagram::unbound().unwrap();
    connected.connect_addr(&abstract_name(&directory, "manager")).unwrap();
    let domain = landlock::restrict(rules.list());
    seccomp::install(if is_kill { Violation::Kills } else { Violation::Fails }).unwrap();

    let status = fs::read_to_string("/proc/self/status").unwrap();
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    let limits = fs::read_to_string("/proc/self/limits").unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");

    // What the proxy does.
    fs::write(directory.join("new"), "content").unwrap();
    fs::rename(directory.join("new"), directory.join("file")).unwrap();
    assert_eq!(fs::read_to_string(directory.join("file")).unwrap(), "content");
    let socket = std::os::unix::net::UnixListener::bind(directory.join("socket"));
    socket.unwrap();
    fs::remove_file(directory.join("socket")).unwrap();
    assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
    for domain in [Domain::IPV4, Domain::IPV6, Domain::UNIX] {
        Socket::new(domain, Type::STREAM, None).unwrap();
    }
    let kill = call(libc::SYS_kill, [0, 0, 0]);
    if is_kill {
        unreachable!("the kernel kills the process at kill(2): {kill:?}");
    }

    // Files.
    if let Err(reason) = &domain {
        println!("Landlock is not tested: {reason}");
    } else {
        let denied = Some(ErrorKind::PermissionDenied);
        assert_eq!(kind(File::open(outside.join("secret"))), denied);
        assert_eq!(kind(File::open("/etc/passwd")), denied);
        assert_eq!(kind(fs::write(outside.join("new"), "")), denied);
        assert_eq!(kind(fs::read_dir("/")), denied);
        // A link does not lead out of the sandbox, unless the configuration named it at the start.
        std::os::unix::fs::symlink("/etc/passwd", directory.join("late-link")).unwrap_err();
        assert_eq!(fs::read_to_string(directory.join("link")).unwrap(), "target");
        // Nor can what is read be executed.
        assert!(kind(Command::new(directory.join("file")).status()).is_some());
    }

    expect_no_sockets_of_others(&domain, &directory, &connected);

    // Programs and other processes.
    let missing = Err(libc::ENOSYS);
    assert_eq!(kill, missing);
    assert!(Command::new("/bin/true").status().is_err());
    let parent = libc::c_long::from(std::os::unix::process::parent_id());
    for (number, arguments) in [
        (libc::SYS_execve, [0, 0, 0]),
        (libc::SYS_execveat, [0, 0, 0]),
        (libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0]),
        (libc::SYS_clone3, [0, 0, 0]),
        (libc::SYS_ptrace, [libc::PTRACE_ATTACH.into(), parent, 0]),
        (libc::SYS_process_vm_readv, [parent, 0, 0]),
        (libc::SYS_pidfd_open, [parent, 0, 0]),
        (libc::SYS_kill, [parent, 0, 0]),
        (libc::SYS_tgkill, [parent, parent, 0]),
        (libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0]),
        (libc::SYS_bpf, [0, 0, 0]),
        (libc::SYS_io_uring_setup, [1, 0, 0]),
        (libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0]),
        (libc::SYS_socket, [libc::AF_PACKET.into(), libc::SOCK_RAW.into(), 0]),
        (libc::SYS_socket, [libc::AF_ALG.into(), libc::SOCK_SEQPACKET.into(), 0]),
        (libc::SYS_socket, [libc::AF_NETLINK.into(), libc::SOCK_RAW.into(), 9]),
        (libc::SYS_ioctl, [0, libc::TIOCSTI.cast_signed(), 0]),
        // Executable memory.
        (libc::SYS_mmap, [0, 4096, (libc::PROT_READ | libc::PROT_EXEC).into()]),
        (libc::SYS_mprotect, [0, 4096, libc::PROT_EXEC.into()]),
    ] {
        assert_eq!(call(number, arguments), missing, "system call {number} {arguments:?}");
    }
    // Its own signals, for abort(3), and netlink for the owner of a connection.
    let own = libc::c_long::from(std::process::id());
    assert_eq!(call(libc::SYS_tgkill, [own, own, 0]), Ok(0));
    let raw = libc::SOCK_RAW.into();
    let netlink = [libc::AF_NETLINK.into(), raw, libc::NETLINK_SOCK_DIAG.into()];
    assert!(call(libc::SYS_socket, netlink).is_ok());
}

#[test]
fn sandbox_forbids_programs_other_processes_and_files_outside() {
    let root = tempfile::tempdir().unwrap();
    let (inside, outside) = (root.path().join("d"), root.path().join("d.outside"));
    let linked = root.path().join("linked");
    for directory in [&inside, &outside, &linked] {
        fs::create_dir(directory).unwrap();
    }
    fs::write(outside.join("secret"), "").unwrap();
    fs::write(linked.join("target"), "target").unwrap();
    std::os::unix::fs::symlink("../linked/target", inside.join("link")).unwrap();
    let output = run_child(&inside, "on");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains(" 1 passed"), "{output:?}");
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn mode_kill_ends_the_process_at_a_call_outside_of_the_list() {
    use std::os::unix::process::ExitStatusExt as _;
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("link"), "").unwrap();
    let output = run_child(root.path(), "kill");
    assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{output:?}");
}
