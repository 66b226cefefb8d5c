"""The feature seeds: what the samplers draw, and what each generator is left with.

PyTorch on the CPU draws as a small CUDA device does, and so does what stands in for our kernels
(support.philox). Upstream's runner and sampler, which draw row by row, are the oracle.
"""

import copy
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules, philox
from support.lockstep import LockstepRun
from support.philox import Draws, Generator
from support.sampling import Expand
from vllm.utils import cpu_triton_utils
from vllm.v1.readiness import worker
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.inputs import uploads
from vllm.v1.readiness.sample import seeds

#: Of the simulated device: the vocabulary of lockstep runs takes two draws of a thread.
THREADS = 8
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"
#: With this fix, rewinding on the CPU is not upstream's.
SWITCH = "-cpu-seeds"
Uses = list[Generator]


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> Uses:
    """The generators that torch drew from, one for each call; ours draws from none."""
    monkeypatch.setattr(seeds, "draws_on", lambda _: Draws(THREADS))
    monkeypatch.setattr(seeds, "agree", lambda *_: True)
    monkeypatch.setattr(cpu_triton_utils, "expand_kernel", Expand())
    return philox.emulate(monkeypatch, THREADS)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each upload of seeds."""
    counts: list[int] = []
    together = uploads.together

    def noted(wide: Any, *arguments: Any) -> Any:
        counts.append(len(wide[0]))
        return together(wide, *arguments)

    monkeypatch.setattr(seeds, "uploads", SimpleNamespace(together=noted))
    return counts


def make_run(**named: Any) -> LockstepRun:
    """Make a run of samplers that draw as on CUDA."""
    run = LockstepRun(**{"switch": SWITCH, **named})
    for runner in run.runners:
        sampler = runner.load(SAMPLER).TopKTopPSampler()
        sampler.forward = sampler.forward_native
        runner.sampler.topk_topp_sampler = sampler
    if (feature := worker.of(run.ours.batch).seeds) is not None:
        feature.warm_up()
    return run


def offsets(runner: Any) -> dict[str, int]:
    """Return the offset of each request's generator, taken from the batch if it is there."""
    found = {}
    for name, request in runner.runner.requests.items():
        row = runner.batch.req_id_to_index.get(name)
        generator = request.generator if row is None else runner.batch.generators.get(row)
        if generator is not None:
            found[name] = generator.get_offset()
    return found


def drawn_from(runner: Any, uses: Uses) -> bool:
    """Return whether torch drew from a generator of this runner's requests."""
    used = {id(generator) for generator in uses}
    return any(id(request.generator) in used for request in runner.runner.requests.values())


def add(run: LockstepRun, chance: random.Random, seeded: float) -> None:
    """Add a request, most of them sampled at random, with a seed or without."""
    params: dict[str, Any] = {"temperature": chance.choice([0.0, 0.7, 1.0, 1.0])}
    if chance.random() < seeded:
        params["seed"] = chance.choice([0, 7, 10**14, 2**63 - 1, chance.getrandbits(60)])
    if not run.drafts and chance.random() < 0.3:
        params["top_k"] = 5
    prompt = [chance.randrange(37) for _ in range(chance.choice([1, 3, 40]))]
    run.add(prompt, max_tokens=chance.randrange(1, 20), **params)


@pytest.mark.parametrize("seeded", [1.0, 0.5])
@pytest.mark.parametrize(("asynchronous", "drafts"), [(True, 0), (False, 0), (True, 2), (False, 2)])
def test_tokens_and_offsets_are_stocks(
    uses: Uses, asynchronous: bool, drafts: int, seeded: float
) -> None:
    """Requests join, leave, are preempted, resumed, rewound and moved; drafts may be left out."""
    chance = random.Random(int(seeded * 10) + drafts)
    run = make_run(asynchronous=asynchronous, drafts=drafts, num_blocks=40, reorder_threshold=1)
    rewound = 0
    for step in range(60):
        if chance.random() < 0.4 and len(run.scheduler.requests) < 8:
            add(run, chance, seeded)
        if chance.random() < 0.05:
            run.preempt_all()
        if drafts and chance.random() < 0.1:
            run.drop_drafts()
        if chance.random() < 0.05 and run.scheduler.running:
            run.abort(chance.choice(run.scheduler.running).request_id)
        run.step(arrives=chance.random() < 0.5)
        if step % 9 == 5:
            assert offsets(run.ours) == offsets(run.stock)
        dropped = run.stock.runner.discard_request_mask.np
        rewound += any(dropped[row] for row in run.stock.batch.generators)
        assert not drawn_from(run.ours, uses)
    assert rewound
    if drafts:
        assert run.accepted
    assert offsets(run.ours) == offsets(run.stock)


