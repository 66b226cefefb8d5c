"""Reviews of vLLM releases: verdicts on each patch, and on each name that the overlay uses.

It needs libraries, unlike :mod:`overlay`: it runs where authors and reviewers work.
"""
