"""Readiness overlay: decoding state stays on the device, outputs are copied asynchronously.

``registry`` declares the features and fixes, ``engine.switch`` reads which are on, and
``watch.startup`` runs in each model runner's constructor. The package, its folders, ``registry``
and ``engine.switch`` import neither torch nor vLLM's logger, because ``vllm.envs`` imports them.

A patched file imports one module of the overlay as ``readiness``, its door: ``worker`` in the V1
worker, its model runner and batch, elsewhere a folder. A folder imports a module when a patched
file first uses it (PEP 562), because the module may import the patched file.
"""

# mirrors: nothing
