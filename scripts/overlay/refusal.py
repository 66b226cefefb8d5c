"""Errors for foreign installations, each with the next step."""

from __future__ import annotations

import re
from collections.abc import Sequence

from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE
from overlay.source import MARK, PIN, PROVENANCE, Overlay
from overlay.state import FileState, Inspection, State
from overlay.words import words_of


def refuse_foreign(inspection: Inspection) -> None:
    """Raise OverlayError if files are foreign or missing, with the first file and the number.

    >>> os.truncate(site / "vllm/one.py", 0)
    >>> refuse_foreign(inspect(vllm, small))
    Traceback (most recent call last):
    OverlayError: one.py: is neither upstream's nor the overlay's
    """
    files = inspection.foreign_files
    if not files:
        return
    installed = inspection.by_installed
    if installed and inspection.condition is State.FOREIGN:
        files = [*installed.foreign_files, *inspection.beyond]
    raise refusal(inspection, files)


def refusal(inspection: Inspection, files: Sequence[FileState]) -> OverlayError:
    """Return the error for foreign or missing files, with the first file and the number.

    >>> os.truncate(site / "vllm/one.py", 0)
    >>> compared = inspect(vllm, small)
    >>> refusal(compared, compared.foreign_files).code
    <Exit.FOREIGN: 5>
    """
    pin, installation = inspection.overlay.pin, inspection.installation
    if inspection.unknown:
        return _unknown(inspection)
    file = files[0]
    more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
    title = f"{installation.title} in {installation.site}"
    if installation.release != pin.release and any(f.path in pin.upstream for f in files):
        return OverlayError(
            Exit.RELEASE,
            f"is not the file of vLLM {pin.release}{more}; this is {title}",
            subject=installation.site / file.path,
            expected=_expected(inspection.overlay, file.path),
            found=file.description,
            next_step=f"install vLLM {pin.release}, or use the overlay for this release",
        )
    overlay, whose = inspection.overlay, "the overlay"
    installed = inspection.by_installed
    if installed and file.path in installed.paths:
        if inspection.replaceable:
            part = "in part " if installed.state is State.PARTIAL else ""
            order = ", which is older" if inspection.downgrades else ""
            return OverlayError(
                Exit.FOREIGN,
                f"is overlaid {part}by overlay {inspection.installed_version}; "
                f"this is {pin.overlay}{overlay.selection}{order}",
                subject=installation.site,
                next_step=f"{laying(inspection)} replaces it with this one, `revert` removes it",
            )
        overlay, whose = installed.overlay, f"overlay {inspection.installed_version}"
    reinstall = f"reinstall {installation.title}"
    again = f"{reinstall}, then {laying(inspection)}"
    if file.path in overlay.pin.upstream:
        reason = f"is neither upstream's nor {whose}'s"
        next_step = f"save your change elsewhere and {again}"
        if leaving := _leaving(inspection, files):
            next_step += f"; or leave this file to the other program: add {leaving}"
    elif file.path.startswith(PROVENANCE) and overlay is not inspection.overlay:
        reason = f"is missing or damaged, and {whose} cannot be reverted without it"
        next_step = again
    elif inspection.file(PIN).state is State.PRISTINE and file.path.startswith(PACKAGE):
        # The tool writes the pin first, and removes it last.
        reason = "is a file of another version of the overlay, and no pin names that version"
        next_step = again
    elif installation.site / file.path == installation.record:
        reason, next_step = "is not a plain file", f"restore the installer's RECORD, or {reinstall}"
    else:
        named = file.path in overlay.added
        reason = f"is not {whose}'s file" if named else f"is not a file of {whose}"
        next_step = "move it away, then run the same command again"
    return OverlayError(
        Exit.FOREIGN,
        reason + more,
        subject=installation.site / file.path,
        expected=_expected(overlay, file.path),
        found=file.description,
        next_step=next_step,
    )


def _unknown(inspection: Inspection) -> OverlayError:
    """Return the error for an installed version that this version cannot revert.

    Its pin may be damaged, or of a later format.
    """
    ours, installation = inspection.overlay.pin, inspection.installation
    pin, reinstall = inspection.file(PIN), f"reinstall {installation.title}"
    text = (pin.data or b"").decode(errors="replace")
    facts = dict(re.findall(r"^(overlay|vllm) = ([\w.,+-]+)$", text, re.MULTILINE))
    if "overlay" not in facts:
        return OverlayError(
            Exit.FOREIGN,
            "does not name the overlay version that changed files here",
            subject=installation.site / PIN,
            found=pin.description,
            next_step=f"{reinstall}, then {laying(inspection)}",
        )
    named = f"overlay {facts['overlay']}"
    if facts["overlay"] == ours.overlay:
        named = f"another state of {named}"
    release = facts.get("vllm", ours.release)
    named_for = f"{named}, which is for vLLM {release}" if release != ours.release else named
    return OverlayError(
        Exit.FOREIGN if installation.release == ours.release else Exit.RELEASE,
        f"is overlaid by {named_for}; overlay {ours.overlay} cannot verify a revert of it",
        subject=installation.site,
        next_step=f"revert with {named}, or {reinstall}; leave its files in place until then",
    )


def _leaving(inspection: Inspection, files: Sequence[FileState]) -> str | None:
    """Return the options of ``apply`` that leave these files unchanged; None if impossible."""
    base = inspection.overlay.base or inspection.overlay
    paths = [file.path for file in files if file.path in base.pin.upstream]
    laid = (inspection.by_installed or inspection).overlay
    if inspection.file(PIN).state is not State.PRISTINE and set(laid.targets) & set(paths):
        return None
    if any(file.data is None or MARK in file.data for file in files if file.path in paths):
        return None
    if not paths or not all(words_of(base, path) for path in paths):
        return None
    return " ".join(f"--leave={path}" for path in paths)


def laying(inspection: Inspection) -> str:
    """Return the ``apply`` command, with a reminder of the options of a part.

    >>> laying(inspect(vllm, small))
    '`apply`'
    """
    flag = " --allow-downgrade" if inspection.replaceable and inspection.downgrades else ""
    parts = (inspection.overlay, (inspection.by_installed or inspection).overlay)
    options = " with its --leave or --extra" if any(part.selection for part in parts) else ""
    return f"`apply{flag}`{options}"


def _expected(overlay: Overlay, path: str) -> str | None:
    after = overlay.pin.result.get(path)
    if path in overlay.pin.upstream:
        before = overlay.pin.upstream[path]
        return f"SHA-256 {before} (vLLM {overlay.pin.release}) or {after} (overlaid)"
    return f"SHA-256 {after}" if after else None
