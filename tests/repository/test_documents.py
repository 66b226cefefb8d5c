"""README and docs: their commands run, their links lead somewhere, their tables are the code's."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from overlay.errors import Exit
from overlay.state import State
from support import mini, sites
from support.checkouts import git, library
from support.probe_page import PAGE
from support.sites import REPO
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.version import __version__

PAGES = [REPO / "README.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
BY_NAME = {str(page.relative_to(REPO)): page for page in PAGES}
#: Pages whose commands take tens of seconds.
LONG = {"docs/operations.md", "docs/releases.md"}
#: Targets of make that take seconds and no network. Of the others only the recipe is resolved.
QUICK = "apply|revert|status|verify|diff|vendor|edit|refresh|dist|probe|help"
#: A file or directory of this repository.
OURS = re.compile(r"(docs|scripts|tests|patches|vendor_overlay)/[a-z0-9_./-]*")


@cache
def tokens(page: Path) -> list[Token]:
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [part for token in parsed for part in (token, *(token.children or ()))]


def inline_code(page: Path) -> Iterator[str]:
    """The text of each inline code span."""
    return (token.content for token in tokens(page) if token.type == "code_inline")


def blocks(page: Path, language: str) -> list[str]:
    return [token.content for token in tokens(page) if token.info == language]


def table(name: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this heading, by their first cell."""
    head = f"| {heading} | "
    _, _, rest = BY_NAME[name].read_text().partition(f"\n{head}")
    assert rest, f"{name} has no table that begins with {head}"
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {first.strip("`"): rest for first, *rest in rows}


# Commands.

#: A file that our patches change.
PATCHED = sites.OVERLAY.targets[0]


class Sandbox(NamedTuple):
    """A machine on which somebody follows a page.

    Attributes:
        root: the checkout, a git repository.
        home: the directory for everything else.
        paths: what stands in the page, and what it is here.
    """

    root: Path
    home: Path
    paths: dict[str, str]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    root = tmp_path / "checkout"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=REPO, text=True).splitlines():
        if (REPO / name).is_file() and not name.startswith("tests/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, root / name)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        git(root, *command)

    for folder in (root / ".venv", tmp_path / "venv"):
        sites.small(sites.venv(folder))
    whole = sites.OVERLAY.series.apply(PATCHED, (sites.UPSTREAM / PATCHED).read_bytes())
    overlaid = sites.small(tmp_path / "site-packages")
    assert sites.run("apply", "--site", overlaid).returncode == 0
    (tmp_path / "run.probe").write_text(PAGE)

    programs = tmp_path / "bin"
    real = shutil.which("make")
    python = tmp_path / "venv" / "bin" / "python"
    sites.script(
        programs / "make",
        f'case "$1" in {QUICK}) ;; *) set -- -n "$@" ;; esac\n'
        f'exec {real} --no-print-directory PYTHON3={python} "$@"',
    )
    sites.script(programs / "python3", f'exec {python} "$@"')
    # In place of installers: a reinstall puts upstream's files back.
    # tests/overlay/test_reinstall.py has real ones.
    for name, folder in (("uv", root / ".venv"), ("pip-sync", tmp_path / "venv")):
        revert = f"exec {python} {root}/scripts/overlay revert --venv {folder}"
        sites.script(programs / name, revert)
    # In place of vLLM: what it asks our variables when it starts.
    vllm = sites.script(programs / "vllm", "")
    vllm.write_text(
        f"#!{sys.executable} -S\n"
        f"import sys; sys.path.insert(0, {str(REPO / 'vendor_overlay')!r})\n"
        "from vllm.v1.readiness.engine import switch\n"
        "assert sys.argv[1:2] == ['serve'], sys.argv\n"
        "for read in switch.VARIABLES.values(): read()\n",
    )
    for folder in (root / ".venv", tmp_path / "venv"):
        (folder / "bin" / "vllm").symlink_to(vllm)
    (root / "server.log").touch()
    paths = {
        "/opt/venv/lib/python3.12/site-packages": str(library(tmp_path / "venv")),
        "/opt/venv": str(tmp_path / "venv"),
        "/opt/our-patches": str(mini.extra(tmp_path / "our-patches", PATCHED, whole)),
        f"/opt/vllm-readiness-overlay-{__version__}": str(root),
        "cd site-packages": f"cd {overlaid}",
        "/tmp/": f"{tmp_path}/",
        # The release would be downloaded.
        "build/env/bin/python -m review": f"{sys.executable} -m review --help",
        # Engines would be started.
        "build/env/bin/python -m bench.parts": f"{sys.executable} -m bench.parts --help",
        "build/env/bin/python": sys.executable,
    }
    return Sandbox(root, tmp_path, paths)


def follow(script: str, sandbox: Sandbox) -> None:
    """Run one block of commands as a person would, in the sandbox's checkout."""
    named = re.compile("|".join(map(re.escape, sandbox.paths)))
    script = named.sub(lambda match: sandbox.paths[match[0]], script)
    env = {name: value for name, value in os.environ.items() if name not in sites.AMBIENT}
    env["PATH"] = f"{sandbox.home / 'bin'}:{env['PATH']}"
    file = sandbox.home / "script"
    file.write_text(script)
    shell = ["sh"] if script.startswith("#!/bin/sh") else ["bash", "-euo", "pipefail"]
    done = subprocess.run(
        [*shell, str(file), "MODEL"],
        cwd=sandbox.root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name, page in BY_NAME.items()
        if blocks(page, "sh")
    ],
)
def test_every_command_runs(name: str, sandbox: Sandbox) -> None:
    """Of Dockerfiles the tool's; tests/overlay/test_containers.py builds them."""
    for image in blocks(BY_NAME[name], "dockerfile"):
        for command in re.findall(r"^RUN (.*/scripts/overlay .*)", image, re.MULTILINE):
            follow(command, sandbox)
        for command in re.findall(r"^ENTRYPOINT (.*)", image, re.MULTILINE):
            follow(f"{shlex.join(json.loads(command))} MODEL", sandbox)
    for script in blocks(BY_NAME[name], "sh"):
        follow(script, sandbox)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (REPO / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_targets_and_paths_that_are_named_exist(name: str) -> None:
    for code in inline_code(BY_NAME[name]):
        if named := re.match(r"make ([a-z-]+)", code):
            assert named[1] in targets(), code
        if OURS.fullmatch(code):
            assert (REPO / code).exists(), code


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", BY_NAME)
def test_links_and_anchors_resolve(name: str) -> None:
    page = BY_NAME[name]
    links = [str(token.attrs["href"]) for token in tokens(page) if token.type == "link_open"]
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), link


