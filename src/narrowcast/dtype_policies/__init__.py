"""See `docs/`."""
