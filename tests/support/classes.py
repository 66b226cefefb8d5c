"""A small release in which a worker makes the runner of :mod:`support.series`, and its changes."""

from collections.abc import Mapping

from support import series
from support.series import OTHER, PATH, replaced

WORKER, PLATFORM = "vllm/v1/worker.py", "vllm/platforms/one.py"
BASE = {
    **series.BASE,
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/platforms/__init__.py": "",
    WORKER: '''"""Works."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.runner import Runner


class Worker:
    """Has a runner."""

    def start(self, config):
        from vllm.v1.runner import Runner

        if config is None:
            raise ValueError
        self.runner: Runner = Runner()

    def sample(self, logits):
        return self.runner.sample(logits)
''',
    PLATFORM: '''"""One platform."""


def choose(config):
    config.worker = "vllm.v1.worker.Worker"
''',
}

_RUNNERS = "from vllm.v1.runner import Runner\n\n\n"


def with_files(**texts: str) -> dict[str, str]:
    """The release with more files, below ``vllm/v1``."""
    return {**BASE, **{f"vllm/v1/{name}.py": text for name, text in texts.items()}}


def with_edits(path: str, *edits: tuple[str, str]) -> dict[str, str]:
    """The release with texts of one file replaced."""
    return {**BASE, path: replaced(BASE[path], *edits)}


def _other(body: str, bases: str = "Runner") -> str:
    return f"{_RUNNERS}class Other({bases}):\n    def {body}\n"


_MAKES = "        self.runner: Runner = Runner()\n"
_IMPORT = "        from vllm.v1.runner import Runner\n"
_OTHERS = {OTHER: "class Runner:\n    def sample(self, logits):\n        return 1\n"}

