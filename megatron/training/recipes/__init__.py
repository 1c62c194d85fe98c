# SPDX-License-Identifier: Apache-2.0
"""Recipes: the parts that are particular to a kind of model, such as its construction, data and forward step."""
