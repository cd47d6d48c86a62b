"""A pod of Kubernetes as a process of this machine with its own view of it: the user, the folders, the environment, the
names of hosts and the network that its manifest says, and a root that cannot be written. By bubblewrap, without images.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

Tree = Mapping[str, Any]


def missing_commands() -> list[str]:
    return [name for name in ("bwrap", "ip") if shutil.which(name) is None]


def _image() -> list[str]:
    """What this machine has, in the place of an image: a root of its own, in which folders can be mounted."""
    words: list[str] = []
    for path in (*Path("/").iterdir(), *Path("/etc").iterdir()):
        if path in (Path("/etc"), Path("/etc/hosts")) or path.name in ("dev", "proc", "tmp"):
            continue
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir() or path.is_file():
            words += ["--ro-bind", str(path), str(path)]
    return words


def _installation() -> list[str]:
    """This checkout and its Python, where they lie in the folder for temporary files, of which a pod has its own."""
    places = {Path(sys.prefix), Path(__file__).parents[2]}
    hidden = [str(path) for path in sorted(places) if path.is_relative_to("/tmp")]
    return [word for path in hidden for word in ("--ro-bind", path, path)]


class Sandbox:
    """The only container of a pod."""

    def __init__(
        self,
        pod: Tree,
        folder: Path,
        network: str,
        values: Mapping[tuple[str, str, str], str],
        addresses: Mapping[str, str],
    ) -> None:
        """Start it in the network namespace `network`. `values`: by kind, name and key what ConfigMaps and Secrets
        hold; `addresses`: those of hosts by their names."""
        spec = pod["spec"]
        (container,) = spec["containers"]
        user = spec["securityContext"]
        folder.mkdir()
        self.log = folder / "log"
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in addresses.items()))
        assert user["runAsNonRoot"] is True
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        told, says = os.pipe()
        words = ["ip", "netns", "exec", network, "bwrap", "--unshare-user", "--unshare-pid", "--unshare-uts"]
        words += ["--unshare-ipc", "--as-pid-1", "--die-with-parent", "--info-fd", str(says)]
        words += ["--uid", str(user["runAsUser"]), "--gid", str(user["runAsGroup"])]
        words += ["--hostname", pod["metadata"]["name"], *_image(), "--dev", "/dev", "--proc", "/proc"]
        words += [*self._mounts(spec, container, folder, values), *_installation()]
        words += ["--ro-bind", str(hosts), "/etc/hosts", "--clearenv"]
        words += ["--remount-ro", "/"] if container["securityContext"]["readOnlyRootFilesystem"] else []
        for name, value in self._environment(container, values).items():
            words += ["--setenv", name, value]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*words, "--", *container["command"]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(says,),
                cwd="/",
            )
        os.close(says)
        with os.fdopen(told) as answer:
            said = answer.read()
        assert said, self.log.read_text()
        self._first = psutil.Process(json.loads(said)["child-pid"])

    @staticmethod
    def _mounts(spec: Tree, container: Tree, folder: Path, values: Mapping[tuple[str, str, str], str]) -> list[str]:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        words: list[str] = []
        for mount in container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                words += ["--tmpfs", path]
                continue
            if "configMap" in volume:
                source = folder / mount["name"]
                source.mkdir()
                for (kind, name, key), value in values.items():
                    if (kind, name) == ("ConfigMap", volume["configMap"]["name"]):
                        (source / key).write_text(value)
            else:
                source = Path(volume["hostPath"]["path"])
            words += ["--ro-bind" if mount.get("readOnly") else "--bind", str(source), path]
        return words

    @staticmethod
    def _environment(container: Tree, values: Mapping[tuple[str, str, str], str]) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"]}
        for entry in container["env"]:
            wanted = entry.get("valueFrom", {}).get("secretKeyRef")
            found[entry["name"]] = values["Secret", wanted["name"], wanted["key"]] if wanted else entry["value"]
        return found

    def exit_code(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        with suppress(psutil.Error):
            self._first.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The first process of a process namespace takes all others with it."""
        with suppress(psutil.Error):
            self._first.kill()
        self._process.wait()
