"""Outputs of a step: history and readback."""
