"""The ranks of an engine agree on the overlay, or the engine does not start.

Ranks with different files or a different switch sample different tokens from the same logits,
or wait for each other for ever. Each rank announces what it runs in the store of torch's
default process group, and reads what the others have announced.

The store is used, and no collective: a rank without the overlay takes no part in ours, and its
next collective would be paired with it. Such a rank is found because it announces nothing.
"""

# mirrors: nothing

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed
from torch.distributed import DistError, Store
from torch.distributed.distributed_c10d import _get_default_store
from vllm.logger import init_logger
from vllm.v1.readiness.engine import identity, switch
from vllm.v1.readiness.version import __version__

logger = init_logger(__name__)

#: Seconds until a rank that has announced nothing counts as one without the overlay. Ranks
#: arrive within seconds of each other, since they have just made their groups together.
PATIENCE = 120.0
#: Seconds until the log names the ranks that are waited for.
_QUIET = 10.0
#: Seconds between two looks at the store.
_PAUSE = 0.02
#: Seconds for which a rank that refuses lets the others read: it may hold the store.
_FAREWELL = 5.0
#: Digits of a digest in the table.
_DIGITS = 12


class RanksError(RuntimeError):
    """The ranks of an engine run different overlays, or a rank runs none.

    Attributes:
        ranks: the ranks that differ from most, and those that did not answer.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        """``message`` names the ranks, and what to do."""
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Announcement:
    """What one rank runs.

    Attributes:
        host: the name of its machine.
        site: the site-packages directory that it imports vLLM from.
        version: of the overlay.
        digest: of the installed files; empty if the overlay is imported from a checkout.
        value: the value of VLLM_READINESS; empty if unset.
        on: the features and fixes that are on, sorted.
    """

    host: str
    site: str
    version: str
    digest: str
    value: str
    on: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """What all ranks must have in common."""
        return self.version, self.digest, self.on

    @classmethod
    def read(cls, text: bytes) -> "Announcement":
        """Read what :meth:`written` gave; what another version of the overlay left out is empty."""
        fields = json.loads(text)
        names = ("host", "site", "version", "digest", "value")
        strings = {name: str(fields.get(name, "")) for name in names}
        return cls(**strings, on=tuple(fields.get("on", ())))

    def written(self) -> bytes:
        """The announcement as JSON."""
        return json.dumps(asdict(self)).encode()


def check(digest: str | None) -> None:
    """Compare this rank with the others; called once, when its groups are there.

    An engine of one rank does nothing. With ``off`` a rank only announces itself, so that the
    others need not take it for one without the overlay.

    Args:
        digest: of the installed files; None for a checkout.

    Raises:
        RanksError: ranks differ, or a rank did not answer, unless VLLM_READINESS_RANKS says
            otherwise.
        SwitchError: VLLM_READINESS_RANKS or VLLM_READINESS holds anything else.
    """
    mode = switch.ranks()
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    value, on = os.environ.get(switch.NAME, ""), tuple(sorted(switch.enabled()))
    own = Announcement(
        socket.gethostname(), str(identity.SITE), __version__, digest or "", value, on
    )
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        _Meeting(_get_default_store(), rank, size).hold(own, wait=mode != "off")
    except RanksError as error:
        if mode == "error":
            raise
        logger.warning("%s", error)


class _Meeting:
    """One comparison of all ranks of a store.

    Args:
        store: of the process group.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._folder = ""

    def hold(self, own: Announcement, wait: bool) -> None:
        """Announce this rank, and compare it with the others if ``wait``.

        Raises:
            RanksError: ranks differ or did not answer, or the store is lost.
        """
        try:
            # A process group may outlive an engine: each engine counts as another meeting.
            number = self._store.add(f"readiness/{self._rank}/meetings", 1)
            self._folder = f"readiness/meeting {number}"
            self._store.set(self._key(self._rank), own.written())
            if not wait:
                return
            announced = self._wait()
            self._store.set(self._key(self._rank, "has read"), b"")
            error = refusal(announced, self._size)
            if error is not None:
                # Once all have read, the rank that holds the store may be gone.
                with suppress(DistError):
                    self._let_read(announced)
        except DistError as lost:
            raise RanksError(
                f"Readiness overlay: rank {self._rank} could not compare itself with the other "
                f"ranks: the store of their process group is lost ({lost}). Another rank has "
                f"ended; its log says why."
            ) from lost
        if error is not None:
            raise error

    def _key(self, rank: int, word: str = "runs") -> str:
        return f"{self._folder}/{rank} {word}"

    def _wait(self) -> Mapping[int, Announcement]:
        """Wait until all ranks have announced themselves, or one rank has waited long enough.

        Returns:
            The announcements by rank.
        """
        start, named = time.monotonic(), False
        over = f"{self._folder} is over"
        while len(present := self._present("runs", range(self._size))) < self._size:
            waited = time.monotonic() - start
            if waited > PATIENCE:
                self._store.set(over, b"")
            if self._store.check([over]):
                # Somebody may have come while this rank looked.
                present = self._present("runs", range(self._size))
                break
            if waited > _QUIET and not named:
                named = True
                missing = _ranges(set(range(self._size)) - set(present))
                logger.warning("Readiness overlay: waiting for %s", missing)
            time.sleep(_PAUSE)
        texts = self._store.multi_get([self._key(rank) for rank in present])
        return dict(zip(present, map(Announcement.read, texts), strict=True))

    def _present(self, word: str, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have set a key, by one look where all have."""
        ranks = list(ranks)
        if self._store.check([self._key(rank, word) for rank in ranks]):
            return ranks
        return [rank for rank in ranks if self._store.check([self._key(rank, word)])]

    def _let_read(self, announced: Mapping[int, Announcement]) -> None:
        """Wait a moment for the others to have read: the store may end with this process."""
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline:
            if len(self._present("has read", announced)) == len(announced):
                return
            time.sleep(_PAUSE)


def refusal(announced: Mapping[int, Announcement], size: int) -> RanksError | None:
    """Compare the ranks of an engine.

    Args:
        announced: what each rank that answered runs, by rank.
        size: the number of ranks.

    Returns:
        The error, with a table and the commands that mend it; None if all ranks agree.
    """
    silent = sorted(set(range(size)) - set(announced))
    counts = Counter(each.identity for _, each in sorted(announced.items()))
    if len(counts) == 1 and not silent:
        return None
    (usual, _), *_ = counts.most_common(1)
    model = next(rank for rank in sorted(announced) if announced[rank].identity == usual)
    alike: dict[Announcement, list[int]] = {}
    for rank, each in sorted(announced.items()):
        alike.setdefault(each, []).append(rank)
    rows = [("ranks", "host", "overlay", "digest", switch.NAME)]
    commands: list[str] = []
    different = silent[:]
    for each, ranks in alike.items():
        digest = each.digest[:_DIGITS] or "not installed"
        rows.append((_numbers(ranks), each.host, each.version, digest, each.value or "unset"))
        if each.identity != usual:
            different += ranks
            commands += _commands(each, ranks, announced[model], model)
    if silent:
        rows.append((_numbers(silent), "?", "no answer", "-", "-"))
        commands.append(
            f"{_ranges(silent)}: no answer. It runs vLLM without the overlay, or with a version "
            f"of it that does not compare ranks. On that machine, with the copy of the overlay "
            f"that rank {model} got: python3 scripts/overlay apply --site "
            f"{announced[model].site}, or where vLLM is there."
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines = [
        "Readiness overlay: the ranks of this engine do not run the same.",
        *table,
        *commands,
        f"Then start again. {switch.RANKS}=warn starts all the same.",
    ]
    return RanksError("\n".join(lines), sorted(different))


def _commands(
    each: Announcement, ranks: Sequence[int], usual: Announcement, model: int
) -> Iterable[str]:
    """What makes some ranks those of most: one line for the files, one for the switch."""
    where = f"{_ranges(ranks)}, on {each.host}"
    if (each.version, each.digest) != (usual.version, usual.digest):
        yield (
            f"{where}: other files than rank {model}. With the copy of the overlay that rank "
            f"{model} got: python3 scripts/overlay apply --site {each.site}"
        )
    if each.on != usual.on and each.value != usual.value:
        less, more = set(usual.on) - set(each.on), set(each.on) - set(usual.on)
        differences = [
            f"{word}: {', '.join(sorted(names))}"
            for word, names in (("off", less), ("on", more))
            if names
        ]
        command = f"export {switch.NAME}={usual.value}" if usual.value else f"unset {switch.NAME}"
        yield f"{where}: not as on rank {model} ({'; '.join(differences)}). There: {command}"


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in words, such as "ranks 0-3, 8"."""
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {_numbers(ranks)}"


def _numbers(ranks: Sequence[int]) -> str:
    """Sorted ranks as ranges, such as "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
