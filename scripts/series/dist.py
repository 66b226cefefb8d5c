"""Build the vendored copies, the archive for container builds, and the wheel."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError, damaged
from overlay.files import holds
from overlay.hints import VERSION
from overlay.source import Overlay

from series import git
from series.tree import write_file
from series.upstream import Upstream
from series.wheel import wheel

#: Paths that the archive leaves out.
_NOT_SHIPPED = ("tests/", ".ci/", ".git", "pyproject.toml")


@dataclass(frozen=True)
class Artifacts:
    """Archive and wheel of a commit."""

    files: Mapping[str, bytes]  #: By path in the checkout.
    digest_after: str  #: Digest that their `apply` gives.


def vendor(overlay: Overlay, upstream: Upstream, dry_run: bool) -> list[str]:
    """Build the vendored copies into ``vendor_overlay/``; return the paths of what has changed.

    Git ignores them.
    """
    written = []
    for path in overlay.targets:
        data = overlay.overlaid_bytes(path, upstream.read(path))
        file = overlay.root / "vendor_overlay" / path
        if not holds(file, data):
            written.append(f"vendor_overlay/{path}")
            if not dry_run:
                write_file(file, data)
    return written


def dist(root: Path, upstream: Callable[[Overlay], Upstream], dry_run: bool) -> Artifacts:
    """Build the archive and the wheel of the commit HEAD in ``build/dist``.

    The archive, ``vllm-readiness-overlay-VERSION.tar``, is not compressed, because compressors
    differ between Python versions and the same commit must give the same bytes everywhere. Unless
    the tag ``vVERSION`` points at HEAD, the version has a local label, made of the commit.
    ``upstream`` returns upstream's files, proven by the overlay of HEAD.

    Raises:
        OverlayError: there is no git checkout, or its overlay contradicts itself.
    """
    if not (root / ".git").exists():
        raise OverlayError(
            Exit.USAGE,
            "is not a git checkout; an archive is made from a commit",
            subject=root,
            next_step="run it in a clone of the overlay's repository",
        )
    time = int(git.text(root, "log", "-1", "--no-show-signature", "--format=%ct"))
    with tempfile.TemporaryDirectory() as scratch:
        head = Path(scratch)
        executable = set()
        for path, mode, blob in _committed(root):
            write_file(head / path, blob)
            if mode == "100755":
                executable.add(path)
        overlay = Overlay.load(head)
        vendor(overlay, upstream(overlay), dry_run=False)
        for path in overlay.added:
            overlay.added_bytes(path)
        version = _version(root, overlay.pin.overlay)
        write_file(head / VERSION, f"{version}\n".encode())
        name = f"vllm-readiness-overlay-{version}"
        files = (f.relative_to(head).as_posix() for f in head.rglob("*") if f.is_file())
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path in sorted(f for f in files if not f.startswith(_NOT_SHIPPED)):
                info = tarfile.TarInfo(f"{name}/{path}")
                info.size = (head / path).stat().st_size
                info.mtime = time
                info.mode = 0o755 if path in executable else 0o644
                archive.addfile(info, io.BytesIO((head / path).read_bytes()))
        built = dict([(f"{name}.tar", data.getvalue()), wheel(overlay, version, time)])
    artifacts = {f"build/dist/{target}": content for target, content in built.items()}
    for target, content in artifacts.items():
        if not dry_run:
            write_file(root / target, content)
    return Artifacts(artifacts, overlay.digest)


def _version(root: Path, released: str) -> str:
    """Return ``released`` if HEAD has its tag; else with a local label of PEP 440.

    The label has a fixed length: git's own abbreviation depends on the clone.
    """
    tag = f"refs/tags/v{released}"
    tags = git.text(root, "for-each-ref", "--points-at=HEAD", "--format=%(refname)", tag)
    if tag in tags.splitlines():
        return released
    return f"{released}+g{git.text(root, 'rev-parse', 'HEAD')[:12]}"


def _committed(root: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the path, mode and bytes of each file of HEAD, as committed.

    Blobs are read, because attributes and settings of a clone change what `git archive` writes.
    """
    entries = git.text(root, "ls-tree", "-r", "-z", "--full-tree", "HEAD").rstrip("\0").split("\0")
    listed = [(*entry.partition("\t")[0].split(), entry.partition("\t")[2]) for entry in entries]
    if odd := [path for mode, _, _, path in listed if mode not in ("100644", "100755")]:
        raise damaged("is a link or a submodule; an archive holds plain files", odd[0])
    names = "".join(f"{blob}\n" for _, _, blob, _ in listed).encode()
    batch = io.BytesIO(git.data(root, "cat-file", "--batch", input=names))
    for mode, _, _, path in listed:
        size = int(batch.readline().split()[2])
        yield path, mode, batch.read(size)
        batch.readline()
