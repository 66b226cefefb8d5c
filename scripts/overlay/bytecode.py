"""Bytecode of the modules that change: it must not outlive its source.

Python checks a ``.pyc`` against the source's time and size, against its hash, or (unchecked
hash-based, PEP 552) not at all. The last kind would go on running the old module, so the
bytecode of every interpreter is removed before the source is replaced.
"""

from __future__ import annotations

import _imp
import ast
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay import files
from overlay.errors import Exit, OverlayError, denied
from overlay.interpreter import MARK, answer_in
from overlay.staging import STAGED

_UNCHECKED = 0b01

#: Runs under the target's interpreter. Compiles a staged source under the final file's
#: name; the staged file keeps its times when it is renamed, so the bytecode is valid for the
#: final one. Without a umask the bytecode gets its source's mode, so that whoever may read
#: the source may read the bytecode.
_COMPILE = f"""
import importlib.util, json, os, py_compile, sys
os.umask(0)
names = []
for source, final, out in json.load(sys.stdin):
    name = os.path.basename(importlib.util.cache_from_source(final))
    py_compile.compile(source, cfile=out + name, dfile=final, doraise=True,
                       invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    names.append(name)
os.write(1, {MARK!r} + json.dumps(names).encode() + b"\\n")
"""


@dataclass(frozen=True)
class Job:
    """A module to compile.

    Attributes:
        source: the path of its source now.
        final: the path of its source after the rename.
        out: the prefix of the bytecode's path: a directory with a slash at its end, and
            optionally the beginning of a file name.
    """

    source: Path
    final: Path
    out: str


def cached(source: Path) -> list[Path]:
    """Bytecode files of ``source``, of every interpreter and optimisation level."""
    folders = [source.parent / "__pycache__"]
    if prefix := os.environ.get("PYTHONPYCACHEPREFIX"):
        folders.append(Path(prefix) / source.parent.absolute().relative_to("/"))
    pycs = [source.with_suffix(".pyc")] if source.with_suffix(".pyc").exists() else []
    for folder in folders:
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        wanted = (n for n in names if n.startswith(source.stem + ".") and n.endswith(".pyc"))
        pycs += sorted(folder / name for name in wanted)
    return pycs


def stale(source: Path, data: bytes | None) -> list[Path]:
    """Bytecode that Python would run although it is not of ``source``.

    Args:
        source: the module's file, which may be absent.
        data: its bytes, or None if it is absent.
    """
    unchecked = []
    for pyc in cached(source):
        if pyc.parent == source.parent:
            if data is None:  # A lone module.pyc is imported; beside its source it is not.
                unchecked.append(pyc)
            continue
        try:
            head = files.read(pyc)[:16]
        except OSError:
            continue
        flags = int.from_bytes(head[4:8], "little")
        if len(head) < 16 or flags != _UNCHECKED or data is None:
            continue
        # The hash is keyed with the magic number of the interpreter that wrote it.
        magic = int.from_bytes(head[:4], "little")
        if head[8:] != _imp.source_hash(magic, data):
            unchecked.append(pyc)
    return unchecked


def compile_modules(interpreter: Path, jobs: Sequence[Job], lock: int) -> list[str]:
    """Compile modules with the interpreter that will import them.

    Args:
        interpreter: the target's Python.
        jobs: the modules.
        lock: a handle for the child to inherit, so that it holds the lock, too.

    Returns:
        The file name of each job's bytecode, without the prefix ``out``.

    Raises:
        OverlayError: the interpreter does not run, or rejects a module.
    """
    command = [str(interpreter), "-I", "-S", "-c", _COMPILE]
    request = json.dumps([[str(job.source), str(job.final), job.out] for job in jobs])
    try:
        child = subprocess.run(
            command, input=request.encode(), capture_output=True, check=False, pass_fds=[lock]
        )
    except OSError as error:
        raise _cannot_compile(interpreter, error.strerror or str(error)) from None
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    if child.returncode == 0:
        try:
            names = [str(name) for name in json.loads(answer_in(child.stdout))]
            if len(names) == len(jobs):
                return names
        except (ValueError, TypeError):
            pass
        lines = ["it does not answer as Python does"]
    raise _cannot_compile(interpreter, (lines or [f"exit status {child.returncode}"])[-1])


def _cannot_compile(interpreter: Path, message: str) -> OverlayError:
    if system := re.search(r"\[Errno (\d+)\] ([^:]*)(?:: ('[^']*'|\"[^\"]*\"))?", message):
        path = str(ast.literal_eval(system[3])) if system[3] else str(interpreter)
        if ".pyc" in os.path.basename(path):  # A temporary name; name its directory.
            path = os.path.dirname(path).replace(STAGED, "")
        return denied(OSError(int(system[1]), system[2], path), "nothing was written")
    return OverlayError(
        Exit.USAGE,
        f"cannot compile the modules: {message}; nothing was written",
        subject=interpreter,
        next_step="name the Python that runs this vLLM: PYTHON=path (or --python path)",
    )
