"""Write the variables that vLLM keys its caches of compiled code by.

    python factors.py MODEL_DIR OUT.json

Fails if a variable is set that vLLM does not know.
"""

import json
import sys
from pathlib import Path


def main(out: Path) -> None:
    """Write them, name to value."""
    import vllm.envs

    vllm.envs.validate_environ(hard_fail=True)
    out.write_text(json.dumps(vllm.envs.compile_factors(), default=str))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
