"""Benchmarks of the overlay against stock vLLM.

Programs are run from a checkout, by the module's name:

    PYTHONPATH=scripts python -m bench.traffic --help

Programs: `traffic` (requests that come and go), `engine` (steady batches on one engine), `serving`
(vLLM's server and client), `step` (one sampling step), `fixes` (what the fixes cost the host),
`host` (the host's work, stock, overlaid and Model Runner V2 in one process), `logprobs` (what they
cost behind the sampler), `report` (the Markdown and page of a run) and `measurements`
(docs/measurements.md). Libraries: `compare` (installations, turns, the summary and the machine),
`engines`, `loops` (those of `traffic`), `runners` (those of `host`), `servers`, `plugins`,
`sampling_step`, `host_work`, `logprob_work`, `reports`, and `thinking`, which the tests use as
well.
"""
