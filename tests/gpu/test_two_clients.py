"""Two clients of one server on a GPU, with drafts: the honest one's replies are its own."""

import json

import pytest
from gpu import kinds
from support import clients
from support.engine import Engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_an_honest_client_notices_nothing_of_a_hostile_one(
    engines: dict[str, Engine], method: str
) -> None:
    """Results do not depend on what else is in a batch: vLLM has a mode for that."""
    overlaid = engines["overlaid"]
    drafts = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [32]}
    arguments = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.3"]
    # No profiling, which other engines on the device would disturb.
    arguments += ["--kv-cache-memory-bytes", str(64 << 20)]
    # The proposer on the GPU compiles, which it cannot with a mode of 0.
    eager = method == "ngram_gpu"
    arguments += ["--enforce-eager"] if eager else ["--compilation-config", json.dumps(graphs)]
    arguments += ["--speculative-config", json.dumps(drafts)]
    variables = {**kinds.ENVIRONMENT, "VLLM_BATCH_INVARIANT": "1"}
    with clients.serving(overlaid.folder, overlaid, [], variables, arguments) as server:
        alone = method == "ngram"
        assert clients.differences(server, drafts=3, grammars=False, alone=alone) == []
