"""Admission: limits and hints decided before any work is done. Standard library only; no I/O, no clock, no dice."""
