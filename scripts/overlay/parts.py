"""Derive an overlay that leaves files unchanged, or that ends with the user's own patches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from overlay import merge, words
from overlay.errors import OverlayError, usage
from overlay.installation import Installation
from overlay.patches import SERIES, Patch, Series, dumps, header_fields
from overlay.pin import sha256
from overlay.refusal import refusal
from overlay.source import EXTRA, PIN, PROVENANCE, Overlay
from overlay.state import Inspection, State, inspect

_PATCHES = f"{PROVENANCE}/patches"
#: Advice for patches of the user's own that cannot be read, or do not apply.
_AGAIN = (
    "make each patch again for this overlay (`make edit`, `git apply` in build/edit), and list "
    "it once in `series`"
)

#: Maps the given paths to upstream's bytes.
Upstream = Callable[[Iterable[str]], Mapping[str, bytes]]


@dataclass(frozen=True)
class Choice:
    """Files to leave unchanged or extra patches, selected on the command line.

    With ``keep``, a choice of nothing is the installed selection, not the whole overlay.
    """

    leave: tuple[str, ...] = ()
    extra: str | None = None
    keep: bool = False


def lines(overlay: Overlay) -> Iterator[str]:
    """Yield the left-out features and fixes and the extra patches, as lines of a report.

    >>> list(lines(survey(vllm, small, Choice(leave=("vllm/v1/two.py",))).overlay))
    ['left out: seeds']
    """
    if overlay.pin.without:
        yield f"left out: {', '.join(overlay.pin.without)}"
    for extra in described(overlay):
        yield f"extra patch: {extra['name']}, origin: {extra['origin']}"


def described(overlay: Overlay) -> list[dict[str, str]]:
    """Return the name and the one-line origin of each of the user's patches.

    >>> described(small)
    []
    """
    return [
        {
            "name": patch.name.removeprefix(EXTRA),
            "origin": " ".join(header_fields(patch.header).get("Origin", "").split()),
        }
        for patch in overlay.extra
    ]


def survey(installation: Installation, overlay: Overlay, choice: Choice) -> Inspection:
    """Compare an installation with the chosen part of ``overlay``; change nothing.

    Raises:
        OverlayError: the choice is invalid.

    >>> survey(vllm, small, Choice(leave=("vllm/v1/two.py",))).overlay.selection
    ' without seeds'
    """
    present = recognise(installation, overlay)
    if choice.keep and not choice.leave and choice.extra is None:
        return present
    if choice.leave and choice.extra is not None:
        raise usage("--leave and --extra exclude each other", "choose one")
    without = _left_out(overlay, choice.leave)
    extra = [] if choice.extra is None else _load(choice.extra)
    whole = present if present.overlay is overlay else inspect(installation, overlay)
    target = derive(overlay, without, extra, partial(upstream_bytes, whole))
    same = target.pin_bytes == present.overlay.pin_bytes
    return present if same else inspect(installation, target)


def recognise(installation: Installation, overlay: Overlay) -> Inspection:
    """Compare an installation with the installed part of ``overlay``, or else the whole.

    The installed provenance may be forged, and is only a hint. The part is derived again from this
    copy of the overlay and upstream's bytes, and must have the installed pin.

    >>> recognise(vllm, small).overlay is small
    True
    """
    whole = inspect(installation, overlay)
    if whole.state is not State.FOREIGN:
        return whole
    try:
        laid = Overlay.installed(installation.site)
        if laid is None or laid.pin.overlay != overlay.pin.overlay:
            return whole
        without = words.closed(overlay, laid.pin.without)
        part = derive(overlay, without, laid.extra, partial(upstream_bytes, whole))
    except OverlayError:
        return whole
    return inspect(installation, part) if part.pin_bytes == laid.pin_bytes else whole


def _load(folder: str) -> list[Patch]:
    """Read the patches in a directory's ``series``; their names get :data:`EXTRA`."""
    if not folder:
        raise usage("--extra is empty", "name a directory of patches, or omit --extra=")
    directory = Path(folder).absolute()
    try:
        patches = Series.load(directory).patches
    except OverlayError as error:
        raise usage(error.reason, _AGAIN, directory / (error.subject or "")) from None
    if not patches:
        listing = directory / SERIES
        raise usage("lists no patch", "list the patches to apply, or omit --extra=", listing)
    return [replace(patch, name=EXTRA + patch.name) for patch in patches]


