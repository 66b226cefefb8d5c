"""What a new vLLM release means for the overlay: `make review RELEASE=version`."""
