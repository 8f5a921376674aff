//! Renders the service of jackstay: systemd units or a static pod, from the files in `deploy/`.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use jackstay_sys::files::PUBLIC;

use super::journal::UnitRecord;
use crate::kubeconfig::setup::{OutputFile, SetupMode};

/// The directory of units that an administrator writes (systemd.unit(5)).
pub const UNITS: &str = "/etc/systemd/system";
/// The unit of jackstay.
pub const UNIT: &str = "jackstay.service";
/// The timer that renews the serving certificate.
pub const RENEWAL_TIMER: &str = "jackstay-renew.timer";
/// The unit that the timer starts.
pub const RENEWAL_UNIT: &str = "jackstay-renew.service";
/// The unit that undoes an interrupted installation at boot.
pub const RECOVERY_UNIT: &str = "jackstay-recovery.service";
/// Its file.
pub const RECOVERY_UNIT_FILE: &str = "/etc/systemd/system/jackstay-recovery.service";
/// The unit that undoes the installation when the installing process ends early.
pub const GUARD_UNIT: &str = "jackstay-install-guard.service";
/// Its file, which is gone after a reboot.
pub const GUARD_UNIT_FILE: &str = "/run/systemd/system/jackstay-install-guard.service";
/// Tells needrestart that a process that drains needs no restart.
pub const NEEDRESTART_FILE: &str = "/etc/needrestart/conf.d/jackstay.conf";
/// The path of the binary if the running one is at a path that may vanish.
pub const PROGRAM: &str = "/usr/local/bin/jackstay";
/// The configuration that unit and static pod read.
pub const CONFIG: &str = "/etc/jackstay/jackstay.yaml";
/// The state of jackstay in both forms.
pub const STATE: &str = "/var/lib/jackstay";

const JACKSTAY_SERVICE: &str = include_str!("../../../../deploy/systemd/jackstay.service");
const RENEW_SERVICE: &str = include_str!("../../../../deploy/systemd/jackstay-renew.service");
const RENEW_TIMER: &str = include_str!("../../../../deploy/systemd/jackstay-renew.timer");
const NEEDRESTART: &str = include_str!("../../../../deploy/systemd/needrestart.conf");
const STATIC_POD: &str = include_str!("../../../../deploy/static-pod/jackstay.yaml");

/// How jackstay runs on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServiceForm {
    /// A systemd unit.
    Unit,
    /// A static pod of kubelet.
    StaticPod,
}

/// What the service consists of.
#[derive(Debug)]
pub struct ServiceRequest<'a> {
    /// Unit or static pod.
    pub form: ServiceForm,
    /// The mode of the listener. `Terminate` has a certificate to renew.
    pub mode: SetupMode,
    /// The binary on the host.
    pub program: &'a Path,
    /// The kubeconfig of kubelet, which contains the local CA.
    pub kubeconfig: &'a Path,
    /// The unit of kubelet.
    pub kubelet_unit: &'a str,
    /// The directory of static pods.
    pub static_pods: &'a Path,
    /// The image of the static pod.
    pub image: &'a str,
    /// Whether these units exist already, from a package: that of jackstay, and that of the renewal.
    pub existing_units: (bool, bool),
    /// The names of those of its units that are enabled already.
    pub enabled_units: &'a [String],
}

/// The files of the service, and the units to enable and start.
#[derive(Debug)]
pub struct Service {
    /// In the order in which they are written.
    pub files: Vec<OutputFile>,
    /// In the order in which they are started.
    pub units: Vec<UnitRecord>,
}

