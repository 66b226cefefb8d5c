"""docs/status.schema.json, and the jq program of docs/operations.md, on real reports."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jq  # type: ignore[import-not-found]
import jsonschema
from overlay.errors import Exit
from support.sites import OVERLAY, REPO, run

SCHEMA = json.loads((REPO / "docs" / "status.schema.json").read_text())
COMMANDS = ("status", "verify", "apply", "revert")


def report(command: str, site: Path, *flags: str) -> Any:
    """What a command prints with --json, which must fit the schema."""
    done = run(command, "--site", site, "--json", *flags)
    message = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(message)
    assert message["code"] == done.returncode
    return message


def test_every_state_and_outcome_fits_the_schema(site: Path, tmp_path: Path) -> None:
    def states(*expected: str) -> None:
        seen = [report(command, site).get("state") for command in COMMANDS[:2]]
        assert seen == [*expected] * 2
        for command in COMMANDS:
            report(command, site, *(["--dry-run"] if command in COMMANDS[2:] else []))

    states("pristine")
    assert report("apply", site)["changed"]
    states("overlaid")
    target = site / OVERLAY.targets[0]
    ours = target.read_bytes()
    (site / OVERLAY.added[0]).unlink()
    states("partial")
    target.write_bytes(ours + b"# mine\n")
    states("foreign")
    target.unlink()
    states("foreign")
    (tmp_path / "empty").mkdir()
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
