"""vLLM's server, as one process per side, and its clients."""
