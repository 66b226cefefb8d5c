"""Benchmarks of the overlay against stock vLLM.

Programs are run from a checkout, by the module's name:

    PYTHONPATH=scripts python -m bench.engine --help

Programs: `engine` (requests on one engine), `serving` (vLLM's server and client), `step` (one
sampling step), `fixes` (what the fixes cost the host), `host` (the host's work, stock, overlaid and
Model Runner V2 in one process), `logprobs` (what they cost behind the sampler), `report` (the
Markdown and page of a run) and `measurements` (docs/measurements.md). Libraries: `compare`
(installations, turns, the summary and the machine), `engines`, `runners` (those of `host`),
`servers`, `sampling_step`, `host_work`, `logprob_work`, `reports`, and `thinking`, which the tests
use as well.
"""
