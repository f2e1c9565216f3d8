"""The lab: programs that measure eqattn, and budgets that keep what was measured; see `README.md`."""