def test_nothing_is_sent_or_set_while_a_batch_decodes(uses: Uses, sent: list[int]) -> None:
    run = make_run()
    requests = [run.add([1, 2], temperature=1.0, seed=seed, max_tokens=30) for seed in range(3)]
    run.add([1, 2], temperature=1.0, max_tokens=30)
    for _ in range(12):
        run.step()
    assert sent == [3]
    generators = {name: run.ours.runner.requests[name].generator for name in requests}
    assert [generator.sets for generator in generators.values()] == [0, 0, 0]
    run.abort(requests[0])
    run.step()
    run.step()
    # The last row was moved into the one that became free.
    assert [generator.sets for generator in generators.values()] == [1, 0, 0]
    assert sent == [3, 2]
    assert generators[requests[0]].offset == 12 * 8
    assert [generators[name].offset for name in requests[1:]] == [0, 0]
    assert not drawn_from(run.ours, uses)


def test_steady_drafts_send_nothing(uses: Uses, sent: list[int]) -> None:
    """All three draws of a step share what was sent, as long as each request has as many drafts."""
    run = make_run(drafts=2, max_model_len=400, num_blocks=300)
    for seed in range(3):
        run.add([1, 2], temperature=1.0, seed=seed, max_tokens=300)
    run.step()
    run.step()
    before = len(sent)
    for _ in range(8):
        run.step()
    assert len(sent) - before <= 1
    assert not drawn_from(run.ours, uses)


class TestRandomSample:
    """Upstream's function, as the overlay changes it, on rows of a batch's generators."""

    @staticmethod
    def sample(load: Any, generators: Any, rows: int = 4) -> tuple[list[int], torch.Tensor]:
        """Sample from uniform probabilities, and return the default generator's state, too."""
        torch.manual_seed(3)
        tokens = load(SAMPLER).random_sample(torch.full((rows, 37), 1 / 37), generators)
        return tokens.tolist(), torch.default_generator.get_state()

    @pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 0], []])
    def test_default_generator_is_called_as_by_stock(self, uses: Uses, rows: list[int]) -> None:
        ours, stock = batch(rows), batch(rows)
        for _ in range(3):
            tokens, state = self.sample(modules.overlaid, ours)
            wanted, stock_state = self.sample(modules.pristine, dict(stock))
            assert tokens == wanted
            assert torch.equal(state, stock_state)
        assert len(uses) == 3 * len(rows)

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda feature: setattr(feature, "agrees", False), gauges.OTHER_BITS),
            (lambda feature: setattr(feature, "agrees", None), gauges.OTHER_BITS),
            (lambda feature: feature.begin_sampling(random.Random()), gauges.OTHER_CLASS),
            *(
                (spoil, gauges.OTHER_INPUT)
                for spoil in (
                    lambda feature: setattr(feature, "device", torch.device("meta")),
                    lambda feature: feature._generators.__setitem__(0, DerivedGenerator()),
                    lambda feature: feature._generators.__setitem__(0, feature._generators[2]),
                    lambda feature: setattr(feature._generators[2], "offset", 6),
                )
            ),
        ],
        ids=["differs", "cold", "runner", "device", "class", "shared", "offset"],
    )
    def test_unknown_is_upstreams(
        self,
        uses: Uses,
        spoil: Callable[[Any], None],
        reason: str,
        fallbacks: dict[tuple[str, str], int],
    ) -> None:
        """Also in the middle of a run, with offsets behind; it is counted."""
        ours, stock = batch([0, 2]), batch([0, 2])
        self.sample(modules.overlaid, ours)
        self.sample(modules.pristine, dict(stock))
        uses.clear()
        for generators in (ours, stock):
            spoil(generators.seeds)
        tokens, _ = self.sample(modules.overlaid, ours)
        assert len(uses) == 2
        assert tokens == self.sample(modules.pristine, dict(stock))[0]
        assert states(ours) == states(stock)
        assert fallbacks == {("seeds", reason): 1}

    def test_noise_of_another_kind_is_upstreams(self, uses: Uses) -> None:
        generators = batch([0])
        kinds = [torch.zeros(4, 37).double(), torch.zeros(37, 4).T, torch.zeros(4, 2, 37)]
        for noise in kinds:
            assert not seeds.draw(generators, noise)
            assert not seeds.draw_uniform(generators, noise, [9])
        values = torch.zeros(12).double()
        assert not seeds.draw_uniform(generators, values, [9, 3])
        assert not seeds.draw_uniform(generators, values, [8, 3])
        assert seeds.draw_uniform(generators, values, [8, 4])
        assert not seeds.draw(dict(generators), torch.zeros(4, 37))
        with pytest.raises(IndexError):
            self.sample(modules.overlaid, batch([4]))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]])
