"""Eagleray: raw text to a served model on your own Ray cluster."""

__version__ = "0.1.0"

__all__ = ["__version__"]
