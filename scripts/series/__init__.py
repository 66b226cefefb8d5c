"""The author's loop: lay the patch series out as commits, and write it back.

Standard library and git. Upstream's files come from an installation or a pinned wheel;
nothing of theirs is written outside ``build/`` and the ignored parts of ``vendor_overlay/``.
"""
