"""Requests for engines: closed-loop traffic, and steady batches."""
