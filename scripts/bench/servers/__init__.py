"""The benchmark of serving: vLLM's server and client as processes, and their table."""
