"""What a pod and a CI job run before vLLM serves, as docs/operations.md has it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from overlay.errors import Exit
from overlay.source import Overlay
from support import mini, sites
from support.sites import OVERLAY, REPO, run, venv

PAGE = (REPO / "docs" / "operations.md").read_text()
POD, STEPS = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
ENV = Path(sys.executable).parent
#: Where the page has the tool.
PLACE = f"/opt/vllm-readiness-overlay-{OVERLAY.pin.overlay}"
STATES = {
    "overlaid": Exit.DONE,
    "pristine": Exit.PRISTINE,
    "partial": Exit.PARTIAL,
    "foreign": Exit.FOREIGN,
    "absent": Exit.ABSENT,
    "another release": Exit.RELEASE,
}


def bring(site: Path, state: str) -> None:
    """Bring a pristine installation into a state."""
    target = site / "vllm/one.py"
    upstream = target.read_bytes()
    if state in ("overlaid", "partial"):
        assert run("apply", "--site", site).returncode == Exit.DONE
    if state == "partial":
        target.write_bytes(upstream)
    if state in ("foreign", "another release"):
        target.write_bytes(upstream + b"# mine\n")
    if state == "another release":
        mini.state_version(site, "99.1")
    if state == "absent":
        shutil.rmtree(site / "vllm")
        shutil.rmtree(site / mini.INFO)


def environment(folder: Path) -> Mapping[str, str]:
    """The variables of a process in which the environment's programs are the first on PATH."""
    kept = {k: v for k, v in os.environ.items() if k not in sites.AMBIENT}
    return {**kept, "PATH": f"{folder / 'bin'}:{os.defpath}"}


def validate(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    program, *arguments = command
    words = [str(ENV / program), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


# A pod.


def start(container: Mapping[str, Any], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a container's process: its command and arguments, without a shell."""
    words = [*container["command"], *container.get("args", [])]
    words = [word.replace(PLACE, str(sites.tool().parents[1])) for word in words]
    env = environment(folder)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env, cwd="/")


@pytest.fixture
def image(tmp_path: Path, worded: Overlay) -> tuple[Path, Path]:
    """An environment whose `vllm` prints its arguments, and its site-packages."""
    folder = tmp_path / "image"
    site = mini.install(venv(folder))
    sites.script(folder / "bin" / "vllm", 'echo "serves: $*"')
    return folder, site


@pytest.mark.parametrize("state", STATES)
def test_a_pod_serves_only_with_the_overlay(image: tuple[Path, Path], state: str) -> None:
    folder, site = image
    bring(site, state)
    before = sites.snapshot(site, bytecode=True)
    (verify,), (server,) = POD["spec"]["initContainers"], POD["spec"]["containers"]
    for container, output in ((verify, ""), (server, "serves: serve MODEL\n")):
        done = start(container, folder)
        assert done.returncode == STATES[state], done.stderr
        if state == "overlaid":
            assert (done.stdout, done.stderr) == (output, "")
            continue
        # The end of the log is what `kubectl describe pod` shows.
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "; next: " in done.stderr
    assert sites.snapshot(site, bytecode=True) == before


def test_the_pod_is_one_by_kubernetes_own_schema(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    command = ("kubernetes-validate", "--strict", file)
    file.write_text(yaml.safe_dump(POD))
    good = validate(*command)
    assert good.returncode == 0, good.stdout + good.stderr


# A CI job.


@pytest.mark.parametrize("state", STATES)
def test_a_job_mends_a_reinstall_and_fails_on_all_else(
    tmp_path: Path, worded: Overlay, state: str
) -> None:
    site = mini.install(venv(tmp_path / ".venv"))
    bring(site, state)
    before = sites.snapshot(site, bytecode=True)
    (step,) = STEPS
    mended = state in ("overlaid", "pristine", "partial")
    script = tmp_path / "script.sh"
    script.write_text(step["run"].replace(PLACE, str(sites.tool().parents[1])))
    # As GitHub's runner does where a step names no shell.
    done = subprocess.run(
        ["bash", "-e", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path / ".venv"),
    )
    assert done.returncode == (Exit.DONE if mended else STATES[state]), done.stderr
    report = json.loads((tmp_path / "overlay.json").read_text())
    assert report["code"] == STATES[state]
    assert done.stderr.count("\n") == (state != "overlaid")
    if mended:
        assert run("verify", "--site", site).returncode == Exit.DONE
    else:
        assert json.loads(done.stdout) == report
        assert sites.snapshot(site, bytecode=True) == before


def test_the_step_is_one_by_github_s_schema(tmp_path: Path) -> None:
    file = tmp_path / "workflow.yaml"
    command = ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", file)
    job = {"runs-on": "ubuntu-latest", "steps": STEPS}
    file.write_text(yaml.safe_dump({"on": "push", "jobs": {"overlay": job}}))
    done = validate(*command)
    assert done.returncode == 0, done.stdout + done.stderr
