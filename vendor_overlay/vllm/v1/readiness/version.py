"""The overlay's version. `make refresh` carries it into VERSION_PIN."""

__version__ = "0.9.0"