def _left_out(base: Overlay, leave: Iterable[str]) -> frozenset[str]:
    """Return the features and fixes that change the files ``leave``, and their dependents."""
    without: frozenset[str] = frozenset()
    for path in leave:
        if path not in base.pin.upstream:
            raise usage(
                "is not a file that the overlay changes",
                "name a file of vLLM that `status --verbose` lists, or omit --leave",
                path,
            )
        names = words.words_of(base, path)
        if names is None:
            raise usage(
                "cannot be left unchanged: every feature and fix needs a change in it",
                "remove the other change, or do not use the overlay",
                path,
            )
        without |= names
    return words.closed(base, without)


def upstream_bytes(whole: Inspection, paths: Iterable[str]) -> Mapping[str, bytes]:
    r"""Return upstream's bytes of each path, verified by this overlay's checksums.

    They are read from pristine files, or restored by reversing patches. ``whole`` is a comparison
    with the whole overlay. Raises OverlayError if a file has neither.

    >>> upstream_bytes(inspect(vllm, small), ["vllm/one.py"])
    {'vllm/one.py': b'A = 1\nB = 2\nC = 3\n'}
    """
    base, laid = whole.overlay, cache(Overlay.installed)
    found: dict[str, bytes] = {}
    for file in map(whole.file, paths):
        data = file.data or b""
        with suppress(OverlayError):
            if file.state is State.OVERLAID:
                data = base.pristine_bytes(file.path, data)
            elif file.state is State.FOREIGN and (other := laid(whole.installation.site)):
                data = other.series.reverse(file.path, data)
            if sha256(data) == base.pin.upstream[file.path]:
                found[file.path] = data
    if lacking := [whole.file(path) for path in paths if path not in found]:
        raise refusal(whole, lacking)
    return found


def derive(
    base: Overlay, without: Collection[str], extra: Sequence[Patch], upstream: Upstream
) -> Overlay:
    """Derive the overlay without features and fixes, or followed by the user's patches.

    Raises:
        OverlayError: upstream's bytes are not available, or a patch does not apply or changes a
            file that the overlay does not.

    >>> derive(small, {"seeds"}, [], partial(upstream_bytes, inspect(vllm, small))).targets
    ['vllm/one.py']
    """
    if not without and not extra:
        return base
    if without:
        kept = [patch for patch in base.series.patches if words.stays(patch, without)]
        paths = {f.path for patch in kept for f in patch.files if not words.is_mark(f)}
        before = upstream(sorted(paths))
        names = {patch.name for patch in kept}
        series = merge.part(base.series, names, paths, before.__getitem__)
    else:
        series = Series([*base.series.patches, *extra])
        if unknown := sorted(series.paths() - set(base.targets)):
            raise usage(
                "an extra patch changes it, and the overlay does not: a revert could not verify "
                "upstream's bytes of it",
                "apply this change with `patch -p1`: the overlay ignores files that it does not "
                "change",
                unknown[0],
            )
        before = upstream(base.targets)
    try:
        after = {path: series.apply(path, data) for path, data in before.items()}
    except OverlayError as error:
        raise usage(f"{error.subject}: {error.reason}", _AGAIN) from None
    files = {f"{_PATCHES}/{patch.name}": dumps(patch) for patch in series.patches}
    files[f"{_PATCHES}/{SERIES}"] = "".join(f"{p.name}\n" for p in series.patches).encode()
    modules = {path for path in base.pin.added if not path.startswith(f"{_PATCHES}/")}
    pin = replace(
        base.pin,
        upstream={path: base.pin.upstream[path] for path in before},
        result={path: base.pin.result[path] for path in modules}
        | {path: sha256(data) for path, data in (after | files).items()},
        without=tuple(sorted(without)),
    )
    data = pin.dumps(by="`apply`, of a part or with patches of the user's own").encode()
    return Overlay(base.root, pin, data, series, {**files, PIN: data}, base)
