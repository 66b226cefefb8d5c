"""The benchmark of one engine: its rows of requests, its driver, and the summary of a run."""
