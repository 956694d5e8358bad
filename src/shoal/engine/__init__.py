"""Drives schedulers: lanes on the event loop, executors, model lifecycle, statistics. The only owner of clocks and threads."""
