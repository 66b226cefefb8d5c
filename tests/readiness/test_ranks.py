"""The comparison of ranks, by real process groups: gloo, a process a rank, one TCP store."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch.distributed import TCPStore
from vllm.v1.readiness.engine import identity, ranks
from vllm.v1.readiness.version import __version__
from vllm.v1.readiness.watch import startup

DIGEST = "1234567890abcdef" * 4
OTHER = "fedcba0987654321" * 4


class Rank(NamedTuple):
    """What a rank has, and what becomes of it.

    Attributes:
        digest: of its files; None for a rank without the overlay.
        variables: its environment.
        late: seconds until it compares itself.
        ends: whether its process ends instead of comparing itself.
    """

    digest: str | None = DIGEST
    variables: dict[str, str] = {}  # noqa: RUF012  (never changed)
    late: float = 0.0
    ends: bool = False


class Outcome(NamedTuple):
    """What a rank did: the error that it raised, what it logged, and how long it took."""

    error: str
    warnings: list[str]
    seconds: float
    sum: float


def _live(number: int, rank: Rank, size: int, port: int, patience: float, out: Path) -> None:
    """Be one rank: make the group, compare, and then use the group as a model would."""
    os.environ.update(rank.variables)
    ranks._QUIET, ranks.PATIENCE = timedelta(seconds=0.3), timedelta(seconds=patience)
    warnings: list[str] = []
    ranks.logger.warning = lambda message, *rest: warnings.append(message % rest)
    store = TCPStore("127.0.0.1", port, size, number == 0, timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=size)
    start, error, total = time.monotonic(), "", 0.0
    store.set(f"made {number}", b"")
    if rank.ends:
        # A rank that is still making its group would fail in that.
        store.wait([f"made {each}" for each in range(size)])
        os._exit(0)
    try:
        time.sleep(rank.late)
        if rank.digest is not None:
            ranks.check(rank.digest)
    except ValueError as wrong:
        error = f"{type(wrong).__name__}: {wrong}"
    except ranks.RanksError as wrong:
        error = str(wrong)
    seconds = time.monotonic() - start
    if not error:
        tensor = torch.tensor([float(number)])
        try:
            torch.distributed.all_reduce(tensor)
            total = tensor.item()
        except RuntimeError:  # the others have refused and are gone
            total = -1.0
    out.write_text(json.dumps([error, warnings, seconds, total]))
    os._exit(0)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Outcome | None]]:
    """Run ranks, each a process; None for one that ended by itself."""

    def run(*each: Rank, patience: float = 20.0) -> list[Outcome | None]:
        context = multiprocessing.get_context("fork")
        port = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False).port
        files = [tmp_path / f"{number}.json" for number in range(len(each))]
        processes = [
            context.Process(target=_live, args=(n, rank, len(each), port, patience, file))
            for n, (rank, file) in enumerate(zip(each, files, strict=True))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            alive = process.is_alive()
            process.kill()
            assert not alive, "a rank waits for ever"
        return [Outcome(*json.loads(file.read_text())) if file.exists() else None for file in files]

    return run


Run = Callable[..., list[Any]]


def test_ranks_that_agree_go_on(run: Run) -> None:
    """Two ways to write one switch are the same; the next collective of all ranks is paired.

    One of them is late.
    """
    both = {"VLLM_READINESS": "-fixes"}, {"VLLM_READINESS": "features"}
    for outcome in run(Rank(variables=both[0]), Rank(variables=both[1], late=1.5)):
        assert (outcome.error, outcome.sum) == ("", 1.0)
    assert outcome.warnings == []
    (waiting,) = run(Rank(), Rank(late=1.5))[0].warnings
    assert waiting == "Readiness overlay: ranks without an answer: [1]"


def test_another_digest_is_refused_by_every_rank(run: Run) -> None:
    outcomes = run(Rank(), Rank(digest=OTHER), Rank())
    assert len({outcome.error for outcome in outcomes}) == 1
    _, *lines, last = outcomes[0].error.splitlines()
    host = os.uname().nodename
    for rank, (line, digest) in enumerate(zip(lines, (DIGEST, OTHER, DIGEST), strict=True)):
        assert line.startswith(f"rank {rank} on {host}, /")
        assert f": overlay {__version__}, digest {digest[:12]}, VLLM_READINESS=" in line
        assert line.endswith("differs from most") == (rank == 1)
    assert "python3 scripts/overlay apply --site SITE" in last
    assert "VLLM_READINESS_RANKS=warn" in last


@pytest.mark.parametrize("values", [("", "-fixes"), ("-stop-tokens", "on"), ("on", "-penalties")])
def test_other_features_or_fixes_are_refused(run: Run, values: tuple[str, str]) -> None:
    outcomes = run(*(Rank(variables={"VLLM_READINESS": value}) for value in values))
    for outcome in outcomes:
        _, first, second, _ = outcome.error.splitlines()
        assert first.endswith(f", VLLM_READINESS={values[0]}")
        assert second.endswith(f", VLLM_READINESS={values[1]}, which differs from most")


@pytest.mark.parametrize("pristine", [0, 1])
def test_a_rank_without_the_overlay_is_found_without_a_deadlock(run: Run, pristine: int) -> None:
    group = [Rank(), Rank(), Rank()]
    group[pristine] = Rank(digest=None)
    outcomes = run(*group, patience=1.0)
    assert outcomes[pristine].sum == -1.0
    for outcome in outcomes[:pristine] + outcomes[pristine + 1 :]:
        assert f"rank {pristine} gives no answer" in outcome.error
        assert outcome.error.count("answer") == 1
        assert outcome.seconds < 10


def test_warn_logs_the_ranks_and_goes_on_with_those_that_differ(run: Run) -> None:
    """The next collective of the rank without the overlay is theirs, too."""
    warn = {"VLLM_READINESS_RANKS": "warn"}
    ranks = (Rank(variables=warn), Rank(digest=OTHER, variables=warn), Rank(digest=None))
    outcomes = run(*ranks, patience=1.0)
    assert [outcome.sum for outcome in outcomes] == [3.0] * 3
    for outcome in outcomes[:2]:
        assert OTHER[:12] in outcome.warnings[-1]
        assert "rank 2 gives no answer" in outcome.warnings[-1]
        assert outcome.error == ""


def test_off_compares_nothing_and_waits_for_nobody(run: Run) -> None:
    off = {"VLLM_READINESS_RANKS": "off"}
    different = Rank(digest=OTHER, variables=off)
    for outcome in run(Rank(variables=off), different, Rank(digest=None)):
        assert (outcome.error, outcome.warnings, outcome.sum) == ("", [], 3.0)
        assert outcome.seconds < 10  # of 20 that a wait would take


def test_a_rank_that_ends_is_named_or_its_store_is(run: Run) -> None:
    """Rank 0 holds the store."""
    assert "store of their process group is lost" in run(Rank(ends=True), Rank())[1].error
    assert "rank 1 gives no answer" in run(Rank(), Rank(ends=True), patience=1.0)[0].error


@pytest.mark.parametrize("value", ["", "error", "warn"])
def test_one_rank_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    """Without a group, and in one of one rank; its store stays empty."""
    monkeypatch.setenv("VLLM_READINESS_RANKS", value)
    ranks.check(DIGEST)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        keys = store.num_keys()
        ranks.check(DIGEST)
        assert store.num_keys() == keys
    finally:
        torch.distributed.destroy_process_group()


def test_an_engine_compares_what_it_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[str | None] = []
    monkeypatch.setattr(identity, "digest", lambda: DIGEST)
    monkeypatch.setattr(ranks, "check", digests.append)
    startup.start(object())
    assert digests == [DIGEST]


def test_most_ranks_decide_and_other_versions_can_be_read() -> None:
    """Another version may write unknown fields, and leave out known ones."""
    usual = {"host": "a", "site": "/s", "version": "1", "digest": DIGEST, "value": "", "on": []}
    assert ranks.refusal({0: usual, 1: usual}, 2) is None
    other = {"host": "h", "version": "9.9", "new": 1}
    lines = str(ranks.refusal({0: other, 1: usual, 2: usual}, 4)).splitlines()
    assert lines[1].startswith("rank 0 on h, None: overlay 9.9, digest none, ")
    assert [line.endswith("differs from most") for line in lines[1:4]] == [True, False, False]
    assert lines[4].startswith("rank 3 gives no answer")
