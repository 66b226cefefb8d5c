"""Exit codes, and the error type that carries them."""

from __future__ import annotations

import enum
import errno
import os

from overlay import hints
from overlay.output import escaped


class Exit(enum.IntEnum):
    """Exit codes of all commands, as in docs/operations.md."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        """Make a member of its code and its meaning."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    DONE = 0, "done, or nothing to do"
    FAULT = 1, "this copy of the overlay is damaged or stale, or the tool has a bug"
    USAGE = 2, "usage: an argument is wrong, or no target was named"
    ABSENT = 3, "no vLLM, or one that cannot be overlaid (editable, source checkout, ambiguous)"
    RELEASE = 4, "a vLLM of another release"
    FOREIGN = 5, "a file is neither upstream's nor this version's"
    PARTIAL = 6, "partial: an interrupted run, or bytecode of other code; apply or revert mends it"
    BUSY = 7, "busy: another run holds the lock, or a process serves from the installation"
    DENIED = 8, "not permitted, read-only, or no space"
    PRISTINE = 9, "verify and exec only: vLLM is installed without the overlay"
    DIGEST = 10, "verify and exec only: the overlay is whole, but --digest names another"


#: Codes that name a state of the target.
_OF_THE_TARGET = (Exit.ABSENT, Exit.RELEASE, Exit.FOREIGN, Exit.PARTIAL, Exit.PRISTINE)


class OverlayError(Exception):
    """A refusal or failure, with the next step to take.

    Attributes:
        code: the process's exit code.
        reason: one sentence, without its subject if ``subject`` is set.
        subject: the subject of ``reason``: a file, directory or argument, if any.
        expected: phrase for the accepted value, if known.
        found: phrase for the present value, if known.
        next_step: advice to the user.
    """

    def __init__(
        self,
        code: Exit,
        reason: str,
        *,
        subject: str | os.PathLike[str] | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str,
    ) -> None:
        self.code = code
        self.reason = hints.written(reason)
        self.subject = None if subject is None else os.fspath(subject)
        self.expected = expected
        self.found = found
        self.next_step = hints.written(next_step)
        if hints.own_environment() == "incomplete" and code in _OF_THE_TARGET:
            self.next_step = "run `make apply`, which makes or completes .venv"
        elif hints.own_environment() and code is Exit.ABSENT:
            self.next_step += "; or delete .venv, and run `make apply`, which makes it"
        super().__init__(str(self))

    def __str__(self) -> str:
        rows = [
            ("expected", self.expected),
            ("found", self.found),
            ("named by", hints.named_by),
            ("next", self.next_step),
        ]
        # A reason may quote several lines of another program's output.
        reason = "\n  | ".join(map(escaped, self.reason.split("\n")))
        head = reason if self.subject is None else f"{escaped(self.subject)}: {reason}"
        return "\n".join([head] + [f"  {name:<9} {escaped(text)}" for name, text in rows if text])

    @property
    def line(self) -> str:
        """Error and next step, on one line."""
        head = self.reason if self.subject is None else f"{self.subject}: {self.reason}"
        named = f" (named by {hints.named_by})" if hints.named_by else ""
        return escaped(f"{head}{named}; next: {self.next_step}")

    def to_json(self) -> dict[str, object]:
        """Return the error as plain values, for ``--json``."""
        return {
            "code": int(self.code),
            "name": self.code.name.lower(),
            "reason": self.reason,
            "subject": self.subject,
            "expected": self.expected,
            "found": self.found,
            "named_by": hints.named_by,
            "next": self.next_step,
        }


def usage(
    reason: str, next_step: str, subject: str | os.PathLike[str] | None = None
) -> OverlayError:
    """Return the error for a wrong or missing argument.

    >>> usage("is empty", "name a directory", "--venv=").line
    '--venv=: is empty; next: name a directory'
    """
    return OverlayError(Exit.USAGE, reason, subject=subject, next_step=next_step)


def damaged(reason: str, subject: str | os.PathLike[str]) -> OverlayError:
    """Return the error for an inconsistent copy of the overlay.

    >>> damaged("lists a patch twice", "series").code
    <Exit.FAULT: 1>
    """
    return OverlayError(
        Exit.FAULT,
        reason,
        subject=subject,
        next_step="authors run `make refresh`; others get a fresh copy of the overlay",
    )


_NEXT_STEP = {
    errno.ENOSPC: "free some space there and run the same command again",
    errno.EDQUOT: "free some of your quota there and run the same command again",
    errno.EROFS: "the file system is read-only: apply the overlay when its image is built",
    errno.EPERM: "run as the owner of the installation (the file may also be immutable: lsattr)",
    errno.EACCES: "run as the owner of the installation",
}


def denied(error: OSError, written: str) -> OverlayError:
    """Return the error for a failed system call; ``written`` says which files were written.

    >>> denied(OSError(errno.ENOSPC, "No space left", "one.py"), "nothing was written").line
    'one.py: No space left; nothing was written; next: free some space there and run...'
    """
    return OverlayError(
        Exit.DENIED,
        f"{error.strerror or error}; {written}",
        subject=error.filename if isinstance(error.filename, str) else None,
        next_step=_NEXT_STEP.get(error.errno or 0, "fix that and run the same command again"),
    )