/// Renders the service.
pub fn service(request: &ServiceRequest<'_>) -> Service {
    let mut service = Service { files: Vec::new(), units: Vec::new() };
    let mut add = |path: PathBuf, text: String, description| {
        service.files.push(OutputFile {
            path,
            bytes: text.into_bytes(),
            mode: PUBLIC,
            description,
        });
    };
    let record = |name: &str| UnitRecord {
        name: name.to_owned(),
        was_enabled: request.enabled_units.iter().any(|enabled| enabled == name),
    };
    let unit_file = |name: &str| Path::new(UNITS).join(name);
    let (has_unit, has_renewal) = request.existing_units;
    if request.mode == SetupMode::Terminate {
        if !has_renewal {
            add(
                unit_file(RENEWAL_UNIT),
                unit(RENEW_SERVICE, request.program),
                "renews the certificate",
            );
            let timer = unit(RENEW_TIMER, request.program);
            add(unit_file(RENEWAL_TIMER), timer, "starts the renewal each day");
        }
        // The last drop-in in the order of names, so that no other one replaces its settings.
        let path = unit_file("jackstay-renew.service.d").join("zz-jackstay-install.conf");
        add(path, renewal_drop_in(request), "the kubeconfig to renew, and the unit of kubelet");
    }
    match request.form {
        ServiceForm::Unit => {
            if !has_unit {
                let text = unit(JACKSTAY_SERVICE, request.program);
                add(unit_file(UNIT), text, "the unit of jackstay");
                let text = NEEDRESTART.to_owned();
                add(NEEDRESTART_FILE.into(), text, "has needrestart leave jackstay alone");
            }
            service.units.push(record(UNIT));
        }
        ServiceForm::StaticPod => {
            let path = request.static_pods.join("jackstay.yaml");
            add(path, static_pod(request.image), "the static pod of jackstay");
        }
    }
    if request.mode == SetupMode::Terminate {
        service.units.push(record(RENEWAL_TIMER));
    }
    service
}

/// A unit of `deploy/systemd` for this binary, without the comment that describes the manual installation.
fn unit(text: &str, program: &Path) -> String {
    let body = text.find("\n[Unit]").map_or(text, |at| &text[at + 1..]);
    let program = program.display().to_string();
    format!("# Written by `jackstay install`.\n{}", body.replace(PROGRAM, &program))
}

/// Has the renewal change kubelet's kubeconfig, and restart kubelet's unit. Whether it may do that stays in
/// `JACKSTAY_RESTART` of the unit, which an operator changes. `CAP_DAC_OVERRIDE`: the directory of the kubeconfig may
/// have another owner, as with kubespray.
fn renewal_drop_in(request: &ServiceRequest<'_>) -> String {
    let word = |path: &Path| {
        let text = path.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
        format!("\"{}\"", text.replace('%', "%%").replace('$', "$$"))
    };
    let (program, kubeconfig) = (word(request.program), word(request.kubeconfig));
    let kubelet = request.kubelet_unit.replace('%', "%%").replace('$', "$$");
    format!(
        "# Written by `jackstay install`.\n\
         [Service]\n\
         CapabilityBoundingSet=CAP_DAC_OVERRIDE\n\
         ExecStart=\n\
         ExecStart={program} kubeconfig --renew --kubeconfig {kubeconfig} --config-out {CONFIG} --reader {kubelet} \
         $JACKSTAY_RESTART\n"
    )
}

/// The static pod for L7 with this image. It has the mounts that L4 needs, too.
fn static_pod(image: &str) -> String {
    let body = STATIC_POD.find("\napiVersion:").map_or(STATIC_POD, |at| &STATIC_POD[at + 1..]);
    let lines = body.lines().map(|line| match line.split_once("image: ") {
        Some((indent, _)) if indent.trim().is_empty() => format!("{indent}image: {image}"),
        _ => line.to_owned(),
    });
    let lines: Vec<String> =
        ["# Written by `jackstay install`.".to_owned()].into_iter().chain(lines).collect();
    lines.join("\n") + "\n"
}

/// The unit that undoes an interrupted installation at boot, before kubelet starts.
pub fn recovery_unit(program: &Path, kubelet_unit: &str) -> OutputFile {
    let program = program.display();
    let text = format!(
        "# Written by `jackstay install`, which removes it when it ends.\n\
         [Unit]\n\
         Description=Undo of an interrupted `jackstay install`\n\
         Before={UNIT} {kubelet_unit}\n\
         ConditionPathExists={}/journal.json\n\n\
         [Service]\n\
         Type=oneshot\n\
         ExecStart={program} install --recover\n\n\
         [Install]\n\
         WantedBy=multi-user.target\n",
        super::journal::DIRECTORY
    );
    OutputFile {
        path: RECOVERY_UNIT_FILE.into(),
        bytes: text.into_bytes(),
        mode: PUBLIC,
        description: "undoes an interrupted installation at boot; removed at the end",
    }
}

