"""docs/ansible-play.yml and docs/vllm.service, run by ansible-core and by a systemd."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import sites
from support.booted import booted
from support.checkouts import archive
from support.sites import OVERLAY, REPO, UPSTREAM

#: Programs of the machine that the unit, the play and the test start.
NEEDED = ("/usr/bin/python3", "/usr/bin/systemd-analyze", "/usr/bin/unshare")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(os.path.exists, NEEDED)),
        reason="only root can run a systemd, if it is installed",
    ),
]

PATCHED = "vllm/v1/core/sched/scheduler.py"
#: Stands in for vLLM's command, which imports gigabytes: it says what it was given, and stays.
SERVE = """\
#!/bin/sh
echo "$(id -un) serves $2 with VLLM_READINESS=$VLLM_READINESS in $HOME"
exec /opt/venv/bin/python -c 'import time; time.sleep(600)' /opt/venv/bin/vllm
"""
#: The unit's output would go to a journal, and its attempts take half a minute.
DROP_IN = (
    "[Service]\nStandardOutput=append:/opt/log\nStandardError=append:/opt/log\nRestartSec=0.1\n"
)


def change(site: Path, text: bytes) -> None:
    """Replace a patched file, as an installer or an editor does, and not through its links."""
    (site / PATCHED).unlink()
    (site / PATCHED).write_bytes(text)


def test_the_play_applies_once_and_the_unit_serves_what_is_verified(tmp_path: Path) -> None:
    """On a venv with the real vLLM: twice, after a reinstall, after an edit; another digest."""
    site = sites.venv(tmp_path / "opt" / "venv", python="/usr/bin/python3")
    shutil.rmtree(site)
    sites.whole(site)
    sites.script(tmp_path / "opt" / "venv" / "bin" / "vllm", "").write_text(SERVE)
    control = archive(tmp_path / "checkout")
    for name in ("ansible-play.yml", "vllm.service"):
        shutil.copy(REPO / "docs" / name, control)
    drop_in = tmp_path / "units" / "vllm.service.d" / "test.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(DROP_IN)
    log = tmp_path / "opt" / "log"
    message = f"/{site.relative_to(tmp_path)}/{PATCHED}: is neither"

    with booted(tmp_path, user="vllm") as inside:

        def run(*command: object) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [*inside, *map(str, command)],
                stdin=subprocess.DEVNULL,  # ansible refuses one that does not block
                capture_output=True,
                text=True,
                check=False,
            )

        def play(digest: str = OVERLAY.digest) -> tuple[str, int, int]:
            """Its output, and how many tasks have failed and changed something."""
            program = Path(sys.executable).with_name("ansible-playbook")
            host = ["--inventory", "vllm,", "--connection", "local", "--extra-vars"]
            given = f"digest={digest} ansible_become=false"
            given += " ansible_python_interpreter=/usr/bin/python3 ansible_pipelining=true"
            done = run(program, *host, given, control / "ansible-play.yml")
            recap = dict(re.findall(r"(\w+)=(\d+)", done.stdout.rpartition("PLAY RECAP")[2]))
            assert "failed" in recap, done.stdout + done.stderr
            assert (done.returncode == 0) is (recap["failed"] == "0"), done.stdout + done.stderr
            return done.stdout, int(recap["failed"]), int(recap["changed"])

        def serving() -> int:
            """The main process of the unit; 0 if it does not run."""
            return int(run("systemctl", "show", "--value", "--property=MainPID", "vllm").stdout)

        output, *counts = play(digest="0" * 64)
        assert counts == [1, 2], output
        assert f"digest after apply: {OVERLAY.digest}" in output
        output, *counts = play()
        assert counts == [0, 2], output
        said = "vllm serves MODEL with VLLM_READINESS=on in /var/lib/vllm\n"
        assert log.read_text() == said
        analysed = run("systemd-analyze", "verify", "/etc/systemd/system/vllm.service")
        assert (analysed.returncode, analysed.stdout + analysed.stderr) == (0, "")
        first = serving()
        assert first
        output, *counts = play()
        assert (counts, serving()) == ([0, 0], first), output

        change(site, (UPSTREAM / PATCHED).read_bytes())
        output, *counts = play()
        assert counts == [0, 3], output
        assert log.read_text() == 2 * said
        second = serving()
        assert second not in (0, first)

        change(site, (site / PATCHED).read_bytes() + b"# mine\n")
        output, *counts = play()
        assert message in output
        assert (counts, serving()) == ([1, 0], second), output
        log.write_text("")
        run("systemctl", "reset-failed", "vllm")  # The play's starts count for the limit, too.
        assert run("systemctl", "restart", "vllm").returncode
        waiting = (
            "for each in $(seq 200); do systemctl is-failed vllm && exit; sleep 0.1; done; exit 1"
        )
        assert run("sh", "-c", waiting).returncode == 0
        assert log.read_text().count(message) == 5
        assert "serves" not in log.read_text()
