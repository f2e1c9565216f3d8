"""The commands of `python -m eqattn`: `info`, `bench` and `tpu-report`."""
