"""Upstream's own tests, run against a pristine and an overlaid installation."""
