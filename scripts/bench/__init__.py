"""Benchmarks of stock vLLM, the overlay and Model Runner V2, in pairs.

- :mod:`bench.traffic`: engines under closed-loop traffic, the main benchmark
- :mod:`bench.serving`: ``vllm serve`` under closed-loop streams, or ``vllm bench serve``
- :mod:`bench.host`: the host's work in each part of a step, and of the scheduler alone
- :mod:`bench.report`: the tables of a run file, and joined runs
- :mod:`bench.measurements`: docs/measurements.md

:mod:`bench.harness` runs processes, :mod:`bench.results` holds the one type of result, a slice.
"""
