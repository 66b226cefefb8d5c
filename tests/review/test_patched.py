"""Every change in a file that the patches change needs eyes, if anything that runs has changed."""

import ast
from typing import Any

import pytest
from review import patched
from review.definitions import Definitions
from support.series import replaced, upstream

PATH = "vllm/v1/runner.py"
BASE = '''\
"""Runs."""

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.batch import Batch
from vllm.v1.sampler import Sampler

if TYPE_CHECKING:
    from vllm.config import Config

logger = init_logger(__name__)

LIMIT = 8
MORE = 9

if LIMIT:
    register(Batch)
else:
    register(Sampler)


class Runner:
    """Holds rows."""

    #: Their number.
    size: int = 0

    def __init__(self, config: "Config") -> None:
        self.rows = np.zeros(LIMIT)
        self.sampler = Sampler()

    @property
    def first(self) -> int:
        return self.rows[0]

    def drop(self, row: int) -> None:
        """Drop one."""
        logger.info("dropped %d", row)
        del self.rows[row]

    def finish(self) -> int:
        return sum(self.rows)


def run(runner: Runner) -> int:
    return runner.finish()


class Other:
    def swap(self) -> None: ...

    def move(self) -> None: ...
'''


def examined(text: str, known: set[str] | None = None) -> list[dict[str, Any]]:
    ast.parse(text)
    before, after = (Definitions(upstream({PATH: side})) for side in (BASE, text))
    return patched.examine([PATH], before, after, known or set(), {"rows", "sampler"})


def counted(text: str) -> list[tuple[str, str]]:
    return [
        (found["kind"], found["what"].removeprefix("vllm.v1.runner."))
        for found in examined(text)
        if found["counts"]
    ]


