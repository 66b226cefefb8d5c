"""What every process of an engine shares: switch, ranks, identity, fences, gauges."""
