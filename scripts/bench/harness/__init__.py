"""The harness: installations, processes, and pairs of sides."""
