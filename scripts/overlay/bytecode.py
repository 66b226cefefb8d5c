"""Compile the changed modules, and find their bytecode.

Python validates a ``.pyc`` by its source's mtime and size, or by its source's hash; unchecked
hash-based files (PEP 552) not at all. It never validates the code behind this header.
"""

from __future__ import annotations

import _imp
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from overlay.errors import denied, usage
from overlay.files import STAGED, head
from overlay.interpreter import MARK, NoAnswer, NotStarted, answer

#: Flags of a file with a hash that Python does not check, in its header.
_UNCHECKED = b"\1\0\0\0"

#: Program for the target's interpreter: compiles each staged source under the final file's name.
#: The rename keeps the staged file's mtime, so the bytecode stays valid. With SOURCE_DATE_EPOCH,
#: as in py_compile, the header has the source's hash instead of its mtime: every build has the
#: same bytes, even if the builder sets all mtimes. py_compile itself hides a full disk before 3.13.
_COMPILE = f"""
import sys
sys.path = [path for path in sys.path if path]  # The empty entry is the current directory.
import importlib.util, json, marshal, os
names, error, refused = [], None, None
def header(source, data):
    if os.environ.get("SOURCE_DATE_EPOCH"):
        return b"\\3\\0\\0\\0" + importlib.util.source_hash(data)
    facts = 0, int(os.stat(source).st_mtime), len(data)
    return b"".join((n & 0xFFFFFFFF).to_bytes(4, "little") for n in facts)
try:
    for source, final, out in json.load(sys.stdin):
        name = os.path.basename(importlib.util.cache_from_source(final))
        with open(source, "rb") as text:
            data = text.read()
        try:
            code = compile(data, final, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error_in_source:
            refused = final, str(error_in_source) or type(error_in_source).__name__
            break
        with open(out + name, "xb") as pyc:
            pyc.write(importlib.util.MAGIC_NUMBER + header(source, data) + marshal.dumps(code))
        names.append(name)
except OSError as system:
    error = system.errno, system.strerror or str(system), str(system.filename or out + name)
os.write(1, {MARK!r} + json.dumps([names, error, refused]).encode() + b"\\n")
"""


#: Program that compares bytecode with its source: answers with the files that this interpreter
#: would run although their code differs. Line tables do not count: -X no_debug_ranges shortens
#: them; nor do file names, which an import replaces. Damaged bytecode may crash marshal, so the
#: answer names a file before it is loaded, and may name sizes that fill the memory, so the process
#: has a limit of 2 GiB.
_COMPARE = f"""
import sys
sys.path = [path for path in sys.path if path]
import importlib.util, json, marshal, os, resource, types
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (min(most, 1 << 31) if most > 0 else 1 << 31, most))
def runs(head, source, data):
    flags = int.from_bytes(head[4:8], "little")
    if len(head) < 16 or head[:4] != importlib.util.MAGIC_NUMBER or flags & ~3:
        return False
    if flags & 1:
        return not flags & 2 or head[8:] == importlib.util.source_hash(data)
    facts = int(os.stat(source).st_mtime), len(data)
    return head[8:] == b"".join((n & 0xFFFFFFFF).to_bytes(4, "little") for n in facts)
def bare(code):
    inner = (bare(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=tuple(inner))
def differs(pyc, code):
    try:
        return bare(marshal.loads(pyc)) != bare(code)
    except (EOFError, ValueError, TypeError, AttributeError, MemoryError, RecursionError):
        return True
def say(paths):
    os.write(1, {MARK!r} + json.dumps(paths).encode() + b"\\n")
false = []
for source in json.load(sys.stdin):
    for level in ("", 1, 2, 3):
        path = importlib.util.cache_from_source(source, optimization=level)
        try:
            with open(path, "rb") as pyc, open(source, "rb") as text:
                head, code, data = pyc.read(16), pyc.read(), text.read()
        except OSError:
            continue
        if runs(head, source, data):
            expected = compile(data, source, "exec", dont_inherit=True, optimize=min(level or 0, 2))
            if code != marshal.dumps(expected):
                say(false + [path])
                if differs(code, expected):
                    false.append(path)
                say(None)
say(false)
"""


