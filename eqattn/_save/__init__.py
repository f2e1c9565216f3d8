"""Strategies and metadata in files."""
