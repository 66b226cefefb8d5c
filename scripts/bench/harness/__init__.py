"""The harness: installations, processes, pairs of sides, and runs written as they come."""
