"""kubelet's garbage collection of images, for the image of the static pod: kubelet does not pull it again.

Promise: a pinned image stays; `jackstay doctor` reports one that does not, and one that is gone.
"""

import json
import re
import unittest
from pathlib import Path

from cases import RigCase, long_form
from deployed import DEPLOY, dist_file, stop_everything
from kubernetes import CONTAINERD_SOCKET
from rig import RealNode, log, sh, wait_for

PIN = "io.cri-containerd.pinned=pinned"
# The period of the collection in kubelet (`ImageGCPeriod`) is 5 min. The first one may come before the size of the disk is known.
COLLECTED = 400


class CollectingNode(RealNode):
    """A node whose kubelet deletes each image that no container uses."""

    NAME = "collecting-1"

    def __init__(self, rig, apiserver):
        # kubelet must know the size of the file system, which cAdvisor does not find for one that is mounted twice.
        (rig.dir / "node").mkdir()
        sh("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", rig.dir / "node")
        super().__init__(rig, apiserver)

    def kubelet_config(self):
        return {**super().kubelet_config(), "imageGCHighThresholdPercent": 1, "imageGCLowThresholdPercent": 0, "imageMinimumGCAge": "1ns",
                "localStorageCapacityIsolation": True}  # else cAdvisor measures no file system


def heeds_label(version):
    """Whether this containerd reports images with the label as pinned (containerd#9381, #9382)."""
    numbers = tuple(map(int, re.match(r"(\d+)\.(\d+)\.(\d+)", version).groups()))
    return (1, 6, 25) <= numbers < (1, 7) or numbers >= (1, 7, 10)


class ImageCollection(RigCase, unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        stop_everything(cls.rig)

    @long_form("kubelet collects images every 5 min")
    def test_image_without_a_pin_is_deleted_and_doctor_says_it(self):
        stop_everything(self.rig)
        node = self.rig.node = CollectingNode(self.rig, self.rig.server("a"))
        pod = (DEPLOY / "static-pod/jackstay.yaml").read_text()
        image = re.search(r"image: (\S+)", pod)[1]
        pinned = image.rpartition(":")[0] + ":pinned"
        node.create_cgroups()
        node.containerd.start()
        wait_for("containerd", lambda: node.ctr("version"), 20)
        node.ctr("images", "import", dist_file("jackstay-image.tar"))
        # Another content: kubelet counts and deletes images by their content.
        sh(DEPLOY / "image", "/bin/true", node.dir / "pinned.tar", env={"JACKSTAY_VERSION": "pinned", "PATH": "/usr/bin:/bin"})
        node.ctr("images", "import", node.dir / "pinned.tar")
        node.ctr("images", "label", pinned, PIN)
        version = re.search(r"Server:\s+Version:\s+v?(\S+)", node.ctr("version").stdout)[1]

        def names():
            return node.ctr("images", "ls", "-q").stdout.split()

        def causes():
            # The pod is not started: the manifest is where doctor looks, and not in kubelet's directory.
            manifest = Path("/etc/kubernetes/manifests/jackstay.yaml")
            manifest.parent.mkdir(parents=True, exist_ok=True)
            manifest.write_text(pod)
            self.addCleanup(manifest.unlink, missing_ok=True)
            done = sh(dist_file("jackstay"), "doctor", "--endpoint", self.rig.server("a"), "--duration", "1s", "-o", "json",
                      check=False, env={"CONTAINERD_ADDRESS": CONTAINERD_SOCKET, "PATH": "/usr/bin:/bin"})
            manifest.unlink()
            return [finding["cause"] for finding in json.loads(done.stdout)["findings"]]
        self.assertIn("image_unpinned", causes())
        node.kubelet.start()
        wait_for(f"the collection of {image}", lambda: image not in names(), COLLECTED)
        log(f"containerd {version}: kubelet has deleted {image}; left: {names()}")
        self.assertIn("image_missing", causes())
        self.assertEqual(pinned in names(), heeds_label(version), "the pinned image")
