"""Engines, or schedulers, of several sides in one process; their steps are interleaved."""
