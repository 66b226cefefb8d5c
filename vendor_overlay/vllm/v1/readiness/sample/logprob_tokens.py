"""Fix ``logprob-tokens``: one request's ``logprob_token_ids`` do not change others' logprobs.

A request to ``/generative_scoring`` names the tokens whose logprobs are returned. In 0.22.0

- every other request in the batch gets token 0 with a logprob of -inf instead of its top tokens;
- with drafts, the sampler of bonus tokens passes only the logits of the named tokens to the
  rejection sampler, which needs all logits. The engine fails unless the shapes happen to agree
  (https://github.com/vllm-project/vllm/issues/42592), and the named tokens' logprobs are missing.

Here each row has the logprobs that its own request asked for.
"""

# mirrors: vllm.v1.sample.sampler:Sampler.forward
# mirrors: vllm.v1.sample.sampler:Sampler.gather_logprobs
# mirrors: vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs
# mirrors: vllm.v1.sample.rejection_sampler:RejectionSampler._get_logprobs_tensors

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs import uploads

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

#: Padding for requests that name fewer tokens than others.
_NO_TOKEN = -1


def merge(
    likeliest: LogprobsTensors, named: LogprobsTensors, metadata: "SamplingMetadata"
) -> LogprobsTensors:
    """Return ``likeliest`` with the rows of ``named`` for requests that name tokens.

    ``likeliest`` has the sampled and top tokens of each row, or all tokens if ``max_num_logprobs``
    is -1. ``named`` has the sampled and named tokens; it is returned if the fix is off.
    """
    rows = metadata.logprob_token_ids
    if not rows or registry.LOGPROB_TOKENS not in switch.enabled():
        return named
    if metadata.max_num_logprobs == -1:
        return likeliest
    if len(rows) == len(named.logprobs):
        return named
    index = _upload([*rows], named.logprobs.device)
    ids, logprobs = named.logprob_token_ids[index], named.logprobs[index]
    return _replace(likeliest, index, ids, logprobs, first=0)


def with_drafts(
    sampler: "RejectionSampler",
    likeliest: LogprobsTensors,
    drafts: "SpecDecodeMetadata",
    metadata: "SamplingMetadata",
    targets: torch.Tensor,
    bonus: torch.Tensor,
) -> LogprobsTensors:
    """Return ``likeliest`` with the logprobs of named tokens; unchanged if the fix is off.

    ``likeliest`` has the sampled and top tokens of ``1 + max_spec_len`` positions per request.
    ``targets`` [drafts, vocab] are the target logits, ``bonus`` [requests, vocab] the bonus logits.
    """
    rows = metadata.logprob_token_ids
    if not rows or registry.LOGPROB_TOKENS not in switch.enabled():
        return likeliest
    counts = drafts.num_draft_tokens
    most = max(map(len, rows.values()))
    positions: list[int] = []
    named: list[int] = []
    pieces: list[torch.Tensor] = []
    for row, tokens in rows.items():
        first, count = sum(counts[:row]), counts[row]
        start = row * (1 + drafts.max_spec_len)
        positions += range(start, start + count + 1)
        named += [*tokens, *[_NO_TOKEN] * (most - len(tokens))] * (count + 1)
        pieces += (targets[first : first + count], bonus[row : row + 1])
    logits = torch.cat(pieces).to(torch.float32)
    if not sampler.is_logits_logprobs_mode:
        logits = sampler.sampler.compute_logprobs(logits)
    ids = _upload(named, bonus.device).view(-1, most)
    missing = ids == _NO_TOKEN
    ids = ids.masked_fill(missing, 0)
    logprobs = logits.gather(-1, ids).masked_fill(missing, -torch.inf)
    return _replace(likeliest, _upload(positions, bonus.device), ids, logprobs, first=1)


def _replace(
    table: LogprobsTensors,
    index: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    first: int,
) -> LogprobsTensors:
    """Write values into rows ``index`` of a table, from column ``first``; widen it if needed."""
    missing = max(0, first + ids.shape[1] - table.logprobs.shape[1])
    columns = slice(first, first + ids.shape[1])
    all_ids = F.pad(table.logprob_token_ids, (0, missing))
    all_logprobs = F.pad(table.logprobs, (0, missing), value=-torch.inf)
    all_ids[index, columns] = ids.to(all_ids.dtype)
    all_logprobs[index, columns] = logprobs
    return table._replace(logprob_token_ids=all_ids, logprobs=all_logprobs)


def _upload(values: list[int], device: torch.device) -> torch.Tensor:
    """Upload integers as int64 [n] without a sync."""
    return uploads.pinned(values, is_pin_memory_available()).to(device, non_blocking=True)
