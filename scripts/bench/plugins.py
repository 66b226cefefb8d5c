"""General plugins of vLLM that the benchmarks load in every process of an engine."""

from __future__ import annotations

from pathlib import Path


def announce(folder: Path, function: str) -> Path:
    """Make a path entry that announces a function as a general plugin of vLLM.

    Args:
        folder: is created; its name is the plugin's.
        function: as "module:name".
    """
    metadata = folder / f"bench_{folder.name}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bench-{folder.name}\n")
    entry = f"[vllm.general_plugins]\nbench_{folder.name} = {function}\n"
    (metadata / "entry_points.txt").write_text(entry)
    return folder