/// The unit that waits until the installing process ends. It has no order relative to kubelet: a restart of kubelet
/// would wait for it.
pub fn guard_unit(program: &Path) -> OutputFile {
    let program = program.display();
    let text = format!(
        "[Unit]\n\
         Description=Undo of `jackstay install` if its process ends early\n\n\
         [Service]\n\
         Type=exec\n\
         ExecStart={program} install --recover\n"
    );
    OutputFile {
        path: GUARD_UNIT_FILE.into(),
        bytes: text.into_bytes(),
        mode: PUBLIC,
        description: "undoes the installation if this process ends early; removed at the end",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(form: ServiceForm, mode: SetupMode) -> ServiceRequest<'static> {
        ServiceRequest {
            form,
            mode,
            program: Path::new("/usr/bin/jackstay"),
            kubeconfig: Path::new("/etc/kubernetes/kubelet.conf"),
            kubelet_unit: "kubelet.service",
            static_pods: Path::new("/etc/kubernetes/manifests"),
            image: "registry.example.com/jackstay:1.2.3",
            existing_units: (false, false),
            enabled_units: &[],
        }
    }

    fn units(service: &Service) -> Vec<(&str, bool)> {
        service.units.iter().map(|unit| (unit.name.as_str(), unit.was_enabled)).collect()
    }

    fn names(service: &Service) -> Vec<&str> {
        service.files.iter().map(|file| file.path.to_str().unwrap()).collect()
    }

    #[test]
    fn service_has_units_for_the_mode_and_keeps_those_of_a_package() {
        let unit = service(&request(ServiceForm::Unit, SetupMode::Terminate));
        assert_eq!(
            names(&unit),
            [
                "/etc/systemd/system/jackstay-renew.service",
                "/etc/systemd/system/jackstay-renew.timer",
                "/etc/systemd/system/jackstay-renew.service.d/zz-jackstay-install.conf",
                "/etc/systemd/system/jackstay.service",
                "/etc/needrestart/conf.d/jackstay.conf",
            ]
        );
        assert_eq!(units(&unit), [("jackstay.service", false), ("jackstay-renew.timer", false)]);
        let text = String::from_utf8(unit.files[3].bytes.clone()).unwrap();
        assert!(
            text.contains(
                "\nExecStart=/usr/bin/jackstay run --config /etc/jackstay/jackstay.yaml\n"
            )
        );
        assert!(!text.contains("/usr/local/bin"), "{text}");

        let mut packaged = request(ServiceForm::Unit, SetupMode::Terminate);
        packaged.existing_units = (true, true);
        let enabled = ["jackstay.service".to_owned()];
        packaged.enabled_units = &enabled;
        let packaged = service(&packaged);
        assert_eq!(
            names(&packaged),
            ["/etc/systemd/system/jackstay-renew.service.d/zz-jackstay-install.conf"]
        );
        assert_eq!(units(&packaged), [("jackstay.service", true), ("jackstay-renew.timer", false)]);

        let l4 = service(&request(ServiceForm::Unit, SetupMode::Passthrough));
        assert_eq!(names(&l4), ["/etc/systemd/system/jackstay.service", NEEDRESTART_FILE]);
        assert_eq!(units(&l4), [("jackstay.service", false)]);
    }

    /// The drop-in is the last one by name, so what an operator may change must not be in it.
    #[test]
    fn service_renewal_restarts_kubelet_unless_the_operator_turns_it_off() {
        let service = service(&request(ServiceForm::Unit, SetupMode::Terminate));
        let text = |index: usize| String::from_utf8(service.files[index].bytes.clone()).unwrap();
        let (unit, drop_in) = (text(0), text(2));
        assert!(unit.contains("\nEnvironment=JACKSTAY_RESTART=--restart-readers\n"), "{unit}");
        assert!(!drop_in.contains("Environment="), "{drop_in}");
        let command = "ExecStart=\"/usr/bin/jackstay\" kubeconfig --renew --kubeconfig \"/etc/kubernetes/kubelet.conf\" \
                       --config-out /etc/jackstay/jackstay.yaml --reader kubelet.service $JACKSTAY_RESTART\n";
        assert!(drop_in.ends_with(command), "{drop_in}");
    }

    #[test]
    fn service_static_pod_has_the_given_image() {
        let pod = service(&request(ServiceForm::StaticPod, SetupMode::Passthrough));
        assert_eq!(names(&pod), ["/etc/kubernetes/manifests/jackstay.yaml"]);
        assert!(pod.units.is_empty());
        let text = String::from_utf8(pod.files[0].bytes.clone()).unwrap();
        let images: Vec<&str> = text.lines().filter(|line| line.contains(" image:")).collect();
        assert_eq!(images, ["      image: registry.example.com/jackstay:1.2.3"]);
        let body = STATIC_POD.split_once("\napiVersion:").unwrap().1;
        assert_eq!(text.lines().count(), body.lines().count() + 1, "no other line changes");
    }
}
