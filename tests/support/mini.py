"""A synthetic overlay over a synthetic vLLM of two small modules.

Small enough for thousands of runs. Tests that use :mod:`support.sites` cover the real files.
"""

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from overlay import commands, pin
from overlay.commands import Options
from overlay.installation import locate
from overlay.patches import Series
from overlay.source import Overlay
from series import catalogue
from series.check import FIELDS
from series.checksums import expected_pin

from support.releases import row

PRISTINE = {"vllm/one.py": b"A = 1\nB = 2\nC = 3\n", "vllm/v1/two.py": b"def f():\n    return 1\n"}
OVERLAID = {
    "vllm/one.py": b"# changed\nA = 1\nC = 33\n",
    "vllm/v1/two.py": b"# changed\ndef f():\n    return 1\n\n\nG = f()",
}
OURS = {"vllm/v1/readiness/__init__.py": b'"""Ours."""\n', "vllm/v1/readiness/a.py": b"X = 1\n"}
#: With modules that another version does not have, one in a directory of its own.
MORE = {**OURS, "vllm/v1/readiness/old.py": b"", "vllm/v1/readiness/sub/x.py": b""}
#: The made release: no other file of these tests depends on its number.
RELEASE = "0.22.0"
INFO = f"vllm-{RELEASE}.dist-info"
METADATA = f"Metadata-Version: 2.4\nName: vllm\nVersion: {RELEASE}\n\ntext\n"
ALL_ONE: Mapping[str, str] = MappingProxyType({})
NOTHING: Mapping[str, bytes] = MappingProxyType({})
SEEDS = MappingProxyType({"vllm/one.py": "all", "vllm/v1/two.py": "seeds"})
HEADER = "".join(f"{name}: text\n" for name in FIELDS)


def unified(path: str, old: bytes, new: bytes) -> bytes:
    """A diff without context lines."""
    before, after = (data.decode().splitlines(keepends=True) for data in (old, new))
    text = ""
    for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=0):
        text += line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
    return text.encode()


def overlay(
    root: Path,
    pristine: Mapping[str, bytes] = PRISTINE,
    overlaid: Mapping[str, bytes] = OVERLAID,
    ours: Mapping[str, bytes] = OURS,
    version: str = "0.0.1",
    serves: Mapping[str, str] = ALL_ONE,
    release: str = RELEASE,
) -> Overlay:
    """Write an overlay into ``root`` and read it.

    Args:
        root: the directory.
        pristine: upstream's files.
        overlaid: the same files with all patches on.
        ours: the files that are added.
        version: the overlay's.
        serves: what the patch of each file serves; one patch of all files if empty.
        release: vLLM's.
    """
    patches = {
        f"{number:04}-{path.rpartition('/')[2]}.patch": HEADER.replace(
            "Serves: text", f"Serves: {word}"
        ).encode()
        + b"\n"
        + unified(path, pristine[path], overlaid[path])
        for number, (path, word) in enumerate(serves.items(), 1)
    } or {
        "0001-all.patch": HEADER.encode()
        + b"\n"
        + b"".join(unified(path, old, overlaid[path]) for path, old in pristine.items())
    }
    files = {
        "patches/series": "".join(f"{name}\n" for name in patches).encode(),
        **{f"patches/{name}": data for name, data in patches.items()},
        "vendor_overlay/vllm/v1/readiness/version.py": f'__version__ = "{version}"\n'.encode(),
        **{f"vendor_overlay/{path}": data for path, data in ours.items()},
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    empty = pin.Pin(release, version, {}, {}, {})
    expected = expected_pin(root, empty, Series.load(root / "patches"), pristine.__getitem__)
    (root / pin.NAME).write_text(expected.dumps())
    page = catalogue.page(Series.load(root / "patches"))
    (root / "patches" / catalogue.NAME).write_bytes(page)
    return Overlay.load(root)


def worded(
    root: Path,
    pristine: Mapping[str, bytes] = PRISTINE,
    overlaid: Mapping[str, bytes] = OVERLAID,
    serves: Mapping[str, str] = SEEDS,
) -> Overlay:
    """An overlay with the registry; by default ``vllm/v1/two.py`` alone serves a feature."""
    words = Path(__file__).parents[2] / "vendor_overlay" / "vllm/v1/readiness/registry.py"
    ours = {**OURS, "vllm/v1/readiness/registry.py": words.read_bytes()}
    return overlay(root, pristine, overlaid, ours, serves=serves)


def extra(folder: Path, path: str = "vllm/one.py", data: bytes = OVERLAID["vllm/one.py"]) -> Path:
    """Write a directory of one patch of the user's own, which adds a line at a file's top.

    Args:
        folder: the directory.
        path: the file's.
        data: its bytes with the whole series on.
    """
    folder.mkdir(parents=True)
    (folder / "series").write_text("0001-mine.patch\n")
    change = unified(path, data, b"# mine\n" + data)
    (folder / "0001-mine.patch").write_bytes(f"{HEADER}\n".encode() + change)
    return folder


def install(
    site: Path, pristine: Mapping[str, bytes] = PRISTINE, more: Mapping[str, bytes] = NOTHING
) -> Path:
    """Write the synthetic vLLM into ``site``, with the RECORD an installer writes.

    Args:
        site: the directory.
        pristine: the files that the overlay changes.
        more: more files.
    """
    files = {
        "vllm/__init__.py": b"",
        "vllm/v1/__init__.py": b"",
        **pristine,
        f"{INFO}/METADATA": METADATA.encode(),
        **more,
    }
    rows = ""
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        rows += row(path, data)
    (site / INFO / "RECORD").write_text(rows + f"{INFO}/RECORD,,\n")
    return site


def state_version(site: Path, version: str) -> None:
    """Write another version of vLLM into the metadata of an installation."""
    (site / INFO / "METADATA").write_text(METADATA.replace(RELEASE, version))


def wheel(folder: Path) -> Path:
    """Make the wheel of the synthetic vLLM, with a command, in ``folder``. Returns: its file."""
    more = {
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/entry_points.txt": b"[console_scripts]\nvllm = vllm.v1.two:f\n",
    }
    site = install(folder / "unpacked", more=more)
    archive = shutil.make_archive(str(folder / "wheel"), "zip", site)
    return Path(archive).rename(folder / f"vllm-{RELEASE}-py3-none-any.whl")


def lay(overlay: Overlay, site: Path) -> None:
    """Apply an overlay."""
    commands.apply(locate(site=str(site)), overlay, Options(force=True))


def overlaid(
    folder: Path,
    pristine: Mapping[str, bytes] = PRISTINE,
    overlaid: Mapping[str, bytes] = OVERLAID,
    ours: Mapping[str, bytes] = OURS,
) -> Path:
    """Install the synthetic vLLM, and lay a version 0.0.1 of an overlay over it."""
    site = install(folder / "site", pristine)
    lay(overlay(folder / "other", pristine, overlaid, ours), site)
    return site


def older(folder: Path) -> Path:
    """Install it, and lay a version 0.0.1 over it that has another line and two more modules."""
    changed = {**OVERLAID, "vllm/one.py": b"A = 1\nB = 22\nC = 3\n"}
    return overlaid(folder, overlaid=changed, ours=MORE)
