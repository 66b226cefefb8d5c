"""Start-up checks, the sync guard, scopes and the probe."""
