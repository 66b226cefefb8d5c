"""The digest that an engine logs is the one that `status` prints."""

from pathlib import Path

from overlay.installation import locate
from overlay.pin import PACKAGE
from overlay.source import PROVENANCE
from overlay.state import inspect
from support import sites
from vllm.v1.readiness.engine import identity


def test_the_digest_is_the_tool_s(tmp_path: Path) -> None:
    site = sites.small(tmp_path / "site")
    sites.run("apply", "--site", site)

    def both() -> tuple[str | None, str]:
        logged = identity.digest(site / PROVENANCE, site)
        return logged, inspect(locate(site=str(site)), sites.OVERLAY).digest

    whole, status = both()
    assert whole == status
    (site / PACKAGE / "version.py").write_text("# changed\n")
    changed, status = both()
    assert changed == status != whole
    (site / PACKAGE / "version.py").unlink()
    lost, status = both()
    assert lost == status not in (whole, changed)


def test_a_checkout_has_no_digest(tmp_path: Path) -> None:
    assert identity.digest(tmp_path / "provenance", tmp_path) is None
    assert identity.left_out(tmp_path / "provenance") == frozenset()


def test_the_pin_says_what_was_left_out(tmp_path: Path) -> None:
    assert identity.left_out(sites.REPO) == frozenset()
    pin = tmp_path / "VERSION_PIN"
    pin.write_text("[release]\noverlay = 0\nwithout = penalties,sessions\n\n[archives]\n")
    assert identity.left_out(tmp_path) == {"penalties", "sessions"}
