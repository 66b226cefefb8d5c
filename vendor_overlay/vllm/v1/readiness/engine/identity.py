"""Identity of the installed overlay: its digest, and the words that `apply` left out."""

# mirrors: nothing

import hashlib
from functools import cache
from pathlib import Path

#: Holds the VERSION_PIN and the patches of this installation.
PROVENANCE = Path(__file__).parents[1] / "provenance"
#: Prefix of the line of VERSION_PIN that names the words left out by `apply`.
_WITHOUT = "without = "
#: The site-packages directory that vLLM is imported from.
SITE = Path(__file__).parents[4]


def digest(provenance: Path = PROVENANCE, site: Path = SITE) -> str | None:
    """Compute one SHA-256 of all installed overlay files, in lower-case hexadecimal.

    The digest is the SHA-256 of the lines that ``sha256sum`` prints for VERSION_PIN and the files
    in its [result] section, sorted by path. ``scripts/overlay status`` prints the same digest. In a
    checkout, which has no VERSION_PIN, returns None.
    """
    pin = provenance / "VERSION_PIN"
    if not pin.is_file():
        return None
    listing = pin.read_text().partition("\n[result]\n")[2]
    paths = [line.partition("  ")[2] for line in listing.splitlines() if line]
    paths.append(pin.relative_to(site).as_posix())
    lines = (f"{_sha256(site / path)}  {path}\n" for path in sorted(paths))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@cache
def left_out(provenance: Path = PROVENANCE) -> frozenset[str]:
    """Return the features and fixes that `apply` left out; empty in a checkout."""
    try:
        lines = (provenance / "VERSION_PIN").read_text().splitlines()
    except FileNotFoundError:
        return frozenset()
    listed = [line.removeprefix(_WITHOUT) for line in lines if line.startswith(_WITHOUT)]
    return frozenset(name for names in listed for name in names.split(","))


def _sha256(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "-"
