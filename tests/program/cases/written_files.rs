//! What `jackstay kubeconfig` writes: owners, modes, links, mount points, and files that cannot be written.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use crate::cases::kubeconfigs::{CLUSTER, Home, kubeconfig};

fn home_with_kubeconfig() -> Home {
    let home = Home::new();
    home.write("user/config", kubeconfig(&CLUSTER.replace("ca.crt", "../ca.crt"), "{token: abc}"));
    home
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn owner(path: &Path) -> (u32, u32) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

fn tool(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
}

#[test]
fn written_file_keeps_its_mode_and_links() {
    let home = home_with_kubeconfig();
    let config = home.path("user/config");
    fs::set_permissions(&config, Permissions::from_mode(0o640)).unwrap();
    symlink("user/config", home.path("link")).unwrap();
    fs::hard_link(&config, home.path("hard")).unwrap();
    fs::write(home.path("ca.crt"), fs::read(home.path("ca.crt")).unwrap()).unwrap();
    for (args, server) in [
        (&["--kubeconfig", "link", "--in-place"][..], "https://127.0.0.1:7443"),
        (&["--kubeconfig", "link", "--revert"], "https://10.0.0.1:6443"),
    ] {
        home.succeed(args);
        assert!(fs::symlink_metadata(home.path("link")).unwrap().is_symlink());
        for name in ["user/config", "hard"] {
            assert_eq!(home.tree(name)["clusters"][0]["cluster"]["server"], server, "{name}");
            assert_eq!(mode(&home.path(name)), 0o640);
        }
    }
    let out = home.write("out", "old");
    fs::set_permissions(&out, Permissions::from_mode(0o644)).unwrap();
    home.succeed(&["--kubeconfig", "user/config", "--out", "out", "--force"]);
    assert_eq!(mode(&out), 0o644);
    home.succeed(&["--kubeconfig", "user/config", "--out", "new"]);
    assert_eq!(mode(&home.path("new")), 0o600);
}

#[test]
fn written_file_that_kubectl_locks_is_not_changed() {
    let home = home_with_kubeconfig();
    let lock = home.write("user/config.lock", "");
    let before = fs::read(home.path("user/config")).unwrap();
    let (error, code) =
        home.fail(&["--kubeconfig", "user/config", "--in-place", "--mode", "passthrough"]);
    assert!(
        error.contains("user/config is locked by kubectl or another program") && code == 1,
        "{error}"
    );
    assert_eq!(fs::read(home.path("user/config")).unwrap(), before);
    assert!(!home.path("user/jackstay").exists(), "nothing is written");
    fs::remove_file(lock).unwrap();
    home.succeed(&["--kubeconfig", "user/config", "--in-place"]);
    assert!(!home.path("user/config.lock").exists());
}

#[test]
fn written_file_that_is_no_regular_file_is_refused_before_anything_is_written() {
    let home = home_with_kubeconfig();
    let (error, code) = home.fail(&[
        "--kubeconfig",
        "user/config",
        "--out",
        "/dev/null",
        "--force",
        "--mode",
        "passthrough",
        "--config-out",
        "js/j",
    ]);
    assert!(
        error.contains(
            "nothing written: cannot write /dev/null: it is not a regular file; --out FILE"
        ),
        "{error}"
    );
    assert!(code == 1 && !home.path("js").exists());
}

#[test]
#[ignore = "needs root and a mount namespace"]
fn root_keeps_the_owner_of_files_and_gives_new_ones_that_of_their_directory() {
    let home = home_with_kubeconfig();
    let config = home.path("user/config");
    fs::set_permissions(&config, Permissions::from_mode(0o640)).unwrap();
    for path in [home.path("user"), config.clone()] {
        chown(path, Some(1234), Some(1235)).unwrap();
    }
    let has_acl = Command::new("setfacl").args(["-m", "u:4321:r"]).arg(&config).status();
    let acl = || {
        let output = Command::new("getfacl").arg("-np").arg(&config).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let before = has_acl.is_ok_and(|status| status.success()).then(acl);
    for args in [
        &["--kubeconfig", "user/config", "--in-place", "--mode", "terminate"][..],
        &["--kubeconfig", "user/config", "--renew", "--force"],
        &["--kubeconfig", "user/config", "--renew", "--force"],
        &["--kubeconfig", "user/config", "--revert"],
    ] {
        home.succeed(args);
        assert_eq!(owner(&config), (1234, 1235), "{args:?}");
        assert_eq!(mode(&config) & 0o707, 0o600, "{args:?}");
        if let Some(before) = &before {
            assert_eq!(acl(), *before, "{args:?}");
        }
    }
    for name in ["user/jackstay", "user/jackstay/jackstay.yaml", "user/jackstay/serving.pem"] {
        assert_eq!(owner(&home.path(name)), (1234, 1235), "{name}");
    }
    home.succeed(&["--kubeconfig", "user/config"]);
    assert_eq!(owner(&home.path("user/jackstay.kubeconfig")), (1234, 1235));
}

#[test]
#[ignore = "needs root and a mount namespace"]
fn root_writes_into_a_mount_point_and_refuses_what_cannot_be_written() {
    let home = home_with_kubeconfig();
    let (config, mounted) = (home.path("user/config"), home.write("mounted/config", ""));
    home.write("mounted/../ca.crt", fs::read(home.path("ca.crt")).unwrap());
    let (from, to) = (config.to_str().unwrap(), mounted.to_str().unwrap());
    tool("mount", &["--bind", from, to]);
    home.succeed(&["--kubeconfig", "mounted/config", "--in-place", "--mode", "passthrough"]);
    assert_eq!(
        home.tree("user/config")["clusters"][0]["cluster"]["server"],
        "https://127.0.0.1:7443"
    );
    home.succeed(&["--kubeconfig", "mounted/config", "--revert"]);

    let before = fs::read(&config).unwrap();
    let refused = |reason: &str| {
        let args = [
            "--kubeconfig",
            "mounted/config",
            "--in-place",
            "--mode",
            "terminate",
            "--config-out",
            "js/j.yaml",
        ];
        let (error, code) = home.fail(&args);
        let expected = format!(
            "nothing written: cannot write {to}: {reason}; --out FILE instead of --in-place"
        );
        assert!(error.contains(&expected) && code == 1, "{error}");
        assert_eq!(fs::read(&config).unwrap(), before);
        assert!(!home.path("js").exists(), "no directory and no file is left");
        home.succeed(&[
            "--kubeconfig",
            "mounted/config",
            "--out",
            "out",
            "--force",
            "--mode",
            "terminate",
            "--config-out",
            "o/j",
        ]);
        fs::remove_dir_all(home.path("o")).unwrap();
    };
    tool("mount", &["-o", "remount,ro,bind", to]);
    refused("Read-only file system");
    tool("umount", &[to]);

    let full = home.path("mounted");
    tool("mount", &["-t", "tmpfs", "-o", "size=16k", "tmpfs", full.to_str().unwrap()]);
    let relative = String::from_utf8(before.clone()).unwrap();
    fs::write(&mounted, &relative).unwrap();
    fs::write(full.join("filler"), vec![0; 12 << 10]).unwrap();
    let (error, code) = home.fail(&["--kubeconfig", "mounted/config", "--in-place"]);
    assert!(
        error.contains("No space left on device; --out FILE instead of --in-place") && code == 1,
        "{error}"
    );
    assert_eq!(fs::read(&mounted).unwrap(), before);
    assert_eq!(fs::read_dir(&full).unwrap().count(), 2, "no temporary file is left");
    tool("umount", &[full.to_str().unwrap()]);
}

/// File systems without the flag, such as tmpfs of older kernels, have no immutable files.
#[test]
#[ignore = "needs root and a mount namespace"]
fn root_refuses_an_immutable_file_before_anything_is_written() {
    let home = home_with_kubeconfig();
    let config = home.path("user/config");
    let set = Command::new("chattr").arg("+i").arg(&config).output();
    if !set.is_ok_and(|output| output.status.success()) {
        eprintln!("this file system has no immutable files");
        return;
    }
    let (error, code) =
        home.fail(&["--kubeconfig", "user/config", "--in-place", "--mode", "passthrough"]);
    tool("chattr", &["-i", config.to_str().unwrap()]);
    assert!(
        error.contains("it is immutable (chattr +i); --out FILE instead of --in-place")
            && code == 1,
        "{error}"
    );
    assert!(!home.path("user/jackstay").exists());
}
