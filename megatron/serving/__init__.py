# SPDX-License-Identifier: Apache-2.0
"""A trained model served over HTTP: the engine in one thread, the server in another. Training does not import it."""
