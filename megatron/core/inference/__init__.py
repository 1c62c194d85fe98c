# SPDX-License-Identifier: Apache-2.0
"""Generating text: a key-value cache, the choice of the next token, and the loop around them."""
