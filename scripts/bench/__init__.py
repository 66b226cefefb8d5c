"""Benchmarks of the overlay against stock vLLM.

Programs are run from a checkout, by the module's name:

    PYTHONPATH=scripts python -m bench.engine --help

Programs: `engine` (requests on one engine), `serving` (vLLM's server and client), `step` (one
sampling step), `probe_cost` (the probe's own cost), `report` (the page and table of a run) and
`measurements` (docs/measurements.md). Libraries: `compare` (installations, turns, machine),
`engines`, `servers`, `reports`, and `thinking`, which the tests use as well.
"""
