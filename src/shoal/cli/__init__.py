"""The `shoal` command: words to settings, settings to entry points, and nothing else."""
