"""Implementations of the core of attention: softmax(Q K^T) V. `select.py` chooses; `local.py` is the reference."""