@pytest.mark.parametrize(
    ("old", "new", "kind", "what"),
    [
        pytest.param(*edit, id=name)
        for name, edit in {
            "import swapped": (
                *("from vllm.v1.sampler import Sampler", "from vllm.v2.sampler import Sampler"),
                *("changed", "imports"),
            ),
            "import under another name": (
                *("from vllm.v1.batch import Batch", "from vllm.v1.batch import Row as Batch"),
                *("changed", "imports"),
            ),
            "import with effects": (
                *("import numpy as np\n", "import numpy as np\nimport vllm.patches\n"),
                *("changed", "imports"),
            ),
            "import that hides a name": (
                *("import Sampler\n", "import Sampler, sum\n"),
                *("changed", "imports"),
            ),
            "import made conditional": (
                "from vllm.v1.batch import Batch\n",
                *("try:\n    from vllm.v1.batch import Batch\nexcept KeyError:\n    Batch = 0\n",),
                *("changed", "imports"),
            ),
            "new method": (
                "    def finish(",
                "    def sort(self) -> None:\n        self.rows.sort()\n\n    def finish(",
                *("new", "Runner.sort"),
            ),
            "new caller": ("return runner.finish()", "return runner.finish() or runner.drop(0)",
                           "changed", "run"),
            "initial state": ("np.zeros(LIMIT)", "np.ones(LIMIT)", "changed", "Runner.__init__"),
            "function gone": (
                *("def run(runner: Runner) -> int:\n    return runner.finish()\n", ""),
                *("gone", "run"),
            ),
            "decorator": ("    def finish(", "    @cached\n    def finish(", "changed",
                          "Runner.finish"),
            "default": ("row: int)", "row: int = 0)", "changed", "Runner.drop"),
            "number of another type": ("size: int = 0", "size: int = False", "changed",
                                       "Runner.size"),
            "constant": ("LIMIT = 8", "LIMIT = 7", "changed", "LIMIT"),
            "base class": ("class Other:", "class Other(Runner):", "changed", "Other"),
            "call at the top level": ("register(Batch)", "register(Batch, 1)", "new",
                                      "register(Batch, 1)"),
            "condition": ("if LIMIT:", "if MORE:", "changed", "register(Batch)"),
            "new class": (
                *("def run(", "class New(Runner):\n    def one(self) -> int: ...\n\n\ndef run("),
                *("new", "New"),
            ),
            "monkeypatch": ("class Other:", "Runner.finish = run\n\n\nclass Other:", "new",
                            "Runner.finish ="),
            "value of a log message": ('logger.info("dropped %d", row)',
                                       'logger.info("dropped %d", self.rows.pop())',
                                       "changed", "Runner.drop"),
            "order of constants": ("LIMIT = 8\nMORE = 9\n", "MORE = 9\nLIMIT = 8\n",
                                   "changed", "order"),
        }.items()
    ],
)  # fmt: skip
def test_a_change_is_said_by_name(old: str, new: str, kind: str, what: str) -> None:
    assert (kind, what) in counted(replaced(BASE, (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(*edit, id=name)
        for name, edit in {
            "comment": ("LIMIT = 8\n", "LIMIT = 8  # rows\n"),
            "docstring": ('"""Drop one."""', '"""Drop\n\n        another.\n        """'),
            "text that documents an attribute": (
                *("    size: int = 0\n", '    size: int = 0\n    """Their number."""\n'),
            ),
            "layout": ("self, row: int)", "self,\n        row: int,\n    )"),
            "quotes around an annotation": ('config: "Config"', "config: Config"),
            "order of imports": (
                *("import numpy as np\nfrom vllm.v1.batch import Batch\n",),
                *("from vllm.v1.batch import Batch\nimport numpy as np\n",),
            ),
            "order of functions": (
                "    def swap(self) -> None: ...\n\n    def move(self) -> None: ...\n",
                "    def move(self) -> None: ...\n\n    def swap(self) -> None: ...\n",
            ),
            "import that is never made": ("import Config", "import Config, Other"),
            "text of a log message": ('"dropped %d"', '"Dropped row %d."'),
            "import of a new name from a known module": (
                *("import Batch\n", "import Batch, BatchOfAnotherKind\n"),
            ),
        }.items()
    ],
)
def test_what_nothing_depends_on_does_not_count(old: str, new: str) -> None:
    assert counted(replaced(BASE, (old, new))) == []


def test_what_is_set_aside_is_listed_and_warns_of_nothing() -> None:
    findings = examined(replaced(BASE, ("import Config", "import Config, Other")))
    assert [found["what"] for found in findings] == ["vllm.v1.runner.imports under TYPE_CHECKING"]
    assert list(patched.warnings(findings)) == []
    assert patched.section(findings, ("1.0", "1.1"))[3] == []


def test_not_type_checking_runs() -> None:
    """Only the block that never runs is set aside, not the one beside it."""
    block = "if TYPE_CHECKING:\n    from vllm.config import Config\nelse:\n    Config = {}\n"
    text = replaced(BASE, ("if TYPE_CHECKING:\n    from vllm.config import Config\n", block))
    assert ("new", "Config") in counted(text)
    text = replaced(BASE, ("if TYPE_CHECKING:", "if not TYPE_CHECKING:"))
    assert ("changed", "imports") in counted(text)


def test_a_new_class_is_one_finding_with_its_text() -> None:
    new = "class New:\n    def one(self) -> int: ...\n\n    def two(self) -> int: ...\n\n\n"
    (found,) = examined(replaced(BASE, ("def run(", f"{new}def run(")))
    assert found["diff"].count("\n+") == 4
    assert "+    def two(self) -> int: ..." in found["diff"]


def test_what_is_shown_elsewhere_is_left_out() -> None:
    text = replaced(BASE, ("LIMIT = 8", "LIMIT = 7"), ("sum(self.rows)", "max(self.rows)"))
    (found,) = examined(text, {"vllm.v1.runner.LIMIT"})
    assert found["what"] == "vllm.v1.runner.Runner.finish"
    assert "-        return sum(self.rows)\n+        return max(self.rows)" in found["diff"]
    (warning,) = patched.warnings([found])
    assert warning == f"{PATH}, which a patch changes, has changed in Runner.finish"


def test_what_touches_our_names_comes_first() -> None:
    text = replaced(BASE, ("LIMIT = 8", "LIMIT = 7"), ("Sampler()", "Sampler(self.rows)"))
    findings = examined(text)
    assert [(found["what"].rpartition(".")[2], found["touches"]) for found in findings] == [
        ("__init__", ["rows", "sampler"]),
        ("LIMIT", []),
    ]
    assert "touches rows, sampler" in findings[0]["why"]


def test_a_file_that_the_release_lacks_is_left_out() -> None:
    before, after = (Definitions(upstream(files)) for files in ({PATH: BASE}, {}))
    assert patched.examine([PATH], before, after, set(), set()) == []
