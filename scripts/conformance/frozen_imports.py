"""A pytest plugin that spares a garbage collection what was imported before the first test.

After each test upstream's fixture unfreezes and collects everything. With vLLM and torch imported
that takes most of a second, and most tests take less.
"""

import gc


def pytest_collection_finish() -> None:
    """Keep all objects there are out of later collections."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