def test_numbers_of_drafts_may_change_in_each_step(uses: Uses, rows: list[int]) -> None:
    """As where the runner drops some; all three draws of a rejection sampler, in its order."""
    ours, stock = batch(rows), dict(batch(rows))
    owned = {id(generator) for generator in dict.values(ours)}
    for drafts in ([2, 2, 2], [2, 2, 2], [1, 3, 2], [0, 3, 1], [3, 3, 0], [2, 2, 2], [0, 0, 0]):
        drawn: list[list[float]] = []
        for load, generators in ((modules.overlaid, ours), (modules.pristine, stock)):
            torch.manual_seed(5)
            noise = torch.zeros(3, 37)
            load(SAMPLER).random_sample(noise, generators)
            uniform = load(modules.REJECTION_SAMPLER).generate_uniform_probs
            values = uniform(sum(drafts), drafts, generators, torch.device("cpu"))
            if not seeds.draw(generators, noise.zero_(), drafts):
                for row in (row for row in generators if drafts[row]):
                    noise[row].exponential_(generator=generators[row])
            drawn.append([*values.tolist(), *noise.flatten().tolist()])
        assert drawn[0] == drawn[1]
    assert not owned & {id(use) for use in uses}
    assert states(ours) == states(stock)


class DerivedGenerator(Generator):
    """Somebody's own."""


def batch(rows: list[int]) -> Any:
    """Return the generators of a batch with seeds in these rows, as of a runner of vLLM's."""
    generators = {row: Generator().manual_seed(row) for row in rows}
    owner = SimpleNamespace(
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=37,
        max_num_reqs=8,
        generators=generators,
    )
    feature = seeds.Seeds(owner, Draws(THREADS))  # type: ignore[arg-type]
    feature.agrees = True
    feature.begin_sampling(None)
    assert isinstance(owner.generators, seeds.Generators)
    return owner.generators


def states(generators: Any) -> dict[int, tuple[int, int]]:
    """Return each row's seed and offset."""
    return {row: (g.initial_seed(), g.get_offset()) for row, g in generators.items()}


#: Ways to get at generators, which return some in order of their rows, or None for all.
WAYS: dict[str, Callable[[Any], Any]] = {
    "items": lambda held: [generator for _, generator in held.items()],
    "values": lambda held: list(held.values()),
    "get": lambda held: [held.get(0)],
    "item": lambda held: [held[0]],
    "pop": lambda held: [held.pop(0, None)],
    "popitem": lambda held: [held.popitem()[1]],
    "setdefault": lambda held: [held.setdefault(0, None)],
    "dict": lambda held: list(dict(held).values()),
    "unpacked": lambda held: list({**held}.values()),
    "copy": lambda held: list(held.copy().values()),
    "copied": lambda held: list(copy.copy(held).values()),
    "or": lambda held: list((held | {}).values()),
    "ror": lambda held: list(({} | held).values()),
}


