"""docs/status.schema.json, and the jq program of docs/operations.md, on real reports."""

import copy
import json
import platform
import re
from pathlib import Path
from typing import Any

import jq  # type: ignore[import-not-found]
import jsonschema
from overlay.errors import Exit
from overlay.pin import PACKAGE
from support.sites import REPO, run

SCHEMA = json.loads((REPO / "docs" / "status.schema.json").read_text())
COMMANDS = ("status", "verify", "apply", "revert", "doctor")
WRITES = ("apply", "revert")


def report(command: str, site: Path, *flags: str) -> Any:
    """JSON report of a command, validated against the schema."""
    done = run(command, "--site", site, "--json", *flags)
    message = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(message)
    assert message["code"] == done.returncode
    return message


def test_every_state_and_outcome_fits_the_schema(site: Path, tmp_path: Path) -> None:
    (info,) = site.glob("*.dist-info")

    def states(*expected: str) -> None:
        seen = [report(name, site).get("state") for name in ("status", "verify", "doctor")]
        assert seen == [*expected] * 3
        for command in COMMANDS:
            message = report(command, site, *(["--dry-run"] if command in WRITES else []))
            assert message["host"] == platform.node()

    states("pristine")
    assert report("apply", site)["changed"]
    states("overlaid")
    target = site / "vllm/one.py"
    ours = target.read_bytes()
    (site / PACKAGE / "a.py").unlink()
    states("partial")
    part = report("verify", site, "--leave=vllm/v1/two.py")
    assert (part["state"], part["installed"]["state"]) == ("other", "partial")
    target.write_bytes(ours + b"# mine\n")
    states("foreign")
    target.unlink()
    states("foreign")
    (tmp_path / "empty").mkdir()
    info.rename(tmp_path / "metadata")
    for command in ("status", "verify", "doctor"):
        assert report(command, site)["distribution"] is None
    for command in COMMANDS:
        absent = report(command, tmp_path / "empty")
        assert (absent["state"], absent["code"]) == ("absent", Exit.ABSENT)


def test_jq_names_the_hosts_that_are_not_as_most_are(site: Path) -> None:
    page = (REPO / "docs" / "operations.md").read_text()
    (program,) = re.findall(r"```jq\n(.*?)```", page, re.DOTALL)
    pristine = report("status", site)
    report("apply", site)
    overlaid = report("status", site)
    hosts = []
    for number in range(100):
        one = copy.deepcopy(pristine if number in (7, 42) else overlaid)
        one["host"] = f"node-{number}"
        hosts.append(one)
    hosts[63]["digest"] = "0" * 64
    digest = pristine["digest"][:12]
    assert sorted(jq.compile(program).input_value(hosts).all()) == [
        f"node-42: pristine, vLLM {pristine['version']}, digest {digest}",
        "node-63: overlaid, vLLM " + overlaid["version"] + ", digest 000000000000",
        f"node-7: pristine, vLLM {pristine['version']}, digest {digest}",
    ]
    assert jq.compile(program).input_value(hosts[:7]).all() == []
