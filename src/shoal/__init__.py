"""Shoal gathers independent inference requests into batches, runs each batch as one tensor operation, and answers one by one.

This module holds the public names of the library and nothing else.
"""

__version__ = "0.1.0"
