"""A progress bar, or lines where tqdm is not installed."""

from __future__ import annotations

from typing import Any


class _Lines:
    """A stand-in for the bar that prints lines."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_description(self, text: str) -> None:
        print(text, flush=True)

    def update(self, _: int) -> None: ...

    def write(self, text: str) -> None:
        print(text, flush=True)


def progress(total: int) -> Any:
    """Return a context manager: a bar of ``total`` cases, with an estimate of what is left."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return _Lines()
    return tqdm(total=total, unit="case", dynamic_ncols=True, smoothing=0.1)
