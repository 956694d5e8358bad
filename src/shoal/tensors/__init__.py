"""Requests against a model's signature, rows gathered into one array, answers taken apart. No JSON, no scheduler, no threads."""