# Tables.


def test_the_features_and_fixes_are_those_of_the_switch() -> None:
    assert table("docs/features.md", "feature").keys() == registry.FEATURES.keys()
    assert sections("docs/features.md").keys() == registry.FEATURES.keys()
    line = re.search(
        r"features: (.*); fixes: (.*); runner: ", BY_NAME["docs/features.md"].read_text()
    )
    assert line is not None
    on_gpus = {word for word in registry.WORDS.values() if word.device != "cpu"}
    listed = [", ".join(sorted(names & on_gpus)) for names in registry.GROUPS.values()]
    assert list(line.groups()) == listed


def test_the_pages_say_what_acts_under_model_runner_v2() -> None:
    page = BY_NAME["docs/features.md"].read_text()
    listed = page.partition("\nUnder V2 these act")[2].partition("The engine logs")[0]
    assert set(re.findall("`([^`]+)`", listed)) == registry.ON_V2
    counts = [len(names & registry.ON_V2) for names in registry.GROUPS.values()]
    features, fixes = map(len, registry.GROUPS.values())
    expected = f"[{counts[0]} of {features} features and {counts[1]} of {fixes} fixes]"
    assert expected in BY_NAME["README.md"].read_text()


def sections(name: str) -> dict[str, str]:
    """The sections with a heading of the third level, by their headings."""
    text = BY_NAME[name].read_text()
    found = re.findall(r"^### (.*)\n((?:(?!##).*\n)*)", text, re.MULTILINE)
    assert len(dict(found)) == len(found), f"{name} describes one twice"
    return dict(found)


def test_the_tables_of_operations_are_complete() -> None:
    page = "docs/operations.md"
    assert table(page, "code") == {str(code.value): [code.meaning] for code in Exit}
    assert table(page, "state").keys() == {s.value for s in State if s is not State.MISSING}
    assert table(page, "variable").keys() == switch.VARIABLES.keys()
    described = " ".join(table(page, "target"))
    assert {f"make {name}" for name in targets()} == set(re.findall(r"make [a-z-]+", described))


def test_the_flags_of_the_benchmark_are_its_program_s() -> None:
    command = [sys.executable, "-m", "bench.traffic", "--help"]
    text = subprocess.check_output(command, cwd=REPO / "scripts", text=True)
    for flag in table("docs/benchmark.md", "flag, in `ARGS='...'`"):
        assert flag.split()[0] in text


#: The log of a server to the line that README's command prints; None: there is no such file.
LOGS = {
    "missing": (None, ""),
    "empty": ("", ""),
    "without lines of level INFO": ("WARNING [envs.py:1] Unknown variable\n", ""),
    "V1": ("INFO [gpu_model_runner.py:5037] Starting to load model /model...\n", "V1 serves\n"),
    "V2": ("INFO [gpu_worker.py:289] Using V2 Model Runner\n", "V2 serves\n"),
    "started again": ("Using V2 Model Runner\nStarting to load model m...\n", "V1 serves\n"),
    "of two ranks": ("Starting to load model m...\n" * 2, "V1 serves\n"),
}


@pytest.mark.parametrize("case", LOGS)
def test_the_check_of_a_log_names_the_runner(case: str, tmp_path: Path) -> None:
    (command,) = (text for text in blocks(BY_NAME["README.md"], "sh") if "server.log" in text)
    log, expected = LOGS[case]
    if log is not None:
        (tmp_path / "server.log").write_text(log)
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == expected


def test_readme_is_short() -> None:
    assert len(BY_NAME["README.md"].read_text().splitlines()) <= 120


def test_the_documents_are_of_this_version() -> None:
    pages = [page for name, page in BY_NAME.items() if name != "CHANGELOG.md"]
    pages += [REPO / "docs" / "vllm.service", REPO / "docs" / "ansible-play.yml"]
    text = "".join(page.read_text() for page in pages)
    named = re.findall(r"(?:vllm-readiness-overlay-|Readiness overlay )(\d+\.\d+\.\d+)", text)
    assert set(named) == {__version__}
    heading = BY_NAME["CHANGELOG.md"].read_text().partition("\n## ")[2].partition("\n")[0]
    assert __version__ in heading
