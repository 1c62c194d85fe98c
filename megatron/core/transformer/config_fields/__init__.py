# SPDX-License-Identifier: Apache-2.0
"""The field groups of TransformerConfig, one concern per file."""
