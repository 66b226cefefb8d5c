"""Lay the readiness overlay over an installed vLLM, and take it off again.

Standard library only, CPython 3.10 to 3.14. Nothing here imports vllm or torch:
an installation is judged by the checksums of its files, never by running it.
"""
