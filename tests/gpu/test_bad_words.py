"""The bad-word kernels on a GPU, against upstream's own."""

import random
from typing import Any

import pytest
import torch
from gpu.waits import errors_for_waits
from support.bad_words import LAYOUTS, Pair
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.sample.bad_words import BadWords
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

pytestmark = pytest.mark.gpu


def words(chooser: random.Random, vocab: int, count: int) -> list[list[int]]:
    """Draw words of few tokens, so that they match; some end in a token beyond the vocabulary."""
    lasts = [0, 1, 2, vocab - 1, vocab, chooser.randrange(vocab)]
    return [
        [*chooser.choices(range(3), k=chooser.randrange(5)), chooser.choice(lasts)]
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab", [37, 1009, 151936, 151937])
@pytest.mark.parametrize("torch_form", [False, True])
def test_any_stream(vocab: int, torch_form: bool) -> None:
    """Requests join, leave, move and are cut back; drafts are accepted or not."""
    chooser = random.Random(vocab)
    pair = Pair(vocab, not torch_form, "cuda")
    for number in range(60):
        while len(pair.req_ids) < 12:
            drawn = words(chooser, vocab, chooser.choice([0, 1, 5, 40]))
            pair.join(drawn, chooser.choices(range(3), k=chooser.randrange(6)))
        if chooser.random() < 0.3:
            pair.leave(chooser.choice(pair.req_ids))
        if chooser.random() < 0.3:
            pair.swap(*chooser.sample(range(len(pair.req_ids)), 2))
        if chooser.random() < 0.3:
            row = chooser.randrange(len(pair.req_ids))
            pair.cut(pair.req_ids[row], chooser.randint(0, len(pair.outputs()[row])))
        pair.refresh()
        rows = range(len(pair.req_ids))
        spread = None
        if number % 2:
            spread = [chooser.choices(range(3), k=chooser.randrange(5)) for _ in rows]
        pair.check(spread, LAYOUTS[number % 3])
        kept = [ids[: chooser.randint(0, len(ids))] for ids in spread or [[]] * len(rows)]
        pair.sample([[*ids, chooser.randrange(3)] for ids in kept], chooser.sample(rows, 2))
    assert pair.masked > 500


def test_tails_longer_than_a_block() -> None:
    """Tails are shifted in place, by threads that must not overtake one another."""
    chooser = random.Random(1)
    pair = Pair(1009, True, "cuda")
    req_ids = [pair.join([[0] * n + [5]]) for n in (1, 31, 32, 33, 64, 500)]
    pair.refresh()
    pair.check()
    for length in (1, 2, 31, 32, 33, 65, 700, 1, 1):
        pair.sample([chooser.choices(range(1009), k=length) for _ in req_ids])
        for row, req_id in enumerate(req_ids):
            slot = pair.bad_words._slots[req_id].tensor.tolist()
            tail, output = slot[2 : 2 + slot[1]], pair.outputs()[row]
            assert tail == ([-1] * slot[1] + output)[-slot[1] :]


def test_nothing_waits() -> None:
    """Under torch's sync debug mode, where any wait is an error."""
    vocab = 1009
    pair = Pair(vocab, True, "cuda")
    chooser = random.Random(3)
    for _ in range(8):
        pair.join(words(chooser, vocab, 6), [0, 1])
    pair.refresh()
    live: Any = pair.ours.readiness
    live.warm_up()
    spread = [chooser.choices(range(3), k=2) for _ in range(8)]
    drafts = SpecDecodeMetadata.make_dummy(spread, torch.device("cuda"))
    logits = torch.randn(8, vocab, device="cuda")
    targets = torch.randn(16, vocab, device="cuda")
    sampled = torch.tensor([[*ids, 1] for ids in spread], dtype=torch.int32, device="cuda")
    discarded = torch.zeros(16, dtype=torch.bool, device="cuda")
    pair.check(spread)  # fills caches of memory
    pair.leave("r3")
    pair.join(words(chooser, vocab, 9), [2, 2])
    before = dict(fences.counts())
    torch.cuda.synchronize()
    with errors_for_waits():
        pair.ours.refresh_metadata()
        metadata = pair.ours.sampling_metadata
        live.history.begin_step()
        live.begin_sampling(logits, drafts)
        assert not live.host_needs_drafts()
        bad_words = BadWords.take(metadata, logits, None)[0]
        assert bad_words is not None
        bad_words.apply(logits, bad_words.drafts, per_draft=False)
        assert BadWords.take(metadata, targets, drafts)[0] is bad_words
        bad_words.apply(targets, drafts, per_draft=True)
        live.observe_sampled(sampled, discarded)
    assert bad_words is pair.bad_words
    assert dict(fences.counts()) == before
    for batch in (pair.stock, pair.ours):
        for row, ids in enumerate(sampled.tolist()):
            batch.req_output_token_ids[row].extend(ids)
    pair.refresh()
    pair.check()
    pair.check(spread)
