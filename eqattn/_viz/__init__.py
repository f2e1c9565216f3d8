"""The pictures of `eqattn.viz`."""

try:
    import matplotlib as matplotlib
except ImportError as e:
    raise ImportError("eqattn.viz needs matplotlib: python -m pip install -e '.[viz]'") from e
