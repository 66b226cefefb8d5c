"""Derive an overlay with selected features and fixes, and with the user's own patches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from overlay import extras, merge, words
from overlay.errors import OverlayError, usage
from overlay.installation import Installation
from overlay.patches import SERIES, Patch, Series, dumps
from overlay.pin import sha256
from overlay.refusal import options, refusal
from overlay.source import EXTRA, PIN, PROVENANCE, Overlay
from overlay.state import Inspection, State, inspect

_PATCHES = f"{PROVENANCE}/patches"

#: Maps the given paths to upstream's bytes.
Upstream = Callable[[Iterable[str]], Mapping[str, bytes]]


@dataclass(frozen=True)
class Choice:
    """Files to leave unchanged and extra patches, selected on the command line.

    With ``keep``, a choice of nothing is the installed selection, not the whole overlay.
    """

    leave: tuple[str, ...] = ()
    extra: str | None = None
    keep: bool = False


def lines(overlay: Overlay) -> Iterator[str]:
    """Yield the left-out features and fixes and the extra patches, as lines of a report."""
    if overlay.pin.without:
        yield f"left out: {', '.join(overlay.pin.without)}"
    for extra in extras.described(overlay):
        yield f"extra patch: {extra['name']}, origin: {extra['origin']}"


def survey(installation: Installation, overlay: Overlay, choice: Choice) -> Inspection:
    """Compare an installation with the chosen part of ``overlay``; change nothing.

    Raises:
        OverlayError: the choice is invalid.
    """
    present = recognise(installation, overlay)
    if choice.keep and not choice.leave and choice.extra is None:
        return present
    without = _left_out(overlay, choice) if choice.leave else frozenset()
    extra = [] if choice.extra is None else extras.load(Path(choice.extra), overlay)
    for path in sorted({path for patch in extra for path in patch.paths} & {*choice.leave}):
        raise usage("is left out by --leave, and an extra patch changes it", "choose one", path)
    asked = options(choice.leave, choice.extra)
    whole = present if present.overlay is overlay else inspect(installation, overlay)
    upstream = partial(upstream_bytes, replace(whole, asked=asked))
    target = derive(overlay, without, extra, upstream)
    if target.pin_bytes != present.overlay.pin_bytes:
        present = inspect(installation, target)
    return replace(present, asked=asked)


def recognise(installation: Installation, overlay: Overlay) -> Inspection:
    """Compare an installation with the installed part of ``overlay``, or else the whole.

    The installed provenance may be forged, and is only a hint. The part is derived again from this
    copy of the overlay and upstream's bytes, and must have the installed pin.
    """
    whole = inspect(installation, overlay)
    if whole.state is not State.FOREIGN:
        return whole
    try:
        laid = Overlay.installed(installation.site)
        if laid is None or laid.pin.overlay != overlay.pin.overlay:
            return whole
        without, extra = frozenset(laid.pin.without), laid.extra
        if not (without or extra) or not _sound(overlay, without, extra):
            return whole
        part = derive(overlay, without, extra, partial(upstream_bytes, whole), laid=True)
    except OverlayError:
        return whole
    return inspect(installation, part) if part.pin_bytes == laid.pin_bytes else whole


def _sound(overlay: Overlay, without: frozenset[str], extra: Iterable[Patch]) -> bool:
    """Return whether ``apply`` accepts these left-out names and extra patches."""
    if without and words.closed(overlay, without) != without:
        return False
    return all(patch.paths.issubset(overlay.pin.upstream) for patch in extra)


def _left_out(base: Overlay, choice: Choice) -> frozenset[str]:
    without: frozenset[str] = frozenset()
    for path in choice.leave:
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
    """Return upstream's bytes of each path, verified by this overlay's checksums.

    They are read from pristine files, or restored by reversing patches. ``whole`` is a comparison
    with the whole overlay. Raises OverlayError if a file has neither.
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
    base: Overlay,
    without: Collection[str],
    extra: Sequence[Patch],
    upstream: Upstream,
    laid: bool = False,
) -> Overlay:
    """Derive a part of an overlay, followed by the user's patches.

    With ``laid``, the patches ``extra`` come from an installation: their line numbers refer to the
    result of the part, not of the whole series.

    Raises:
        OverlayError: the selection is empty, upstream's bytes are not available, or a patch does
            not apply, depends on a patch that is left out, or stops a module from compiling.
    """
    if not without and not extra:
        return base
    kept = [patch for patch in base.series.patches if words.stays(patch, without)]
    theirs = {path for patch in extra for path in patch.paths}
    paths = {f.path for patch in kept for f in patch.files if not words.is_mark(f)} | theirs
    paths = paths if without else set(base.targets)
    if not paths:
        raise usage("the selection is empty", "run `revert` to remove the overlay")
    before = upstream(sorted(paths))
    series = base.series if laid else Series([*base.series.patches, *extra])
    names = {patch.name for patch in (*kept, *extra)}
    try:
        if without:
            series = merge.part(series, names, paths, before.__getitem__)
        if laid:
            series = Series([*series.patches, *extra])
        after = {path: series.apply(path, data) for path, data in before.items()}
    except merge.DependentError as error:
        raise _dependent(base, error) from None
    except OverlayError as error:
        raise usage(f"{error.subject}: {error.reason}", extras.AGAIN) from None
    for path in () if laid else sorted(theirs):
        if reason := extras.no_python(path, after[path]):
            reason = f"no longer compiles with the extra patches: {reason}"
            raise usage(reason, extras.AGAIN, path)
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


def _dependent(base: Overlay, error: merge.DependentError) -> OverlayError:
    by_name: dict[str, Patch] = {patch.name: patch for patch in base.series.patches}
    needed = words.served(by_name[error.other]) if error.other in by_name else None
    keep = f"keep {', '.join(sorted(needed or ()))}"
    name = error.patch.removeprefix(EXTRA)
    served = words.served(by_name[error.patch]) if error.patch in by_name else None
    also = f"leave out {', '.join(sorted(served))}" if served else f"do without {name}"
    return usage(
        f"{name} changes lines that {error.other} adds, and cannot be applied without it",
        f"{keep}, or {also}",
        error.path,
    )
