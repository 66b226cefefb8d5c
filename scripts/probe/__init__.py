"""What the probe has recorded, read and shown. Standard library only."""
