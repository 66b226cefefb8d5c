"""What is installed here: the identity of the overlay, and what of it was left out."""

# mirrors: nothing

import hashlib
from functools import cache
from pathlib import Path

#: The VERSION_PIN and the patches that this installation was overlaid with.
PROVENANCE = Path(__file__).parents[1] / "provenance"

#: Begins the line of VERSION_PIN that names what `apply` has left out.
_WITHOUT = "without = "

#: The site-packages directory that vLLM is imported from.
SITE = Path(__file__).parents[4]


def digest(provenance: Path = PROVENANCE, site: Path = SITE) -> str | None:
    """Compute one SHA-256 over every file of the overlay that is installed here.

    It is the digest that ``scripts/overlay status`` prints: of the lines that ``sha256sum``
    prints for the files listed under [result] in VERSION_PIN and for VERSION_PIN itself,
    sorted by path. Ranks with the same digest run the same files.

    Args:
        provenance: the directory that VERSION_PIN is installed in.
        site: the site-packages directory that the listed paths are relative to.

    Returns:
        The digest in lower-case hexadecimal; None if no VERSION_PIN is installed, because
        the package is imported from a checkout.
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
    """The features and fixes whose patches `apply` was told to leave out; none in a checkout.

    Args:
        provenance: the directory that VERSION_PIN is installed in.
    """
    try:
        lines = (provenance / "VERSION_PIN").read_text().splitlines()
    except FileNotFoundError:
        return frozenset()
    named = [line.removeprefix(_WITHOUT) for line in lines if line.startswith(_WITHOUT)]
    return frozenset(name for names in named for name in names.split(","))


def _sha256(file: Path) -> str:
    """The file's digest; a dash if it is missing."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "-"
