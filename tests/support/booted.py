"""A systemd that really runs: PID 1 of its own namespaces, on this machine's files."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: Of the units of this machine only what a service needs; ``/opt`` and the users are the test's.
_BOOT = """\
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /etc/systemd/system
mount -t cgroup2 none /sys/fs/cgroup
mount --bind "$1/opt" /opt
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/console" /dev/console
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
for name in sysinit basic shutdown multi-user network-online; do
  cp "/lib/systemd/system/$name.target" /etc/systemd/system
done
cp -r "$1/units/." /etc/systemd/system
export container=readiness SYSTEMD_UNIT_PATH=/etc/systemd/system SYSTEMD_GENERATOR_PATH=/nowhere
exec /lib/systemd/systemd --unit=multi-user.target --log-target=console
"""
_NAMESPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc")
_GROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


@contextmanager
def booted(folder: Path, user: str) -> Iterator[list[str]]:
    """Boot this machine's systemd; skip the test where namespaces are not permitted.

    Args:
        folder: of the test. Its ``opt`` is ``/opt`` there, its ``units`` are more units, and
            its ``console`` is systemd's log.
        user: a user who is added to those of this machine.

    Yields:
        The words in front of a command that runs there, as root.
    """
    shutil.copy("/etc/passwd", folder / "passwd")
    with (folder / "passwd").open("a") as users:
        users.write(f"{user}:x:64321:65534::/var/lib/{user}:/bin/sh\n")
    (folder / "console").touch()
    (folder / "boot").write_text(_BOOT)
    if subprocess.run(["unshare", *_NAMESPACES, "true"], check=False).returncode:
        pytest.skip("namespaces are not permitted here; stderr says why")
    try:
        group = next(path for path in _GROUPS if (path / "cgroup.procs").exists()) / folder.name
        group.mkdir()
    except (OSError, StopIteration) as error:
        pytest.skip(f"no control group for systemd: {error!r}")
    space = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    command = ["sh", "-c", enter, "sh", *space, "sh", str(folder / "boot"), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as outer:
        try:
            yield _wait(outer)
        finally:
            outer.kill()
            outer.wait()
            _remove(group)


def _wait(outer: "subprocess.Popen[bytes]") -> list[str]:
    """Wait until it is up; return the words in front of a command."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    for _ in range(200):
        assert outer.poll() is None, "systemd has not started; stderr and the console say why"
        if pids := children.read_text().split():
            inside = ["nsenter", "--target", pids[0], "--all", "--", "env"]
            inside += ["-u", "PYTHONPATH", "SYSTEMD_UNIT_PATH=/etc/systemd/system"]
            active = [*inside, "systemctl", "--quiet", "is-active", "multi-user.target"]
            if subprocess.run(active, capture_output=True, check=False).returncode == 0:
                return inside
        time.sleep(0.1)
    raise AssertionError("systemd has not reached multi-user.target in 20 s")


def _remove(group: Path) -> None:
    """Remove an empty control group, whose processes the kernel may still be ending."""
    for _ in range(50):
        if "populated 0" in (group / "cgroup.events").read_text():
            break
        time.sleep(0.1)
    for path in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
        path.rmdir()
    group.rmdir()
