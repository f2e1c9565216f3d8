"""The configuration of attention: metadata, platforms, mesh axes and their JSON forms."""
