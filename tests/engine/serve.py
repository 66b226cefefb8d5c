"""Serve, as ``python -m vllm.entrypoints.openai.api_server`` does with these arguments."""

import runpy

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
