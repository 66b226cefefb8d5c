"""Check at start-up that all ranks of an engine run the same overlay.

Ranks with different files or switches sample different tokens from the same logits, or deadlock.
Each rank writes what it runs into the store of torch's default process group, and reads what the
others have written. A collective would not work, because a rank without the overlay would match it
with an unrelated collective.
"""

# mirrors: nothing

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import DistError, Store
from torch.distributed.distributed_c10d import _get_default_store
from vllm.logger import init_logger
from vllm.v1.readiness.engine import identity, switch
from vllm.v1.readiness.version import __version__

logger = init_logger(__name__)

#: Wait for the other ranks until the log names those that are missing, and after that. Ranks that
#: have just created their process groups write within seconds of each other.
_QUIET, PATIENCE = timedelta(seconds=10), timedelta(seconds=110)
#: Wait for the others to read, because the store may end with the first rank that exits.
_FAREWELL = timedelta(seconds=5)
#: Number of digits of a digest that a message shows.
_DIGITS = 12


class RanksError(RuntimeError):
    """Ranks of an engine run different overlays, or none."""


def check(digest: str | None) -> None:
    """Compare this rank's overlay with the other ranks' overlays.

    Called once the process groups exist; a no-op for a single rank. With VLLM_READINESS_RANKS=off,
    this rank is read by others, and compares nothing. ``digest`` is the result of
    :func:`identity.digest`.

    Raises:
        RanksError: ranks differ or are silent, and VLLM_READINESS_RANKS is ``error``.
        SwitchError: VLLM_READINESS_RANKS or VLLM_READINESS is invalid.
    """
    mode = switch.ranks()
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    own = {
        "host": socket.gethostname(),
        "site": str(identity.SITE),
        "version": __version__,
        "digest": digest or "",
        "value": os.environ.get(switch.NAME, ""),
        "on": sorted(switch.enabled()),
    }
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        _compare(_get_default_store(), rank, size, own, wait=mode != "off")
    except RanksError as error:
        if mode == "error":
            raise
        logger.warning("%s", error)


def refusal(ranks: Mapping[int, Mapping[str, Any]], size: int) -> RanksError | None:
    """Return an error with a line for each rank; None if all ``size`` ranks run the same."""
    alike = Counter(_identity(own) for _, own in sorted(ranks.items()))
    if len(alike) == 1 and len(ranks) == size:
        return None
    (usual, _), *_ = alike.most_common(1)
    lines = ["Readiness overlay: the ranks of this engine run different overlays."]
    for rank in range(size):
        if (own := ranks.get(rank)) is None:
            lines.append(f"rank {rank} gives no answer, as without the overlay: apply it there")
            continue
        text, value = str(own.get("digest", ""))[:_DIGITS], own.get("value")
        lines.append(
            f"rank {rank} on {own.get('host')}, {own.get('site')}: overlay {own.get('version')}, "
            f"digest {text or 'none'}, {switch.NAME}={value or ''}"
            f"{'' if _identity(own) == usual else ', which differs from most'}"
        )
    lines.append(
        "Apply one copy of the overlay on all hosts (python3 scripts/overlay apply --site SITE), "
        f"set {switch.NAME} to one value, and restart. {switch.RANKS}=warn starts anyway."
    )
    return RanksError("\n".join(lines))


def _compare(store: Store, rank: int, size: int, own: Mapping[str, Any], wait: bool) -> None:
    """Write what this rank runs; if ``wait``, compare all ranks.

    Raises:
        RanksError: ranks differ or are silent, or the store is lost.
    """
    try:
        # Comparisons are numbered because a process group may outlive an engine.
        number = store.add(f"readiness/{rank}/comparisons", 1)
        keys = [f"readiness/comparison {number}/{each}" for each in range(size)]
        store.set(keys[rank], json.dumps(own))
        if not wait:
            return
        present = _wait(store, keys)
        texts = store.multi_get([keys[each] for each in present])
        error = refusal(dict(zip(present, map(json.loads, texts), strict=True)), size)
        store.set(f"{keys[rank]} has read", "")
        if error is not None:
            with suppress(DistError):
                store.wait([f"{keys[each]} has read" for each in present], _FAREWELL)
    except DistError as lost:
        raise RanksError(
            f"Readiness overlay: rank {rank} cannot compare itself with the other ranks: the store "
            f"of their process group is lost ({lost}). See the log of the rank that has exited."
        ) from lost
    if error is not None:
        raise error


def _wait(store: Store, keys: Sequence[str]) -> list[int]:
    """Wait until all ranks have written, or for too long; return those that have."""
    for patience in (_QUIET, PATIENCE):
        try:
            store.wait([*keys], patience)
        except torch.distributed.DistStoreError:  # it took too long
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        else:
            missing = []
        if not missing:
            break
        logger.warning("Readiness overlay: ranks without an answer: %s", missing)
    return [rank for rank in range(len(keys)) if rank not in missing]


def _identity(own: Mapping[str, Any]) -> tuple[object, ...]:
    return own.get("version"), own.get("digest"), tuple(own.get("on", ()))
