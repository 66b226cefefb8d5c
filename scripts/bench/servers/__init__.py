"""vLLM's server and its client, as one process per side."""
