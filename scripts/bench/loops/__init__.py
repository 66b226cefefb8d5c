"""Requests for engines under closed-loop traffic."""
