"""Sampling: penalties, bad words, thinking budgets, seeds, grammars and their state."""
