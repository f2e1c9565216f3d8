"""The functions that users call: `attention()`, `ragged_attention()` and `cascade_attention()`."""