class TestGenerators:
    """The mapping that stands in for the batch's dict."""

    @pytest.fixture
    def behind(self, uses: Uses) -> Iterator[Any]:
        """Generators whose own offsets are behind by one draw."""
        generators = batch([0, 1])
        own = dict(generators)
        assert seeds.draw(generators, torch.zeros(4, 37))
        assert [generator.offset for generator in own.values()] == [0, 0]
        yield generators
        assert not set(uses) & set(own.values())

    @pytest.mark.parametrize("way", WAYS)
    def test_who_takes_one_finds_its_own_offset(self, behind: Any, way: str) -> None:
        taken = WAYS[way](behind)
        assert taken
        assert [generator.offset for generator in taken] == [8] * len(taken)

    def test_a_deep_copy_is_a_plain_dict(self, behind: Any) -> None:
        own = list(dict.values(behind))
        assert type(copy.deepcopy(behind)) is dict
        assert [generator.offset for generator in own] == [8, 8]

    def test_what_others_do_with_it_counts(self, behind: Any) -> None:
        behind[1].set_offset(behind[1].get_offset() - 4)
        behind[0].manual_seed(99)
        assert seeds.draw(behind, torch.zeros(4, 37))
        assert states(behind) == {0: (99, 16), 1: (1, 12)}

    def test_rows_that_are_exchanged_deleted_or_replaced(self, behind: Any) -> None:
        first, second = behind.pop(0), behind.pop(1)
        behind[0], behind[5] = second, first
        assert seeds.draw(behind, torch.zeros(6, 37))
        behind[0] = Generator().manual_seed(4)
        assert (first.offset, second.offset) == (8, 16)
        del behind[5]
        assert first.offset == 16
        behind |= {2: first}
        assert seeds.draw(behind, torch.zeros(6, 37))
        assert states(behind) == {0: (4, 8), 2: (0, 24)}
        assert second.offset == 16


@pytest.mark.parametrize("compiles", [True, False])
def test_warm_up_finds_out_whether_torch_draws_so(
    compiles: bool, uses: Uses, monkeypatch: pytest.MonkeyPatch, caplog_vllm: Any
) -> None:
    asked: list[int] = []

    def agree(_: Any, device: torch.device, sizes: list[int]) -> bool:
        asked.extend(sizes)
        if not compiles:
            raise RuntimeError(f"no kernel for {device}")
        return False

    monkeypatch.setattr(seeds, "agree", agree)
    run = make_run()
    worker.of(run.ours.batch).warm_up()
    assert asked == [37]
    assert "are not as expected" in caplog_vllm.text
    assert compiles is ("no kernel for cpu" not in caplog_vllm.text)
    for seed in range(2):
        run.add([1, 2], temperature=1.0, seed=seed, max_tokens=5)
    run.step()
    assert drawn_from(run.ours, uses)
    run.finish()
    assert offsets(run.ours) == offsets(run.stock)


@pytest.mark.parametrize(("switch", "device"), [("-seeds", "simulated"), ("on", "cpu")])
def test_off_and_other_devices_keep_upstreams_dict(
    uses: Uses, monkeypatch: pytest.MonkeyPatch, switch: str, device: str
) -> None:
    if device == "cpu":
        monkeypatch.undo()
    run = make_run(switch=switch)
    assert type(run.ours.batch.generators) is dict
    assert worker.of(run.ours.batch).seeds is None


@pytest.mark.parametrize("own", ["sample_tokens", "_update_states", "batch", "sampler"])
def test_subclasses_are_given_what_stock_gives(uses: Uses, own: str) -> None:
    """A runner that is not vLLM's own is left to upstream."""
    run = make_run(own=own)
    for seed in range(3):
        run.add([1, 2, seed], temperature=1.0, seed=seed, max_tokens=8)
    for _ in range(4):
        run.step()
    assert drawn_from(run.ours, uses) is (own in ("_update_states", "batch"))
    run.finish()
    assert offsets(run.ours) == offsets(run.stock)
