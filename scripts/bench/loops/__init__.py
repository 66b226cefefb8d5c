"""Closed-loop traffic: a fixed number of requests in flight, each followed by another."""
