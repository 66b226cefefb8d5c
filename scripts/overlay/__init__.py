"""Lay the readiness overlay over an installed vLLM, and take it off again.

Standard library only, CPython 3.10 to 3.14. Nothing here imports vllm or
torch: checksums of its files decide what an installation is, and it is never run.
"""
