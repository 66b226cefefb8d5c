"""Apply the readiness overlay to an installed vLLM, and revert it.

Standard library only, CPython 3.10 to 3.14. vllm and torch are never imported: checksums of
the installed files decide the state of an installation.
"""
