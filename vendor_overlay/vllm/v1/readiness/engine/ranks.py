"""Check at start-up that all ranks of an engine run the same overlay.

Ranks with different files or switches sample different tokens from the same logits, or deadlock.
Each rank announces its overlay in the store of torch's default process group, and reads the other
announcements. A rank without an announcement is reported after a timeout. A collective would not
work, because a rank without the overlay would match it with an unrelated collective.
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

#: Seconds to wait for announcements. Ranks that have just created their process groups announce
#: within seconds of each other.
PATIENCE = 120.0
#: Seconds until the log names the missing ranks.
_QUIET = 10.0
#: Seconds between polls of the store.
_PAUSE = 0.02
#: Maximum seconds for which a rank delays its exit until all ranks have read the store.
_FAREWELL = 5.0
#: Number of digits of a digest that the table shows.
_DIGITS = 12


class RanksError(RuntimeError):
    """Ranks of an engine run different overlays; ``ranks`` are those that differ or are silent."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Announcement:
    """The overlay of one rank; ``digest`` is empty in a checkout.

    ``site`` is the rank's site-packages directory, ``value`` its VLLM_READINESS, and ``on`` the
    sorted names of the enabled features and fixes.
    """

    host: str
    site: str
    version: str
    digest: str
    value: str
    on: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the fields that must be equal on all ranks."""
        return self.version, self.digest, self.on

    @classmethod
    def read(cls, text: bytes) -> "Announcement":
        """Parse the result of :meth:`written`; missing fields are empty."""
        fields = json.loads(text)
        names = ("host", "site", "version", "digest", "value")
        strings = {name: str(fields.get(name, "")) for name in names}
        return cls(**strings, on=tuple(fields.get("on", ())))

    def written(self) -> bytes:
        """Serialize as JSON."""
        return json.dumps(asdict(self)).encode()


def check(digest: str | None) -> None:
    """Compare this rank's overlay with the other ranks' overlays.

    Called once the process groups exist; a no-op for a single rank. With VLLM_READINESS_RANKS=off,
    this rank is only announced. ``digest`` is the result of :func:`identity.digest`.

    Raises:
        RanksError: ranks differ or are silent, and VLLM_READINESS_RANKS is ``error``.
        SwitchError: VLLM_READINESS_RANKS or VLLM_READINESS is invalid.
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
    """A comparison of ``size`` ranks through the store of their process group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._folder = ""

    def hold(self, own: Announcement, wait: bool) -> None:
        """Announce this rank; if ``wait``, compare all ranks.

        Raises:
            RanksError: ranks differ or are silent, or the store is lost.
        """
        try:
            # Comparisons are numbered because a process group may outlive an engine.
            number = self._store.add(f"readiness/{self._rank}/meetings", 1)
            self._folder = f"readiness/meeting {number}"
            self._store.set(self._key(self._rank), own.written())
            if not wait:
                return
            announced = self._wait()
            self._store.set(self._key(self._rank, "has read"), b"")
            error = refusal(announced, self._size)
            if error is not None:
                # The rank that hosts the store may exit once all ranks have read it.
                with suppress(DistError):
                    self._let_read(announced)
        except DistError as lost:
            raise RanksError(
                f"Readiness overlay: rank {self._rank} cannot compare itself with the other ranks: "
                f"the store of their process group is lost ({lost}). See the log of the rank that "
                f"has exited."
            ) from lost
        if error is not None:
            raise error

    def _key(self, rank: int, word: str = "runs") -> str:
        return f"{self._folder}/{rank} {word}"

    def _wait(self) -> Mapping[int, Announcement]:
        """Wait for all announcements or the timeout; return the announcements by rank."""
        start, named = time.monotonic(), False
        over = f"{self._folder} is over"
        while len(present := self._present("runs", range(self._size))) < self._size:
            waited = time.monotonic() - start
            if waited > PATIENCE:
                self._store.set(over, b"")
            if self._store.check([over]):
                # A rank may have arrived since the last poll.
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
        """Return those of ``ranks`` that have set key ``word``, in one round trip if all have."""
        ranks = list(ranks)
        if self._store.check([self._key(rank, word) for rank in ranks]):
            return ranks
        return [rank for rank in ranks if self._store.check([self._key(rank, word)])]

    def _let_read(self, announced: Mapping[int, Announcement]) -> None:
        """Wait a few seconds for other ranks to read: the store may end with this process."""
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline:
            if len(self._present("has read", announced)) == len(announced):
                return
            time.sleep(_PAUSE)


def refusal(announced: Mapping[int, Announcement], size: int) -> RanksError | None:
    """Return an error with repair commands; None if all ``size`` ranks announced the same."""
    silent = sorted(set(range(size)) - set(announced))
    counts = Counter(item.identity for _, item in sorted(announced.items()))
    if len(counts) == 1 and not silent:
        return None
    (usual, _), *_ = counts.most_common(1)
    model = next(rank for rank in sorted(announced) if announced[rank].identity == usual)
    alike: dict[Announcement, list[int]] = {}
    for rank, item in sorted(announced.items()):
        alike.setdefault(item, []).append(rank)
    rows = [("ranks", "host", "overlay", "digest", switch.NAME)]
    commands: list[str] = []
    different = silent[:]
    for item, ranks in alike.items():
        digest = item.digest[:_DIGITS] or "not installed"
        rows.append((_numbers(ranks), item.host, item.version, digest, item.value or "unset"))
        if item.identity != usual:
            different += ranks
            commands += _commands(item, ranks, announced[model], model)
    if silent:
        rows.append((_numbers(silent), "?", "no answer", "-", "-"))
        commands.append(
            f"{_ranges(silent)}: no answer. It runs vLLM without the overlay, or with a version "
            f"that does not compare ranks. On that host, with rank {model}'s copy of the overlay: "
            f"python3 scripts/overlay apply --site {announced[model].site}, "
            f"or with the site-packages directory of vLLM there."
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines = [
        "Readiness overlay: the ranks of this engine run different overlays.",
        *table,
        *commands,
        f"Then restart. {switch.RANKS}=warn starts anyway.",
    ]
    return RanksError("\n".join(lines), sorted(different))


def _commands(
    own: Announcement, ranks: Sequence[int], usual: Announcement, model: int
) -> Iterable[str]:
    """Yield the commands that make ``ranks`` run rank ``model``'s files and switch."""
    where = f"{_ranges(ranks)}, on {own.host}"
    if (own.version, own.digest) != (usual.version, usual.digest):
        yield (
            f"{where}: files differ from rank {model}. With rank {model}'s copy of the overlay: "
            f"python3 scripts/overlay apply --site {own.site}"
        )
    if own.on != usual.on and own.value != usual.value:
        less, more = set(usual.on) - set(own.on), set(own.on) - set(usual.on)
        differences = [
            f"{word}: {', '.join(sorted(names))}"
            for word, names in (("off", less), ("on", more))
            if names
        ]
        command = f"export {switch.NAME}={usual.value}" if usual.value else f"unset {switch.NAME}"
        detail = "; ".join(differences)
        yield (
            f"{where}: {switch.NAME} differs from rank {model} ({detail}). On that host: {command}"
        )


def _ranges(ranks: Iterable[int]) -> str:
    """Format ranks as "ranks 0-3, 8"."""
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {_numbers(ranks)}"


def _numbers(ranks: Sequence[int]) -> str:
    """Format sorted ranks as "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
