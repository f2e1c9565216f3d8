"""How attention is configured."""
