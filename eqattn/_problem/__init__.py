"""One call: checked, canonical, and cut into blocks."""
