"""Metrics, tracing and structured logs. Nothing yet: a lane's figures are counted in `engine/recorder.py`."""
