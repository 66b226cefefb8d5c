"""VERSION_PIN: the supported vLLM release, with checksums of its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from overlay.errors import damaged

NAME = "VERSION_PIN"

_OPS = "vllm/model_executor/layers/mamba/ops"
#: Upstream's checksums of files that only earlier versions of the overlay change.
EARLIER = {
    "vllm/__init__.py": "fd3708e5a13abe98c566afd79a6b1987cef70c0548bb19c1218ff6a7f9d43346",
    f"{_OPS}/causal_conv1d.py": "7b70ef2305f03fe907a7baa30d72b852bfdc95c54a824a26e7826334d0cfec44",
    f"{_OPS}/mamba_ssm.py": "d90345560dbe78a984420b4a232bdfbe82e96106f4cf46facc4bc941524496db",
    f"{_OPS}/ssd_bmm.py": "6dd733f6c6a70a8c4a75c756f404000ab955ca743d6a33ddf2e464e741440607",
    f"{_OPS}/ssd_chunk_scan.py": "af58095ccee5c173a56395cb8fba4174ed7b0bec32bffbd713b1bf80c0332123",
    f"{_OPS}/ssd_chunk_state.py": (
        "3a81942a6853b21e69cbf7344f6a9504ff8a7b104a203827119ca11b53929f07"
    ),
    f"{_OPS}/ssd_state_passing.py": (
        "36b8c8edba437916a5b789717c61fc22077de01e77892cb96dbff3b00a57410e"
    ),
}

#: The directory of all files that we add to an installation.
PACKAGE = "vllm/v1/readiness"

_ENTRY = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<path>\S+)", re.ASCII)
_FACT = re.compile(r"(?P<key>[a-z]+) = (?P<value>[\w.,+-]+)")
_SECTIONS = ("release", "archives", "upstream", "result")

_PREAMBLE = """\
# The one vLLM release that this overlay is for, and the checksums that prove it.
# Written by {by}. Each section below [release] is in the format of sha256sum.
# With this file as PIN,
#     (cd site-packages && sed -n '/^\\[result\\]/,$p' "$PIN" | sha256sum -c 2>/dev/null)
# checks an overlaid installation, and '/^\\[upstream\\]/,/^$/p' a pristine one. The `revert` of any
# copy of this version of vllm-readiness-overlay, or of a later one, restores upstream's files.
"""

_TITLES = {
    "release": "",
    "archives": "# The release's wheels (GPU and CPU builds) and source archive, if known.\n",
    "upstream": "# Upstream's bytes of each file that the patches change.\n",
    "result": "# The same files after the patches, and the files that the overlay adds.\n",
}


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in lower-case hexadecimal.

    >>> sha256(b"")
    'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    """
    return hashlib.sha256(data).hexdigest()


def digest_of(files: Iterable[tuple[str, str | None]]) -> str:
    r"""Return the digest of pairs of a path and its SHA-256, sorted by path.

    Hashes the output of ``sha256sum``, with ``-`` for an absent file.

    >>> digest_of([("vllm/a.py", None)]) == sha256(b"-  vllm/a.py\n")
    True
    """
    lines = (f"{checksum or '-'}  {path}\n" for path, checksum in files)
    return sha256("".join(lines).encode(errors="surrogateescape"))


def is_safe(path: str) -> bool:
    """Return whether ``path`` is a normalised path inside the ``vllm`` package.

    >>> is_safe("vllm/envs.py"), is_safe("vllm/../envs.py")
    (True, False)
    """
    pure = PurePosixPath(path)
    return (
        str(pure) == path
        and len(pure.parts) > 1
        and pure.parts[0] == "vllm"
        and ".." not in pure.parts
        and path.isprintable()
        and not any(c in path for c in '\\,"')
    )


@dataclass(frozen=True)
class Pin:
    """Contents of VERSION_PIN.

    Attributes:
        release: vLLM's version, such as ``0.22.0``.
        overlay: the overlay's version.
        archives: file name on the package index to the SHA-256 of the file.
        upstream: path in site-packages to the SHA-256 of upstream's bytes.
        result: path in site-packages to the SHA-256 after ``apply``, for every key of
            ``upstream`` and every added file.
        without: features and fixes that are left out, sorted; only in an installation's pin.
    """

    release: str
    overlay: str
    archives: Mapping[str, str]
    upstream: Mapping[str, str]
    result: Mapping[str, str]
    without: tuple[str, ...] = ()

    @property
    def added(self) -> list[str]:
        """Paths of the added files, sorted."""
        return sorted(set(self.result) - set(self.upstream))

    def dumps(self, by: str = "`make refresh`") -> str:
        """Format VERSION_PIN; :func:`loads` is the inverse. ``by`` names the writing command."""
        without = f"without = {','.join(self.without)}\n" if self.without else ""
        bodies = [f"vllm = {self.release}\noverlay = {self.overlay}\n{without}"]
        for table in (self.archives, self.upstream, self.result):
            rows = sorted(table.items())
            bodies.append("".join(f"{digest}  {path}\n" for path, digest in rows))
        sections = zip(_SECTIONS, bodies, strict=True)
        text = "".join(f"\n{_TITLES[name]}[{name}]\n{body}" for name, body in sections)
        return _PREAMBLE.format(by=by) + text


def loads(text: str, origin: str = NAME) -> Pin:
    r"""Parse a VERSION_PIN.

    Raises:
        OverlayError: a malformed line, a path outside the package, or inconsistent sections.

    >>> loads("[release]\nvllm = 0.22.0\noverlay = 0.9.0\n").release
    '0.22.0'
    """
    facts: dict[str, str] = {}
    tables: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS[1:]}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{origin}, line {number}"
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            if section not in _SECTIONS:
                raise damaged(f"unknown section {line}", where)
        elif section == "release" and (fact := _FACT.fullmatch(line)):
            facts[fact["key"]] = fact["value"]
        elif section in tables and (entry := _ENTRY.fullmatch(line)):
            if section != "archives" and not is_safe(entry["path"]):
                raise damaged(f"{entry['path']!r} is not a path inside the vllm package", where)
            if entry["path"] in tables[section]:
                raise damaged(f"{entry['path']} is listed twice in [{section}]", where)
            tables[section][entry["path"]] = entry["sha256"]
        else:
            raise damaged(f"not a line of the format: {line!r}", where)
    if missing := {"vllm", "overlay"} - set(facts):
        raise damaged(f"[release] lacks {', '.join(sorted(missing))}", origin)
    without = tuple(filter(None, facts.get("without", "").split(",")))
    return _consistent(Pin(facts["vllm"], facts["overlay"], **tables, without=without), origin)


def _consistent(pin: Pin, origin: str) -> Pin:
    if unmatched := set(pin.upstream) - set(pin.result):
        raise damaged(f"[result] lacks {', '.join(sorted(unmatched))}", origin)
    for path in pin.added:
        if not path.startswith(PACKAGE + "/"):
            raise damaged(f"{path} is added outside {PACKAGE}", origin)
    for path, digest in pin.upstream.items():
        if pin.result[path] == digest:
            raise damaged(f"{path} has the same checksum before and after", origin)
    return pin
