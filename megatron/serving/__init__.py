# SPDX-License-Identifier: Apache-2.0
"""A trained model behind HTTP: the engine in one thread, the server in another. No training imports it."""
