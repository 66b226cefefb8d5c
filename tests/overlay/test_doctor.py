"""`overlay doctor`: what is there, who uses it, and what apply would do."""

import json
from pathlib import Path

from overlay.errors import Exit
from support.sites import OVERLAY, run, snapshot
from vllm.v1.readiness import registry


def findings(site: Path) -> dict[str, str]:
    """The report's lines; the last of each name."""
    done = run("doctor", "--site", site, "--json")
    message = json.loads(done.stdout)
    assert message["code"] == done.returncode
    return {each["about"]: each["text"] for each in message["findings"]}


def test_it_says_what_apply_would_do_and_does_nothing(site: Path) -> None:
    before = snapshot(site)
    count = len(OVERLAY.targets) + len(OVERLAY.added)
    found = findings(site)
    assert found["apply"] == f"of overlay {OVERLAY.pin.overlay} would change {count} files"
    assert str(site) in found["vLLM"]
    for device, other in (("GPU", "cpu"), ("CPU", "gpu")):
        idle = found[f"V1, {device}"].partition(" but ")[2].split(", ")
        assert idle == sorted(word for word in registry.WORDS.values() if word.device == other)
    acting = found["V2"].partition(": ")[2].split(", ")
    assert acting == sorted(word for word in registry.WORDS.values() if word.on_v2)
    assert snapshot(site) == before
    run("apply", "--site", site)
    assert findings(site)["apply"].endswith("has nothing to do")


def test_a_refusal_is_its_exit_code_and_names_the_file(site: Path) -> None:
    (site / OVERLAY.targets[0]).write_bytes(b"# mine\n")
    done = run("doctor", "--site", site)
    assert done.returncode == run("apply", "--site", site).returncode == Exit.FOREIGN
    assert OVERLAY.targets[0] in done.stdout.splitlines()[-1]
    assert done.stderr == ""
