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
from readiness.guard import Guard
from torch.distributed import TCPStore
from vllm.v1.readiness import registry
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
    ranks: list[int]
    warnings: list[str]
    seconds: float
    sum: float


def _live(number: int, rank: Rank, size: int, port: int, patience: float, out: Path) -> None:
    """Be one rank: make the group, compare, and then use the group as a model would."""
    os.environ.update(rank.variables)
    ranks.PATIENCE = patience
    warnings: list[str] = []
    ranks.logger.warning = lambda message, *rest: warnings.append(message % rest)
    store = TCPStore("127.0.0.1", port, size, number == 0, timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=size)
    start, error, different, total = time.monotonic(), "", [], 0.0
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
        error, different = str(wrong), list(wrong.ranks)
    seconds = time.monotonic() - start
    if not error:
        tensor = torch.tensor([float(number)])
        try:
            torch.distributed.all_reduce(tensor)
            total = tensor.item()
        except RuntimeError:  # the others have refused and are gone
            total = -1.0
    out.write_text(json.dumps([error, different, warnings, seconds, total]))
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
        assert (outcome.error, outcome.warnings, outcome.sum) == ("", [], 1.0)


def test_another_digest_is_refused_by_every_rank_with_a_table(run: Run) -> None:
    outcomes = run(Rank(), Rank(digest=OTHER), Rank())
    assert len({outcome.error for outcome in outcomes}) == 1
    assert [outcome.ranks for outcome in outcomes] == [[1]] * 3
    lines = outcomes[0].error.splitlines()
    rows = [line.split()[-3:] for line in lines]
    assert [__version__, DIGEST[:12], "unset"] in rows
    assert [__version__, OTHER[:12], "unset"] in rows
    assert any(line.startswith("0, 2 ") for line in lines)
    assert f"rank 1, on {os.uname().nodename}: files differ from rank 0. " in outcomes[0].error
    assert "copy of the overlay: python3 scripts/overlay apply --site /" in outcomes[0].error
    assert "VLLM_READINESS_RANKS=warn" in outcomes[0].error


@pytest.mark.parametrize(
    ("values", "names", "command"),
    [
        (("", "-fixes"), registry.FIXES, "unset VLLM_READINESS"),
        (("-stop-tokens", "on"), ["stop-tokens"], "export VLLM_READINESS=-stop-tokens"),
        (("on", "-penalties"), ["penalties"], "export VLLM_READINESS=on"),
    ],
)
def test_other_features_or_fixes_are_refused_by_name(
    run: Run, values: tuple[str, str], names: list[str], command: str
) -> None:
    outcomes = run(*(Rank(variables={"VLLM_READINESS": value}) for value in values))
    for outcome in outcomes:
        assert outcome.ranks == [1]
        (line,) = (line for line in outcome.error.splitlines() if "differs from rank 0" in line)
        assert all(name in line for name in names)
        assert line.endswith(f"On that host: {command}")
        assert "overlay apply" not in outcome.error


@pytest.mark.parametrize("pristine", [0, 1])
def test_a_rank_without_the_overlay_is_found_without_a_deadlock(run: Run, pristine: int) -> None:
    group = [Rank(), Rank(), Rank()]
    group[pristine] = Rank(digest=None)
    outcomes = run(*group, patience=1.0)
    assert outcomes[pristine].sum == -1.0
    for outcome in outcomes[:pristine] + outcomes[pristine + 1 :]:
        assert outcome.ranks == [pristine]
        assert f"rank {pristine}: no answer. It runs vLLM without the overlay" in outcome.error
        assert outcome.seconds < 10


def test_the_first_that_has_waited_long_enough_ends_the_wait_of_all(run: Run) -> None:
    """Else the rank that holds the store might end before the others have looked."""
    outcomes = run(Rank(), Rank(digest=None), Rank(late=2.0), patience=4.0)
    assert outcomes[0].ranks == outcomes[2].ranks == [1]
    assert outcomes[2].seconds - 2.0 < 3.5


def test_warn_logs_the_table_and_goes_on_with_ranks_that_differ(run: Run) -> None:
    """The next collective of the rank without the overlay is theirs, too."""
    warn = {"VLLM_READINESS_RANKS": "warn"}
    ranks = (Rank(variables=warn), Rank(digest=OTHER, variables=warn), Rank(digest=None))
    outcomes = run(*ranks, patience=1.0)
    assert [outcome.sum for outcome in outcomes] == [3.0] * 3
    for outcome in outcomes[:2]:
        (warning,) = outcome.warnings
        assert OTHER[:12] in warning
        assert "rank 2: no answer" in warning
        assert outcome.error == ""


def test_off_compares_nothing_and_waits_for_nobody(run: Run) -> None:
    off = {"VLLM_READINESS_RANKS": "off"}
    different = Rank(digest=OTHER, variables=off)
    for outcome in run(Rank(variables=off), different, Rank(digest=None)):
        assert (outcome.error, outcome.warnings, outcome.sum) == ("", [], 3.0)
        assert outcome.seconds < 10  # of 20 that a wait would take


def test_a_rank_that_ends_is_named_or_its_store_is(run: Run) -> None:
    """Rank 0 holds the store."""
    for outcome in (run(Rank(ends=True), Rank())[1], run(Rank(), Rank(ends=True), patience=1.0)[0]):
        assert "store of their process group is lost" in outcome.error or outcome.ranks == [1]


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


def test_an_engine_compares_what_it_logs(monkeypatch: pytest.MonkeyPatch, guard: Guard) -> None:
    digests: list[str | None] = []
    monkeypatch.setattr(identity, "digest", lambda: DIGEST)
    monkeypatch.setattr(ranks, "check", digests.append)
    startup.start(object())
    assert digests == [DIGEST]


def test_an_announcement_of_another_version_can_be_read() -> None:
    """With fields that this one does not know, and without some that it does."""
    other = ranks.Announcement.read(b'{"host": "h", "version": "9.9", "new": 1}')
    assert other == ranks.Announcement("h", "", "9.9", "", "", ())


def test_ranks_are_named_as_ranges_and_most_decide() -> None:
    usual = ranks.Announcement("a", "/s", "1", DIGEST, "", ())
    error = ranks.refusal(dict.fromkeys((0, 4, 5, 6, 7), usual), 9)
    assert error is not None
    assert error.ranks == (1, 2, 3, 8)
    assert "ranks 1-3, 8: no answer" in str(error)
    other = ranks.Announcement("b", "/s", "1", OTHER, "", ())
    error = ranks.refusal({0: other, 1: usual, 2: usual}, 3)
    assert error is not None
    assert error.ranks == (0,)
    assert "rank 0, on b: files differ from rank 1." in str(error)
    assert ranks.refusal({0: usual, 1: usual}, 2) is None
