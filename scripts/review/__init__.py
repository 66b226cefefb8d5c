"""What a release of vLLM means for the overlay.

Not standard library only, as :mod:`overlay` is: it runs where authors and reviewers work.
"""
