"""Writes strategies and metadata to files, and reads them."""
