"""Report of the probe's metrics. Standard library only."""
