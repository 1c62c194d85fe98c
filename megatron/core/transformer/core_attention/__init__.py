# SPDX-License-Identifier: Apache-2.0
"""The core of attention, softmax(scale * Q K^T) V.

dot_product_attention.py   the module of a layer: upstream's signature, sinks, random stream
interface.py               what every implementation takes and returns, and what is visible to a query
select.py                  which implementation a config means
backends                   local.py (the reference), sdpa.py (torch's operator), query_blocks.py, cuda.py (on a GPU)
flex.py                    bounded scores on a GPU
flash.py                   the GPU's flash kernel: sequences in one call, windows, results that can be merged
context parallelism        exchanges.py (gathered keys, heads for tokens), ring.py: around a backend or a kernel
block_kernels.py           attention over some keys, in a form in which results can be merged
max_logits.py              a backend that notes the largest score
"""
