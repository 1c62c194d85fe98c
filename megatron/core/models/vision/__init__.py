# SPDX-License-Identifier: Apache-2.0
"""Models of images: patches to features."""