def cached(source: Path) -> list[Path]:
    """Return the bytecode files of ``source``, for all interpreters and optimisation levels.

    >>> cached(site / "vllm/one.py")
    []
    """
    folder = source.parent / "__pycache__"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    wanted = (n for n in names if n.startswith(source.stem + ".") and n.endswith(".pyc"))
    return sorted(folder / name for name in wanted)


def stale(source: Path, data: bytes) -> list[Path]:
    """Return the bytecode that Python would run although it does not match ``source``.

    ``data`` holds the bytes of ``source``.

    >>> stale(site / "vllm/one.py", b"A = 1")
    []
    """
    unchecked = []
    for pyc in cached(source):
        start = head(pyc, 16)
        if len(start) < 16 or start[4:8] != _UNCHECKED:
            continue
        # The hash is keyed with the magic number of the interpreter that wrote it.
        magic = int.from_bytes(start[:4], "little")
        if start[8:] != _imp.source_hash(magic, data):
            unchecked.append(pyc)
    return unchecked


def false(interpreter: Path | None, sources: Iterable[Path]) -> list[Path]:
    """Return the bytecode that Python would run although its code is not that of its source.

    The target's interpreter compares, or without one the interpreter of this process. Bytecode of
    other versions of Python is not compared, nor any if neither interpreter can be started.

    Raises:
        OverlayError: the interpreter does not answer in time, or fails to compare.

    >>> false(None, [site / "vllm/one.py"])
    []
    """
    modules = [str(source) for source in sources if cached(source)]
    if not modules:
        return []
    reason, own = None, Path(sys.executable)
    for python in [interpreter, own] if interpreter else [own]:
        try:
            paths = answer(python, _COMPARE, "-I", "-S", request=modules)
        except NotStarted:
            continue
        except NoAnswer as failure:
            reason = str(failure).splitlines()[-1]
        else:
            if paths is not None:
                return [Path(path) for path in paths]
            reason = "it was ended"
    if reason is None:
        return []
    raise usage(
        f"cannot compare bytecode with its source: {reason}",
        "raise limits of memory, or name the Python that runs this vLLM: --python=INTERPRETER",
        own,
    )


def compile_modules(interpreter: Path, sources: Mapping[Path, Path], lock: int) -> list[Path]:
    """Compile modules with the target's interpreter, to staged files.

    Args:
        interpreter: the target's Python.
        sources: maps each module's final path to the present path of its source. The
            ``__pycache__`` directories must exist.
        lock: file descriptor of the lock. The child inherits it, and then also holds the lock.

    Returns:
        The final path of each module's bytecode.

    Raises:
        OverlayError: the interpreter does not run, or rejects a module.

    >>> (site / "vllm/__pycache__").mkdir()
    >>> module = site / "vllm/one.py"
    >>> [pyc.parent.name for pyc in compile_modules(Path(sys.executable), {module: module}, 1)]
    ['__pycache__']
    """
    caches = [final.parent / "__pycache__" for final in sources]
    request = [
        (str(source), str(final), str(cache / STAGED))
        for cache, (final, source) in zip(caches, sources.items(), strict=True)
    ]
    try:
        names, error, refused = answer(
            interpreter, _COMPILE, "-s", "-S", request=request, inherited=[lock]
        )
    except NoAnswer as failure:
        raise usage(
            f"cannot compile the modules: {str(failure).splitlines()[-1]}; nothing was written",
            "name the Python that runs this vLLM: --python=INTERPRETER",
            interpreter,
        ) from None
    if refused:
        final, reason = refused
        raise usage(
            f"does not compile with {interpreter}: {reason}; nothing was written",
            "remove the extra patch that changes it, or name the Python that runs this vLLM: "
            "--python=INTERPRETER",
            final,
        )
    if error:
        number, reason, path = error
        path = os.path.dirname(path) if ".pyc" in path else path
        raise denied(OSError(number, reason, path), "nothing was written")
    return [cache / name for cache, name in zip(caches, names, strict=True)]
