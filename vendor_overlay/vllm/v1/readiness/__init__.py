"""The readiness overlay.

State that decoding needs stays on the device; outputs are copied to the host beside it.

``features`` names what there is, ``switch`` says what is on, ``startup`` is called by
each model runner's constructor. Importing the package, ``features`` or ``switch`` pulls
in neither torch nor vLLM's logger, because ``vllm.envs`` imports them.
"""
