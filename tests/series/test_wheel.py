"""The wheel: the same bytes each time, what installers read, and nothing of upstream's."""

import io
import os
import time
import zipfile
from email import message_from_bytes

import pytest
from installer.records import parse_record_file
from overlay.source import Overlay
from series.wheel import wheel
from support.sites import OVERLAY, REPO

SECONDS = 1_700_000_000
LABELLED = f"{OVERLAY.pin.overlay}+g0123456789ab"


@pytest.fixture(scope="module")
def archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(wheel(OVERLAY, LABELLED, SECONDS)[1]))


def test_the_bytes_depend_on_the_commit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name, data = wheel(OVERLAY, LABELLED, SECONDS)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    umask = os.umask(0o077)
    try:
        assert wheel(Overlay.load(REPO), LABELLED, SECONDS) == (name, data)
    finally:
        os.umask(umask)
        monkeypatch.undo()
        time.tzset()
    assert wheel(OVERLAY, LABELLED, 0)[1] != data
    assert name == f"readiness_overlay-{LABELLED}-py3-none-any.whl"


def test_its_times_and_modes_are_fixed(archive: zipfile.ZipFile) -> None:
    assert {entry.date_time for entry in archive.infolist()} == {time.gmtime(SECONDS)[:6]}
    assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o100644}


def test_record_lists_every_file(archive: zipfile.ZipFile) -> None:
    (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    rows = list(parse_record_file(archive.read(record).decode().splitlines()))
    assert sorted(path for path, _, _ in rows) == sorted(archive.namelist())
    assert {path for path, digest, _ in rows if not digest} == {record}


def test_it_needs_no_package(archive: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = message_from_bytes(archive.read(metadata))
    assert (fields["Name"], fields["Version"]) == ("readiness-overlay", LABELLED)
    assert fields.get_all("Requires-Dist") is None


def test_it_holds_the_overlay_and_nothing_of_upstream_s(archive: zipfile.ZipFile) -> None:
    package = "readiness_overlay/"
    names = {name.removeprefix(package) for name in archive.namelist() if name.startswith(package)}
    origins = {str(OVERLAY.origin_of(path).relative_to(REPO)) for path in OVERLAY.added}
    assert origins < names
    rest = {name for name in names - origins if not name.startswith("scripts/overlay/")}
    assert rest == {"__init__.py", "__main__.py", "VERSION"}
    assert not {f"vendor_overlay/{path}" for path in OVERLAY.targets} & names
