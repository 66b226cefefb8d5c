"""The active environment is the target if none is named, and messages say so."""

import json
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import sites
from support.sites import run, snapshot


def active(**prefixes: object) -> dict[str, str]:
    """The variables of active environments; conda's is not the base environment."""
    names = {"CONDA_DEFAULT_ENV": "mine"} if "CONDA_PREFIX" in prefixes else {}
    return names | {name: str(prefix) for name, prefix in prefixes.items()}


def test_an_active_conda_environment_is_the_target(tmp_path: Path) -> None:
    site = sites.small(sites.prefix(tmp_path / "conda"))
    (tmp_path / "conda" / "lib" / "python3.1").symlink_to(sites.VERSION)  # as conda-forge has it
    before = snapshot(site)
    environment = active(CONDA_PREFIX=tmp_path / "conda")
    applied = run("apply", "--json", env=environment)
    assert applied.returncode == Exit.DONE, applied.stdout
    assert json.loads(applied.stdout)["site"] == str(site)
    assert json.loads(applied.stdout)["interpreter"] == str(tmp_path / "conda" / "bin" / "python")
    assert run("verify", "--venv", tmp_path / "conda").returncode == Exit.DONE
    assert run("revert", env=environment).returncode == Exit.DONE
    assert snapshot(site) == before


def test_conda_s_base_environment_is_used_only_if_it_is_named(tmp_path: Path) -> None:
    site = sites.small(sites.prefix(tmp_path / "conda"))
    before = snapshot(site)
    environment = active(CONDA_PREFIX=tmp_path / "conda", CONDA_DEFAULT_ENV="base")
    refused = run("apply", env=environment)
    assert refused.returncode == Exit.USAGE
    assert "no target is named" in refused.stderr
    assert snapshot(site) == before
    assert run("apply", "--venv", tmp_path / "conda", env=environment).returncode == Exit.DONE


def test_a_conda_environment_without_python_is_none(tmp_path: Path) -> None:
    (tmp_path / "conda" / "bin").mkdir(parents=True)
    assert run("status", env=active(CONDA_PREFIX=tmp_path / "conda")).returncode == Exit.USAGE


@pytest.mark.parametrize("base", [False, True])
def test_a_virtual_environment_goes_before_conda_s(tmp_path: Path, base: bool) -> None:
    other = sites.small(sites.prefix(tmp_path / "conda"))
    before = snapshot(other)
    site = sites.small(sites.venv(tmp_path / "venv"))
    environment = active(VIRTUAL_ENV=tmp_path / "venv", CONDA_PREFIX=tmp_path / "conda")
    environment |= {"CONDA_DEFAULT_ENV": "base"} if base else {}
    done = run("apply", env=environment)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    assert run("verify", "--site", site).returncode == Exit.DONE
    assert snapshot(other) == before


@pytest.mark.parametrize("command", ["apply", "verify"])
def test_a_stale_virtual_env_is_named_in_its_refusal(tmp_path: Path, command: str) -> None:
    gone = tmp_path / "gone"
    refused = run(command, env={"VIRTUAL_ENV": str(gone)})
    assert refused.returncode == Exit.USAGE
    for part in (f"{gone}: does not exist", "named by", "VIRTUAL_ENV", "or unset VIRTUAL_ENV"):
        assert part in refused.stderr
    named = run(command, "--venv", gone, env={"VIRTUAL_ENV": str(gone)})
    assert "VIRTUAL_ENV" not in named.stderr
    error = json.loads(run(command, "--json", env={"VIRTUAL_ENV": str(gone)}).stdout)["error"]
    assert error["named_by"] == "VIRTUAL_ENV"


def test_a_refusal_of_its_files_names_the_variable_too(tmp_path: Path) -> None:
    site = sites.small(sites.prefix(tmp_path / "conda"))
    (site / "vllm" / "envs.py").write_text("")
    environment = active(CONDA_PREFIX=tmp_path / "conda")
    for command in ("apply", "verify"):
        refused = run(command, env=environment)
        assert refused.returncode == Exit.FOREIGN
        assert "CONDA_PREFIX" in refused.stderr
