//! Checks the image of the static pod of jackstay: whether it is on this node, and whether kubelet's garbage collection
//! keeps it.
//!
//! kubelet deletes unused images from `imageGCHighThresholdPercent` (85 % by default) on, and only the container
//! runtime can exempt one (CRI: `Image.pinned`; kubelet `image_gc_manager.go`, from 1.29 and the patch releases of 1.25
//! to 1.28 with kubernetes#119986). With `imagePullPolicy: Never` a deleted image is gone: the next pod does not start.
//!
//! * containerd 1.6.25, 1.7.10, 2.0 and later: the label `io.cri-containerd.pinned=pinned` of the image. Earlier ones
//!   ignore it (containerd#9381, #9382).
//! * CRI-O 1.28 and later: `pinned_images` in its configuration (crio.conf(5)).
//! * cri-dockerd: only the flag `--pinned-images`, in the releases that have it (Mirantis/cri-dockerd#571).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;
use serde_json::Value;

/// The label with which containerd pins an image.
pub const PINNED_LABEL: &str = "io.cri-containerd.pinned=pinned";

/// The image of a static pod of jackstay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodImage {
    /// The manifest that names it.
    pub manifest: PathBuf,
    /// Its name.
    pub image: String,
    /// What the runtime knows of it.
    pub state: ImageState,
}

/// What the container runtime knows of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageState {
    /// It is on the node, and kubelet does not delete it.
    Pinned,
    /// It is on the node, and kubelet may delete it; the text names the observation.
    Unpinned(String),
    /// It is not on the node.
    Missing,
    /// The runtime was not asked or did not answer; the text is the reason.
    Unknown(String),
}

/// Runs `crictl` and `ctr`; tests have one of their own.
pub trait RuntimeTools {
    /// The output of a program.
    ///
    /// # Errors
    /// Why there is none.
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, ToolError>;
}

/// Why a program has no output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolError {
    /// It is not installed.
    Missing,
    /// It failed with this text.
    Failed(String),
}

/// The programs in `PATH`.
#[derive(Debug, Clone, Copy)]
pub struct InstalledTools;

impl RuntimeTools for InstalledTools {
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, ToolError> {
        let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
        let output = output.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => ToolError::Missing,
            _ => ToolError::Failed(error.to_string()),
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        // Both print warnings of their configuration first, and the error last.
        let last = text.trim().lines().last().map(ToOwned::to_owned);
        Err(ToolError::Failed(last.unwrap_or_else(|| output.status.to_string())))
    }
}

/// The images of the static pods of jackstay in a directory, unless a pull replaces a missing one.
pub fn check(directory: &Path, tools: &impl RuntimeTools) -> Vec<PodImage> {
    let mut manifests: Vec<PathBuf> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    manifests.sort();
    let images = manifests.into_iter().filter_map(|manifest| {
        let image = unpulled_image(&fs::read_to_string(&manifest).ok()?)?;
        let state = state(&image, tools);
        Some(PodImage { manifest, image, state })
    });
    images.collect()
}

/// The image of a manifest of jackstay that kubelet does not pull.
fn unpulled_image(manifest: &str) -> Option<String> {
    let pod: Value = serde_saphyr::from_str(manifest).ok()?;
    let containers = pod["spec"]["containers"].as_array()?;
    let own = |container: &&Value| {
        container["imagePullPolicy"] == "Never"
            && container["image"].as_str().is_some_and(|image| base_name(image) == "jackstay")
    };
    Some(containers.iter().find(own)?["image"].as_str()?.to_owned())
}

/// The last part of the name of an image, without tag and digest.
fn base_name(image: &str) -> &str {
    let name = image.split('@').next().unwrap_or(image);
    let last = name.rsplit('/').next().unwrap_or(name);
    last.split(':').next().unwrap_or(last)
}

/// Has the container runtime keep an image. kubelet can still delete it if the runtime does not heed the label.
///
/// # Errors
/// Why kubelet may delete it, and what to do.
pub fn pin(image: &str, tools: &impl RuntimeTools) -> Result<(), String> {
    let labelled = tools.run("ctr", &["-n", "k8s.io", "images", "label", image, PINNED_LABEL]);
    let why = match (state(image, tools), labelled) {
        (ImageState::Pinned, _) => return Ok(()),
        (ImageState::Unpinned(why), Ok(_)) => why,
        (_, Err(error)) => format!("ctr: {}", text(error)),
        (_, Ok(_)) => return Ok(()),
    };
    Err(format!(
        "the image {image} could not be pinned ({why}): kubelet deletes it when the disk is full and no container uses it \
         (deploy/README.md#image)"
    ))
}

