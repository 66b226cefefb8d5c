"""A progress bar where there is tqdm, and lines where there is none."""

from __future__ import annotations

from typing import Any


class _Quiet:
    """In place of a bar where there is no tqdm."""

    def set_description(self, text: str) -> None:
        print(text, flush=True)

    def update(self, _: int) -> None: ...

    def write(self, text: str) -> None:
        print(text, flush=True)


class progress:
    """A progress bar with an estimate of what is left."""

    def __init__(self, total: int) -> None:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            self._bar: Any = None
        else:
            self._bar = tqdm(total=total, unit="case", dynamic_ncols=True, smoothing=0.1)

    def __enter__(self) -> Any:
        return self._bar if self._bar is not None else _Quiet()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
