"""Container images: built by buildah, from what this machine has; and run by runc.

No registry is asked. A base image is a root file system of this machine's files: the Python that
runs the tests, a shell, and the libraries that both need.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from environment.programs import BUILDAH, RUNC, Program

from support import sites
from support.sites import INFO, OVERLAY, VERSION

PYTHON = Path(os.path.realpath(sys.executable))
#: What stands in for vLLM's command, whose imports are gigabytes: it says how it was started.
SERVE = """\
def main():
    import json, os, sys
    from vllm.v1.readiness.version import __version__
    print(json.dumps([sys.argv[1:], os.getuid(), os.getgid(), __version__]))
"""
STAND_INS = {"vllm/__init__.py": "", "vllm/entrypoints/cli/main.py": SERVE}
#: Of Python's library, what nothing here imports.
_LEFT_OUT = ("test", "idlelib", "tkinter", "_tkinter*", "lib2to3", "config-*", "*-packages")
_ACCEPT_ALL = {"default": [{"type": "insecureAcceptAnything"}]}
_NUMBERS = itertools.count()


def refused() -> str | None:
    """The reason why containers cannot be run here, or None."""
    if os.geteuid() != 0:
        return "only root can run containers"
    done = subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip() or None


def wheel(folder: Path) -> Path:
    """A wheel of the real vLLM, cut down to the files that the tool reads, and the stand-ins."""
    site = sites.small(folder / "unpacked")
    for name in ("INSTALLER", "REQUESTED"):
        (site / INFO / name).unlink(missing_ok=True)
    for path, text in STAND_INS.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    sites.shorten_record(site)
    archive = Path(shutil.make_archive(str(folder / "wheel"), "zip", site))
    return archive.rename(folder / f"{INFO.removesuffix('.dist-info')}-py3-none-any.whl")


def root_file_system(root: Path, wheels: Path) -> Path:
    """Make a root file system with a Python that has pip, as ``python:3.12`` has.

    Args:
        root: the directory to make.
        wheels: a directory in place of the package index.

    Returns:
        The tar of it.
    """
    for name in ("bin", "dev", "etc", "lib", "proc", "sys", "usr/local/bin", "usr/local/lib"):
        (root / name).mkdir(parents=True)
    (root / "tmp").mkdir(mode=0o700)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    index = "[install]\nno-index = true\nno-deps = true\nfind-links = /wheels\n"
    (root / "etc" / "pip.conf").write_text(index)
    shutil.copytree(wheels, root / "wheels")
    shutil.copy(os.path.realpath("/bin/sh"), root / "bin" / "sh")
    shutil.copy(PYTHON, root / "usr" / "local" / "bin" / "python3")
    library = root / "usr" / "local" / "lib" / VERSION
    ignored = shutil.ignore_patterns("__pycache__", *_LEFT_OUT)
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=ignored)
    packages = _packages(root)
    packages.mkdir(parents=True, exist_ok=True)
    ours = Path(sysconfig.get_path("purelib"))
    for folder in (ours / "pip", next(ours.glob("pip-*.dist-info"))):
        shutil.copytree(folder, packages / folder.name)
    _copy_libraries(root, [root / "bin" / "sh", PYTHON, *library.glob("lib-dynload/*.so")])
    if shutil.which("strip"):  # Half of the bytes, which are copied for each layer.
        binaries = [file for file in root.rglob("*.so*") if file.is_file()]
        subprocess.run(["strip", "--strip-unneeded", *binaries], check=True)
    tar = root.with_suffix(".tar")
    with tarfile.open(tar, "w") as archive:
        archive.add(root, ".", filter=_owned_by_root)
    return tar


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member


def _packages(root: Path) -> Path:
    """Where the root file system's Python has its packages."""
    ask = "import site, sys; print(site.getsitepackages(['/usr/local'])[0])"
    found = subprocess.check_output([PYTHON, "-c", ask], text=True).strip()
    return root / found.lstrip("/")


def _copy_libraries(root: Path, binaries: Iterable[Path]) -> None:
    # vLLM adds to LD_PRELOAD in each process that configures an engine, such as another test's.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    listed = subprocess.run(
        ["ldd", *binaries], capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()
    for line in listed:
        if found := re.match(r"\s*(\S+) => (/\S+)", line):  # A directory that is always searched.
            shutil.copy(found[2], root / "lib" / found[1])
        elif loader := re.match(r"\s*(/\S+) \(", line):
            place = root / loader[1].lstrip("/")
            place.parent.mkdir(exist_ok=True)
            shutil.copy(loader[1], place)