#: Changes after which a class or function with a seam no longer runs, or not always; each with
#: the definition that the review names.
CHANGED: Mapping[str, tuple[dict[str, str], str]] = {
    "the worker imports another runner": (
        with_edits(WORKER, (_IMPORT, "        from vllm.v1.other import Runner\n")) | _OTHERS,
        "vllm.v1.worker.Worker.start",
    ),
    "the worker makes a derived runner of the same name": (
        with_edits(WORKER, (_IMPORT, "        from vllm.v1.other import Runner\n"))
        | {OTHER: "from vllm.v1 import runner\n\n\nclass Runner(runner.Runner):\n    pass\n"},
        "vllm.v1.worker.Worker.start",
    ),
    "the worker makes another one after it": (
        with_edits(WORKER, (_MAKES, f"{_MAKES}        self.runner = config.fast(self.runner)\n")),
        "vllm.v1.worker.Worker.start",
    ),
    "another method gives the worker another runner": (
        with_edits(
            WORKER,
            ("    def sample(", "    def wake(self):\n        from vllm.v1.other import Runner\n\n"
             "        self.runner = Runner()\n\n    def sample("),
        ) | _OTHERS,
        "vllm.v1.worker.Worker.wake",
    ),
    "the worker makes a list of others": (
        with_edits(WORKER, ("= Runner()", "= [Runner() for _ in range(2)]"),
                   (_IMPORT, "        from vllm.v1.other import Runner\n")) | _OTHERS,
        "vllm.v1.worker.Worker.start",
    ),
    "the worker may be given one": (
        with_edits(WORKER, ("= Runner()", "= config.make() if config.make else Runner()")),
        "vllm.v1.worker.Worker.start",
    ),
    "the worker makes one of two": (
        with_edits(WORKER, ("= Runner()", "= Other() if config.new else Runner()"),
                   (_IMPORT, f"{_IMPORT}        from vllm.v1.other import Runner as Other\n"))
        | _OTHERS,
        "vllm.v1.worker.Worker.start",
    ),
    "the worker makes it only under a condition": (
        with_edits(WORKER, (_MAKES, f"        if config.old:\n    {_MAKES}")),
        "vllm.v1.worker.Worker.start",
    ),
    "the worker returns before it makes it": (
        with_edits(WORKER, (_MAKES, f"        if config.new:\n            return\n{_MAKES}")),
        "vllm.v1.worker.Worker.start",
    ),
    "the worker makes none": (
        with_edits(WORKER, (_MAKES, "        self.runner = config.make()\n")),
        "vllm.v1.worker.Worker.start",
    ),
    "the worker has no start any more": (
        {**BASE, WORKER: BASE[WORKER].partition("    def start")[0]},
        "vllm.v1.worker.Worker.start",
    ),
    "the platform names another worker": (
        {
            **with_edits(PLATFORM, ("v1.worker.Worker", "v1.new.Worker")),
            "vllm/v1/new.py": "class Worker:\n    pass\n",
        },
        "vllm.platforms.one.choose",
    ),
    "a derived class overrides a seam": (
        with_files(late=_other("finish(self):\n        return 0")),
        "vllm.v1.late.Other",
    ),
    "a class within a function overrides a seam": (
        with_files(
            late=f"{_RUNNERS}def make():\n    class Inner(Runner):\n"
            "        def finish(self):\n            return 0\n\n    return Inner()\n"
        ),
        "vllm.v1.late.make",
    ),
    "a class derived from a derived one overrides a seam": (
        with_files(
            late=f"{_RUNNERS}class Near(Runner):\n    pass\n\n\n"
            "class Far(Near):\n    def finish(self):\n        return 0\n"
        ),
        "vllm.v1.late.Far",
    ),
    "an override calls the seam only at times": (
        with_files(
            late=_other(
                "finish(self):\n        if self.rows:\n            return 0\n"
                "        return super().finish()"
            )
        ),
        "vllm.v1.late.Other",
    ),
    "a mixin comes before the class with the seam": (
        with_files(
            late=f"{_RUNNERS}class Mixin:\n    def finish(self):\n        return 0\n\n\n"
            "class Other(Mixin, Runner):\n    pass\n"
        ),
        "vllm.v1.late.Other",
    ),
    "a module assigns to the class": (
        with_files(late=f"{_RUNNERS}def fast(self, logits):\n    return 0\n\n\n"
                   "Runner.sample = fast\n"),
        "vllm.v1.late",
    ),
    "a function assigns to the class through its module": (
        with_files(late="import vllm.v1.runner\n\n\ndef patch(fast):\n"
                   "    vllm.v1.runner.Runner.sample = fast\n"),
        "vllm.v1.late.patch",
    ),
    "a module replaces the class": (
        with_files(late="from vllm.v1 import runner\n\nrunner.Runner = None\n"),
        "vllm.v1.late",
    ),
    "a method is set by its name": (
        with_files(late=f'{_RUNNERS}setattr(Runner, "sample", None)\n'),
        "vllm.v1.late",
    ),
    "a module stands in for the module": (
        with_files(late='import sys\n\nsys.modules["vllm.v1.runner"] = sys.modules["vllm.v1"]\n'),
        "vllm.v1.late",
    ),
    "an object is given another method": (
        with_edits(WORKER, (_MAKES, f"{_MAKES}        self.runner.sample = config.sample\n")),
        "vllm.v1.worker.Worker.start",
    ),
    "the class gives its objects another method": (
        with_edits(PATH, ("self.rows = []\n", "self.rows = []\n        self.sample = max\n")),
        "vllm.v1.runner.Runner.__init__",
    ),
    "the module binds its class anew": (
        {**BASE, PATH: BASE[PATH] + "\n\nRunner = print(Runner)\n"},
        "vllm.v1.runner.Runner.sample",
    ),
    "the class defines a method twice": (
        {**BASE, PATH: BASE[PATH] + "\n    def sample(self, logits):\n        return 0\n"},
        "vllm.v1.runner.Runner.sample",
    ),
    "the module imports another class of that name after its own": (
        {**BASE, PATH: BASE[PATH] + "\n\nfrom vllm.v1.other import Runner\n"} | _OTHERS,
        "vllm.v1.runner.Runner.sample",
    ),
}  # fmt: skip

#: Changes that do not concern what has a seam.
UNCHANGED: Mapping[str, dict[str, str]] = {
    "nothing": BASE,
    "a class derives and overrides nothing with a seam": with_files(
        late=_other("drop(self, row):\n        return None")
    ),
    "an object of another class is given a method of that name": with_files(
        late="def patch(model):\n    model.sample = None\n    model.layers.finish = max\n"
    ),
    "another class sets an attribute of that name": with_files(
        late="class Model:\n    def __init__(self):\n        self.sample = self.finish = max\n"
    ),
    "a comparison and a keyword look like assignments": with_files(
        late=f"{_RUNNERS}def ask(runner):\n    return runner.sample == Runner.sample\n"
    ),
}  # fmt: skip
