"""Thinking budgets on a machine without a GPU's driver.

To force a token stock pins memory, whatever the platform, and fails where there is no
driver. :func:`register` is a general plugin of vLLM that has it not do so.
"""


def register() -> None:
    """Make uploads from memory as it is, in this process."""
    from vllm.utils import torch_utils

    torch_utils.async_tensor_h2d.__defaults__ = (False,)
