"""The core of attention, softmax(Q K^T) V: backends compute it (`select_backend.py` chooses, `local.py` is the
reference); where context parallelism splits the sequence, an exchange brings queries and keys together
(`gathered_keys.py`, `ring.py`, `head_exchange.py`; `select_exchange.py` chooses). The way in is
`dot_product_attention.py`."""
