"""The scheduler and the KV cache manager."""
