"""Which tokens each device holds, and what a ring costs."""