class Images:
    """Images of one storage, which begins empty.

    Args:
        folder: where the storage is made.
        shared: a storage whose images it sees, too.
    """

    def __init__(self, folder: Path, shared: "Images | None" = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._policy = folder / "policy.json"
        self._policy.write_text(json.dumps(_ACCEPT_ALL))
        self._mounted: dict[str, Path] = {}
        self._options = ["--storage-driver", "vfs"]
        if shared:
            self._options += ["--storage-opt", f"vfs.imagestore={shared.storage}"]

    @property
    def storage(self) -> Path:
        """The directory that holds the images."""
        return self._folder / "storage"

    def build(self, name: str, dockerfile: str, context: Path, *options: str) -> None:
        """Build an image as ``docker build`` does, each instruction a layer."""
        file = self._folder / f"{name}.dockerfile"
        file.write_text(dockerfile)
        chosen = ["--isolation", "chroot", "--layers", "--pull-never", "--quiet", *options]
        tag = ["--tag", f"localhost/{name}", "--file", str(file)]
        self._buildah("build", *self._trusted, *chosen, *tag, str(context))

    def layers(self, name: str) -> list[list[tarfile.TarInfo]]:
        """The members of each layer of an image, the lowest first."""
        folder = self._folder / f"{name}.oci"
        image = f"localhost/{name}"
        self._buildah("push", *self._trusted, "--quiet", image, f"oci:{folder}:{name}")
        (manifest,) = json.loads((folder / "index.json").read_text())["manifests"]
        members = []
        for layer in json.loads(_blob(folder, manifest).read_text())["layers"]:
            with tarfile.open(_blob(folder, layer)) as archive:
                members.append(archive.getmembers())
        return members

    @cache  # noqa: B019
    def configuration(self, name: str) -> Any:
        """What the image says of how it is run, and the digests of its layers."""
        image = f"localhost/{name}"
        return json.loads(self._buildah("inspect", "--type", "image", image))["OCIv1"]

    def root(self, name: str) -> Path:
        """The root file system of a container of an image."""
        if name not in self._mounted:
            container = self._buildah("from", *self._trusted, f"localhost/{name}").strip()
            self._mounted[name] = Path(self._buildah("mount", container).strip())
        return self._mounted[name]

    def run(
        self,
        name: str,
        *arguments: str,
        user: str | None = None,
        read_only: bool = False,
        entrypoint: list[str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a container as a kubelet does: without capabilities, and without new privileges.

        Args:
            name: the image.
            arguments: in place of the image's CMD.
            user: ``uid:gid``, in place of the image's USER.
            read_only: whether the root file system is, and there is nothing else to write to.
            entrypoint: in place of the image's ENTRYPOINT.
        """
        image = self.configuration(name)["config"]
        uid, _, gid = (user or image.get("User") or "0:0").partition(":")
        command = [*(image.get("Entrypoint", []) if entrypoint is None else entrypoint), *arguments]
        identity = f"readiness-{os.getpid()}-{next(_NUMBERS)}"
        bundle = self._folder / identity
        bundle.mkdir()
        specification = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": int(uid), "gid": int(gid or 0)},
                "args": command,
                "env": image["Env"],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": str(self.root(name)), "readonly": read_only},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {
                    "destination": "/dev",
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": ["mode=755"],
                },
            ],
            "linux": {
                "namespaces": [{"type": t} for t in ("pid", "mount", "ipc", "uts", "network")]
            },
        }
        (bundle / "config.json").write_text(json.dumps(specification))
        state = str(self._folder / "runc")
        return subprocess.run(
            [_program(RUNC), "--root", state, "run", "--bundle", str(bundle), identity],
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def _trusted(self) -> list[str]:
        return ["--signature-policy", str(self._policy)]

    def _buildah(self, command: str, *arguments: str) -> str:
        storage = ["--root", str(self.storage), "--runroot", str(self._folder / "run")]
        done = subprocess.run(
            [_program(BUILDAH), *storage, *self._options, command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": str(self._folder)},
        )
        if done.returncode:
            pytest.fail(f"buildah {command}: {done.stdout}{done.stderr}")
        return done.stdout


@cache
def _program(program: Program) -> str:
    return program.ensure()


def _blob(folder: Path, descriptor: Mapping[str, str]) -> Path:
    return folder / "blobs" / "sha256" / descriptor["digest"].partition(":")[2]


def overlay_files() -> list[str]:
    """The paths in site-packages that ``apply`` writes, as VERSION_PIN says; without RECORD."""
    sources = [*OVERLAY.targets, *OVERLAY.added]
    compiled = []
    for path in sources:
        folder, _, module = path.rpartition("/")
        if module.endswith(".py"):
            tag = sys.implementation.cache_tag
            compiled.append(f"{folder}/__pycache__/{module[:-3]}.{tag}.pyc")
    return [*sources, *compiled]
