"""Triton kernels that are not in the file of one feature.

Import a module that imports Triton itself only where it has a driver, or under its interpreter.
"""

# mirrors: nothing