/// What the runtime knows of an image: by `crictl`, which asks as kubelet does; else by `ctr`, which is containerd's.
pub fn state(image: &str, tools: &impl RuntimeTools) -> ImageState {
    match by_crictl(image, tools) {
        Ok(state) => state,
        Err(crictl) => by_ctr(image, tools).unwrap_or_else(|ctr| {
            ImageState::Unknown(format!("crictl: {}; ctr: {}", text(crictl), text(ctr)))
        }),
    }
}

fn text(error: ToolError) -> String {
    match error {
        ToolError::Missing => "not installed".to_owned(),
        ToolError::Failed(why) => why,
    }
}

fn by_crictl(image: &str, tools: &impl RuntimeTools) -> Result<ImageState, ToolError> {
    // `inspecti` of a missing image is an error; the list is not.
    let output = tools.run("crictl", &["images", "-o", "json", image])?;
    let list: Value =
        serde_json::from_str(&output).map_err(|error| ToolError::Failed(error.to_string()))?;
    Ok(match list["images"].as_array().and_then(|images| images.first()) {
        None => ImageState::Missing,
        Some(found) if found["pinned"] == true => ImageState::Pinned,
        Some(_) => ImageState::Unpinned("the runtime does not report it as pinned".to_owned()),
    })
}

fn by_ctr(image: &str, tools: &impl RuntimeTools) -> Result<ImageState, ToolError> {
    let listed = |filter: &str| {
        let output = tools.run("ctr", &["-n", "k8s.io", "images", "ls", "-q", filter])?;
        Ok::<_, ToolError>(output.lines().any(|line| line == image))
    };
    let name = format!("name=={image}");
    if !listed(&name)? {
        return Ok(ImageState::Missing);
    }
    if !listed(&format!("{name},labels.\"io.cri-containerd.pinned\"==pinned"))? {
        return Ok(ImageState::Unpinned(format!("containerd has no label {PINNED_LABEL} for it")));
    }
    let version = server_version(&tools.run("ctr", &["version"])?);
    Ok(match version {
        Some(version) if !honours_label(&version) => ImageState::Unpinned(format!(
            "it has the label {PINNED_LABEL}, which containerd {version} ignores: versions from 1.6.25, 1.7.10 and 2.0 \
             on heed it"
        )),
        _ => ImageState::Pinned,
    })
}

/// The version of the server in the output of `ctr version`.
fn server_version(output: &str) -> Option<String> {
    let (_, server) = output.split_once("Server:")?;
    let line = server.lines().find_map(|line| line.trim().strip_prefix("Version:"))?;
    Some(line.trim().trim_start_matches('v').to_owned())
}

