"""What the tests share: real installations, a small synthetic one, and faults."""
