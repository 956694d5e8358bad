"""Loaded models: arrays in, arrays out. ONNX Runtime, Python callables, their choice by path, thread budgets, the load-time probe.

Backends know nothing of tickets, batches, requests or protocols. `base.py` is what each of them promises.
"""