/// Whether this containerd reports images with the label as pinned. An unknown version does.
fn honours_label(version: &str) -> bool {
    let number = |part: &str| {
        let digits = part.chars().take_while(char::is_ascii_digit).collect::<String>();
        digits.parse::<u32>().ok()
    };
    let numbers: Vec<u32> = version.splitn(3, '.').map_while(number).collect();
    match numbers[..] {
        [1, minor, patch] => {
            (minor == 6 && patch >= 25) || (minor == 7 && patch >= 10) || minor > 7
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tools(Vec<(&'static str, Result<&'static str, ToolError>)>);

    impl RuntimeTools for Tools {
        fn run(&self, program: &str, arguments: &[&str]) -> Result<String, ToolError> {
            let command = [&[program], arguments].concat().join(" ");
            let found = self.0.iter().find(|(prefix, _)| command.starts_with(prefix));
            found.map_or(Err(ToolError::Missing), |(_, result)| {
                result.clone().map(ToOwned::to_owned)
            })
        }
    }

    const IMAGE: &str = "localhost/jackstay:1";
    const NAME: &str = "ctr -n k8s.io images ls -q name==localhost/jackstay:1";
    const LABEL: &str = "ctr -n k8s.io images ls -q name==localhost/jackstay:1,labels.\"io.cri-containerd.pinned\"==pinned";

    fn version(text: &'static str) -> (&'static str, Result<&'static str, ToolError>) {
        ("ctr version", Ok(text))
    }

    #[test]
    fn state_is_that_of_crictl_or_else_of_ctr() {
        let unpinned = |why: &str| ImageState::Unpinned(why.to_owned());
        let crictl =
            |output| Tools(vec![("crictl images -o json localhost/jackstay:1", Ok(output))]);
        let found = "localhost/jackstay:1\n";
        let ctr =
            |label, server| Tools(vec![(LABEL, Ok(label)), (NAME, Ok(found)), version(server)]);
        for (tools, expected) in [
            (crictl(r#"{"images": []}"#), ImageState::Missing),
            (crictl(r#"{"images": [{"id": "a", "pinned": true}]}"#), ImageState::Pinned),
            (
                crictl(r#"{"images": [{"id": "a", "pinned": false}]}"#),
                unpinned("the runtime does not report it as pinned"),
            ),
            (Tools(vec![(NAME, Ok(""))]), ImageState::Missing),
            (
                ctr("", ""),
                unpinned("containerd has no label io.cri-containerd.pinned=pinned for it"),
            ),
            (
                ctr(found, "Client:\n  Version:  1\nServer:\n  Version:  v1.7.24\n"),
                ImageState::Pinned,
            ),
            (
                Tools(vec![("crictl", Err(ToolError::Failed("no socket".to_owned())))]),
                ImageState::Unknown("crictl: no socket; ctr: not installed".to_owned()),
            ),
        ] {
            assert_eq!(state(IMAGE, &tools), expected);
        }
        let old = "Client:\n  Version:  2.0.0\n\nServer:\n  Version:  1.6.20~ds1\n";
        let ImageState::Unpinned(why) = state(IMAGE, &ctr(found, old)) else { panic!() };
        assert!(why.contains("containerd 1.6.20~ds1 ignores"), "{why}");
    }

    #[test]
    fn pin_labels_the_image_and_says_if_it_is_not_kept() {
        const PIN: &str =
            "ctr -n k8s.io images label localhost/jackstay:1 io.cri-containerd.pinned=pinned";
        let crictl = |pinned| ("crictl", Ok(pinned));
        let (yes, no) = (r#"{"images": [{"pinned": true}]}"#, r#"{"images": [{"pinned": false}]}"#);
        assert_eq!(pin(IMAGE, &Tools(vec![crictl(yes), (PIN, Ok(""))])), Ok(()));
        // CRI-O with the image in its configuration.
        assert_eq!(pin(IMAGE, &Tools(vec![crictl(yes)])), Ok(()));
        for (tools, reason) in [
            (vec![crictl(no), (PIN, Ok(""))], "does not report it as pinned"),
            (vec![crictl(no)], "ctr: not installed"),
            (vec![(PIN, Err(ToolError::Failed("denied".into())))], "ctr: denied"),
        ] {
            let why = pin(IMAGE, &Tools(tools)).unwrap_err();
            assert!(why.contains(reason) && why.contains("could not be pinned"), "{why}");
        }
    }

    #[test]
    fn honours_label_is_from_the_first_release_that_reports_it_on() {
        for (version, expected) in [
            ("1.5.11", false),
            ("1.6.24", false),
            ("1.6.25", true),
            ("1.7.0", false),
            ("1.7.9-k3s1", false),
            ("1.7.10", true),
            ("2.0.0", true),
            ("unknown", true),
        ] {
            assert_eq!(honours_label(version), expected, "{version}");
        }
    }

    #[test]
    fn check_reads_the_image_that_is_not_pulled() {
        let dir = tempfile::tempdir().unwrap();
        let pod = include_str!("../../../../deploy/static-pod/jackstay.yaml");
        let pulled = pod.replace("imagePullPolicy: Never", "imagePullPolicy: IfNotPresent");
        for (name, text) in [
            ("a.yaml", "not: a pod"),
            ("jackstay.yaml", pod),
            ("k.yaml", "{"),
            ("pulled.yaml", &pulled),
            ("z.yaml", &pod.replace("localhost/jackstay", "localhost/haproxy")),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let found = check(dir.path(), &Tools(Vec::new()));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].manifest, dir.path().join("jackstay.yaml"));
        assert!(found[0].image.starts_with("localhost/jackstay:"));
        let why = "crictl: not installed; ctr: not installed".to_owned();
        assert_eq!(found[0].state, ImageState::Unknown(why));
        assert!(check(Path::new("/nonexistent"), &Tools(Vec::new())).is_empty());
    }
}
