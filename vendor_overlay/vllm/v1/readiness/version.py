"""Version of the overlay; `make refresh` copies it into VERSION_PIN."""

__version__ = "0.10.0"
