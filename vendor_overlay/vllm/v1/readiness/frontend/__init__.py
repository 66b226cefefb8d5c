"""The front end: logprobs, messages, refused requests."""
