# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back. Nothing here imports torch: preprocessing starts in well under two seconds."""
