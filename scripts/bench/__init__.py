"""Benchmarks of stock vLLM, the overlay and Model Runner V2, in pairs.

- :mod:`bench.traffic`: engines under closed-loop traffic, the main benchmark
- :mod:`bench.parts`: the host's time in each part of a step, under the same traffic
- :mod:`bench.serving`: ``vllm serve`` under closed-loop streams, or ``vllm bench serve``
- :mod:`bench.report`: the tables of a run file, and joined runs
- :mod:`bench.measurements`: docs/measurements.md
"""
