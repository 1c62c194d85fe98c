# SPDX-License-Identifier: Apache-2.0
"""From raw text (.jsonl, .jsonl.gz, .jsonl.zst) to token datasets (.bin, .idx).

input_files     chunks of whole lines, from plain and compressed files
documents       one worker's part: a JSON line becomes token ids, with --split-sentences sentence by sentence
worker_pool     the worker processes
output          final names only for complete files, one job per prefix
job             the whole of it, its progress, and the fastest number of workers
verification    a dataset compared with the text it was made from
"""
