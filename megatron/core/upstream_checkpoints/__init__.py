# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in upstream's formats, read and written for any layout.

common_state, settings         where one is, in which format, and what lies next to its tensors
names, sections                its tensors under our names, and ours under its names
flat_state, flat_layout        state of its distributed optimizer in flat buckets
rank_file, rank_files          its torch: a pickled file for each rank
write_...                      the same, written; pickles: without any class of upstream's
stored_tensors, diagnosis      tools that look into checkpoints of all formats
"""
